#!/usr/bin/python
# Copyright: the Servelab developers
# SPDX-License-Identifier: Apache-2.0
"""One look at a starting server, from the unit's state up to an answered long prompt."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_probe
short_description: One look at how far an SGLang server has come
version_added: 0.1.0
description:
  - Climbs the readiness ladder once and says where it stands - the unit lives and does not restart, a process of the
    unit owns the port, health answers, a completion is answered by the right model, a long prompt is answered.
  - The last state wins. A server that said that it is ready and died is failed, with a named cause and one remedy.
  - Meant to be polled by P(servelab.sglang.watch#module). It changes nothing.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  unit:
    description: Name of the unit that runs the server.
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
  model:
    description: Name of the model that must be served. Without it any model is accepted.
    type: str
  invocation_id:
    description: >-
      The supervisor's id of the start that is watched, as P(servelab.sglang.unit#module) returned it. A supervisor
      forgets a unit that ended well, and its log is found by this.
    type: str
    default: ""
  started:
    description: Whether the unit is known to have been started, so that one that does not run has ended by itself.
    type: bool
    default: false
  rank:
    description: >-
      Rank of this guest in a server over several. All but 0 are never V(done) - they are up until they failed, and the
      guest with rank 0 answers for all.
    type: int
    default: 0
  health_timeout:
    description: Seconds for C(/health), which generates a token and takes a second and more. At least 5.
    type: int
    default: 10
  request_timeout:
    description: Seconds for a completion.
    type: int
    default: 120
  completion_tokens:
    description: Tokens to ask for in the short completion.
    type: int
    default: 8
  prompt_words:
    description: Words in the long prompt. Cut down to a quarter of the model's context.
    type: int
    default: 1500
attributes:
  check_mode:
    support: full
    description: Looks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Look once at the server of the baseline
  servelab.sglang.server_probe:
    unit: servelab-baseline.service
    port: 30000
"""

RETURN = r"""
state:
  description: V(working), V(done) or V(failed).
  returned: always
  type: str
phase:
  description: The rung of the ladder or the step of the start.
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
  description: Why the server failed, null while it did not.
  returned: always
  type: str
remedy:
  description: What to do about it.
  returned: always
  type: str
evidence:
  description: The log line that shows the cause, secrets redacted.
  returned: always
  type: str
peer_lost:
  description: Whether the failure is only the consequence of another rank's.
  returned: always
  type: bool
tail:
  description: The last lines of the log where the cause is unknown.
  returned: always
  type: list
  elements: str
warnings_found:
  description: What a person should know although the server serves.
  returned: always
  type: list
  elements: str
if_stalled:
  description: What to do if nothing more comes from a start at this step, null where that is not known.
  returned: always
  type: str
elapsed:
  description: Seconds since the server's process was started.
  returned: always
  type: float
models:
  description: Names of the models that the server lists.
  returned: always
  type: list
  elements: str
invocation_id:
  description: The supervisor's id of this start; its log is found by it.
  returned: always
  type: str
"""

import os
import re
import time
from dataclasses import replace

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.ports import port_owner
from ansible_collections.servelab.sglang.plugins.module_utils.readiness import Look, judge
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_diagnosis import Exit
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import (
    ask,
    complete,
    long_prompt,
    use_key_of,
)
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import (
    SUPERVISOR_OPTIONS,
    Supervisor,
    supervisor,
)

CODES = {"1": "exited", "2": "killed", "3": "dumped"}
# systemd's exit status of a program that it could not give the namespaces of its unit.
NAMESPACE = 226


def show(module: AnsibleModule, keeper: Supervisor, unit: str) -> dict[str, str]:
    """The unit's properties. Fails for a unit that does not exist."""
    found = keeper.show(unit)
    if found.get("LoadState") == "not-found":
        module.fail_json(msg=f"There is no unit {unit} on this machine; site.yml renders the units of the modes.")
    return found


def kernel_since(microseconds: int) -> str:
    """The kernel's messages since a moment of CLOCK_MONOTONIC; empty where they cannot be read (most guests)."""
    lines = []
    try:
        kernel = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK)
    except OSError:
        return ""
    try:
        while True:
            try:
                head, _, said = os.read(kernel, 8192).decode("utf-8", "replace").partition(";")
            except BrokenPipeError:  # The oldest were overwritten meanwhile.
                continue
            fields = head.split(",")
            if len(fields) > 2 and fields[2].isdigit() and int(fields[2]) >= microseconds:
                lines.append(said.splitlines()[0] if said else "")
    except OSError:  # Nothing more (BlockingIOError), or not allowed.
        pass
    finally:
        os.close(kernel)
    return "\n".join(lines)


