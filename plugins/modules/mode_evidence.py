#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Whether the running server does what its mode is for, from its own log and settings."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: mode_evidence
short_description: See in a server's own words that its mode engaged
version_added: 0.1.0
description:
  - Reads the log of the unit's running start and the server's settings, looks which variables reached the processes
    that compute, and holds it all against the probe of the mode in C(etc/servelab/modes/) below
    O(prefix). SGLang goes on with NCCL when another way fails, and says so only in its log.
  - Fails when the mode did not engage.
author: Servelab contributors (@servelab)
extends_documentation_fragment: servelab.sglang.supervisor
options:
  mode:
    description: Name of the mode.
    type: str
    required: true
  unit:
    description: The mode's unit.
    type: str
    required: true
  host:
    description: Address on which the server listens.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which the server listens.
    type: int
    required: true
  timeout:
    description: Seconds to wait for the server's settings.
    type: int
    default: 30
attributes:
  check_mode:
    description: Runs in check mode, as it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: See that the custom all-reduce is in use
  servelab.sglang.mode_evidence:
    mode: custom_ar_pcie
    unit: servelab-custom_ar_pcie.service
    port: 30000
"""

RETURN = r"""
engaged:
  description: Null where the mode does not say how it would be known.
  returned: always
  type: bool
reason:
  description: One sentence.
  returned: always
  type: str
seen:
  description: Log lines and settings that show it, secrets redacted.
  returned: always
  type: list
  elements: str
against:
  description: Log lines that say otherwise.
  returned: always
  type: list
  elements: str
unknown:
  description: What the server does not tell.
  returned: always
  type: list
  elements: str
cause:
  description: The same as RV(reason), where the module fails.
  returned: failure
  type: str
"""

import json
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.modes_evidence import judge
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import ask, use_key_of
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import (
    SUPERVISOR_OPTIONS,
    Supervisor,
    supervisor,
)

MODES = "etc/servelab/modes"


def start_log(module: AnsibleModule, keeper: Supervisor, unit: str) -> str:
    """What the unit's running start wrote, from its first line."""
    invocation = keeper.show(unit).get("InvocationID", "")
    if not invocation:
        module.fail_json(msg=f"{unit} does not run, so nothing can be seen of its mode.")
    return keeper.log(invocation)


def schedulers(pids: set[int]) -> dict[int, dict[str, str] | None]:
    """The environment of each scheduler of the unit as its process was started, None where it cannot be read.

    A process that gives itself a title writes over its environment unless E(SPT_NOENV) is set, as it is in our units.
    """
    found: dict[int, dict[str, str] | None] = {}
    for pid in sorted(pids):
        try:
            if not Path(f"/proc/{pid}/comm").read_text().startswith("sglang::schedul"):
                continue
            raw = Path(f"/proc/{pid}/environ").read_bytes().decode("utf-8", "replace")
        except OSError:
            continue
        pairs = [entry.partition("=") for entry in raw.split("\0") if "=" in entry]
        found[pid] = {name: value for name, _, value in pairs} or None
    return found


def settings(url: str, timeout: int) -> dict[str, Any] | None:
    """What the server resolved its flags to; releases name the place differently."""
    for place in ("server_info", "get_server_info"):
        answer = ask(f"{url}/{place}", timeout)
        if answer.status == 200 and isinstance(answer.body, dict):
            return answer.body
    return None


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "required": True},
            "unit": {"type": "str", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "timeout": {"type": "int", "default": 30},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    asked = module.params
    use_key_of(asked["prefix"])
    file = Path(f"{asked['prefix'].rstrip('/')}/{MODES}/{asked['mode']}.json")
    try:
        mode = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        module.fail_json(msg=f"{file} cannot be read ({error}); it is written together with the mode's unit.")
    info = settings(f"http://{asked['host']}:{asked['port']}", asked["timeout"])
    keeper = supervisor(asked["supervisor"], asked["prefix"])
    log = start_log(module, keeper, asked["unit"])
    verdict = judge(mode, log, info, schedulers(keeper.pids(asked["unit"])))
    result = {
        "engaged": verdict.engaged,
        "reason": verdict.reason,
        "seen": verdict.seen,
        "against": verdict.against,
        "unknown": verdict.unknown,
    }
    if verdict.engaged is False:
        module.fail_json(msg=verdict.reason, cause=verdict.reason, **result)
    module.exit_json(changed=False, **result)


if __name__ == "__main__":
    main()
