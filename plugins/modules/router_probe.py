#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""One look at a router, from its unit's state up to a completion through it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: router_probe
short_description: One look at how far SGLang's router has come
version_added: 0.1.0
description:
  - Says whether the unit lives, whether it owns the port, which servers the router uses, and whether a completion comes
    through it.
  - A server that the router does not use is asked itself, so that it is named with its reason.
  - Meant to be polled by P(servelab.sglang.watch#module). It changes nothing.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  unit:
    description: Name of the router's unit.
    type: str
    required: true
  host:
    description: Address on which it listens.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which it listens.
    type: int
    required: true
  replicas:
    description: The servers that it must use, each with C(name) and C(url).
    type: list
    elements: dict
    required: true
  model:
    description: Name of the model for the completion. Without it no completion is asked for.
    type: str
  keys:
    description: File on the machine with the keys. It need not exist.
    type: path
  timeout:
    description: Seconds for the completion.
    type: int
    default: 120
attributes:
  check_mode:
    support: full
    description: Looks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Look once at the router
  servelab.sglang.router_probe:
    unit: servelab-sglang-router.service
    port: 30100
    replicas: "{{ groups['gpu_guests'] | servelab.sglang.router_replicas(hostvars, inventory_hostname) }}"
"""

RETURN = r"""
state:
  description: V(working), V(done) or V(failed).
  returned: always
  type: str
progress:
  description: A sentence for a person.
  returned: always
  type: str
marker:
  description: Changes exactly when there is progress.
  returned: always
  type: str
cause:
  description: Why the router failed, null while it did not.
  returned: always
  type: str
remedy:
  description: What to do about it.
  returned: always
  type: str
tail:
  description: The last lines of the log of a router that ended.
  returned: always
  type: list
  elements: str
if_stalled:
  description: What to do if nothing more comes, null where that is not known.
  returned: always
  type: str
"""

import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.ports import port_owner
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import ask, complete, long_prompt, use_key
from ansible_collections.servelab.sglang.plugins.module_utils.router import healthy, url_of
from ansible_collections.servelab.sglang.plugins.module_utils.router_judge import RouterLook, judge
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor

SECONDS = 10
TOKENS = 8


def keys_of(path: str | None) -> dict[str, str]:
    """The keys in the role's file, none where there is no such file."""
    try:
        found: dict[str, str] = json.loads(Path(path).read_text(encoding="utf-8")) if path else {}
    except FileNotFoundError:
        return {}
    return found


def take_a_look(module: AnsibleModule) -> RouterLook:
    """Climb as far as it goes, then look at the ground again: the last state wins."""
    asked = module.params
    keeper, unit = supervisor(asked["supervisor"], asked["prefix"]), asked["unit"]
    keys = keys_of(asked["keys"])
    url = url_of(asked["host"], asked["port"])
    look = RouterLook(asked["replicas"], port=asked["port"], tokens=TOKENS)

    def ground() -> None:
        shown = keeper.show(unit)
        look.active = shown.get("ActiveState", "inactive")
        ended = shown.get("ExecMainCode", "0") not in ("", "0")
        look.status = int(shown.get("ExecMainStatus") or 0) if ended else None
        look.owner = port_owner(asked["port"], keeper.pids(unit)) if look.active == "active" else None
        look.log = keeper.log(shown.get("InvocationID", ""))

    ground()
    if look.owner == "ours":
        # The list belongs to whoever may change it.
        use_key(keys.get("admin-api-key") or keys.get("api-key", ""))
        look.workers = ask(f"{url}/workers", SECONDS)
        use_key(keys.get("api-key", ""))
        used = healthy(look.workers.body)
        missing = [one for one in asked["replicas"] if one["url"] not in used]
        look.replies = {one["name"]: ask(f"{one['url']}/v1/models", SECONDS) for one in missing}
        if asked["model"] and not missing:
            look.completion = complete(url, asked["model"], long_prompt(8), TOKENS, asked["timeout"])
        ground()
    return look


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "replicas": {"type": "list", "elements": "dict", "required": True},
            "model": {"type": "str"},
            "keys": {"type": "path", "no_log": False},
            "timeout": {"type": "int", "default": 120},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    verdict = judge(take_a_look(module))
    module.exit_json(
        changed=False,
        state=verdict.state,
        progress=verdict.progress,
        marker=verdict.marker,
        cause=verdict.cause,
        remedy=verdict.remedy,
        tail=verdict.tail,
        if_stalled=verdict.if_stalled,
    )


if __name__ == "__main__":
    main()