def checks_before(module: AnsibleModule, unit: str) -> str:
    """How systemd saw the checks before the start end; empty where it does not keep the unit."""
    if module.params["supervisor"] != "systemd":
        return ""
    _, out, _ = module.run_command(["systemctl", "show", unit, "--property=ExecStartPre"])
    return out


def refused_node(checks: str) -> str | None:
    """The device node whose check before the start failed, None where that is not known."""
    failed = re.search(r"argv\[\]=/usr/bin/test -c (\S+) ;(?:(?!argv\[\]).)*?code=exited ; status=1\b", checks)
    return failed[1] if failed else None


def take_a_look(module: AnsibleModule) -> tuple[Look, str]:
    """Climb the ladder as far as it goes, then look at the ground again: the last state wins."""
    asked = module.params
    keeper = supervisor(asked["supervisor"], asked["prefix"])
    unit = show(module, keeper, asked["unit"])
    invocation = asked["invocation_id"] or unit.get("InvocationID", "")
    url = f"http://{asked['host']}:{asked['port']}"
    look = Look(
        port=asked["port"],
        expected_model=asked["model"],
        short_tokens=asked["completion_tokens"],
        watched=asked["started"] or bool(asked["invocation_id"]),
        rank=asked["rank"],
    )

    def ground() -> None:
        now = show(module, keeper, asked["unit"])
        begun = int(now.get("ExecMainStartTimestampMonotonic") or 0)
        look.active = now["ActiveState"]
        look.restarts = int(now.get("NRestarts") or 0)
        if now.get("InvocationID") not in ("", invocation):
            look.restarts = max(look.restarts, 1)
        look.end = Exit(
            CODES.get(now.get("ExecMainCode", "")),
            int(now["ExecMainStatus"]) if now.get("ExecMainCode") in CODES else None,
            now.get("Result"),
            # A check before the start that refuses leaves the main process of this start unborn.
            not (
                look.active == "failed"
                and now.get("Result") == "exit-code"
                and begun < int(now.get("InactiveExitTimestampMonotonic") or 0)
            ),
        )
        if not look.end.started:
            checks = checks_before(module, asked["unit"])
            look.end = replace(look.end, node=refused_node(checks), sandboxed=f"status={NAMESPACE}" not in checks)
        look.elapsed = max(0.0, time.clock_gettime(time.CLOCK_MONOTONIC) - begun / 1e6) if begun else 0.0
        look.log = keeper.log(invocation)
        look.kernel = kernel_since(begun) if begun and look.active in ("failed", "inactive") else ""
        look.owner = port_owner(asked["port"], keeper.pids(asked["unit"])) if look.active == "active" else None

    ground()
    if look.owner == "ours" and not look.rank:
        look.health = ask(f"{url}/health", max(5, asked["health_timeout"]))
        if look.health.status == 200:
            listed = ask(f"{url}/v1/models", asked["health_timeout"]).body
            entries = listed.get("data") or [] if isinstance(listed, dict) else []
            look.models = [str(entry.get("id")) for entry in entries]
            model = asked["model"] or (look.models[0] if look.models else None)
            context = entries[0].get("max_model_len") if entries else None
            words = min(asked["prompt_words"], context // 4) if isinstance(context, int) else asked["prompt_words"]
            # Half a token a word is less than any tokenizer makes of English.
            look.long_tokens = words // 2
            look.short = complete(url, model, long_prompt(8), look.short_tokens, asked["request_timeout"])
            if look.short.status == 200:
                look.long = complete(url, model, long_prompt(words), 4, asked["request_timeout"])
        ground()
    return look, invocation


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "model": {"type": "str"},
            "invocation_id": {"type": "str", "default": ""},
            "started": {"type": "bool", "default": False},
            "rank": {"type": "int", "default": 0},
            "health_timeout": {"type": "int", "default": 10},
            "request_timeout": {"type": "int", "default": 120},
            "completion_tokens": {"type": "int", "default": 8},
            "prompt_words": {"type": "int", "default": 1500},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    use_key_of(module.params["prefix"])
    look, invocation = take_a_look(module)
    verdict = judge(look)
    module.exit_json(
        changed=False,
        state=verdict.state,
        phase=verdict.phase,
        progress=verdict.progress,
        marker=verdict.marker,
        cause=verdict.cause,
        remedy=verdict.remedy,
        evidence=verdict.evidence,
        peer_lost=verdict.peer_lost,
        tail=verdict.tail,
        warnings_found=verdict.warnings,
        if_stalled=verdict.if_stalled,
        elapsed=round(look.elapsed, 1),
        models=look.models,
        invocation_id=invocation,
    )


if __name__ == "__main__":
    main()
