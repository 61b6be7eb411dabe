#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Start, stop or look at a unit, whichever supervisor the machine has."""

from __future__ import annotations

DOCUMENTATION = r"""
module: unit
short_description: Start, stop or look at a unit under systemd or under the collection's own supervisor
version_added: 0.1.0
description:
  - The one way in which the roles start and stop servers and load clients.
  - Starting does not wait until a server answers; P(servelab.sglang.server_probe#module) tells that. Stopping waits
    until nothing of the unit is left, and leaves no failure behind.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  name:
    description: Name of the unit. With O(state=stopped) it may be a shell pattern.
    type: str
    required: true
  state:
    description: What to bring it into. V(observed) only looks.
    type: str
    choices: [started, stopped, restarted, observed]
    default: observed
  command:
    description: Start this once as the unit, instead of what a unit file says.
    type: list
    elements: str
  environment:
    description: Environment of O(command). Never a secret.
    type: dict
    default: {}
  reads:
    description: Files that its process reads at its start and never again. The unit's own file need not be named.
    type: list
    elements: path
    default: []
  log:
    description: File to which O(command) writes. Needed with it.
    type: path
  pins_memory:
    description: Whether O(command) pins memory, as CUDA and NCCL do, so that it must not be limited.
    type: bool
    default: false
attributes:
  check_mode:
    support: full
    description: Says what would change, and looks.
  diff_mode:
    support: none
    description: A unit has no text here.
"""

EXAMPLES = r"""
- name: Start the server of the baseline
  servelab.sglang.unit:
    name: servelab-baseline.service
    state: started
"""

RETURN = r"""
exists:
  description: Whether there is such a unit.
  returned: always
  type: bool
active:
  description: Whether it is neither inactive nor failed, now.
  returned: always
  type: bool
outdated:
  description: Which of the unit's file and O(reads) were written since it was started, so that it runs with what they
    said before. Empty when it does not run.
  returned: always
  type: list
  elements: str
invocation_id:
  description: The id of its last start, by which its log is found. Empty when it was never started.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import (
    SUPERVISOR_OPTIONS,
    SuperviseError,
    Supervisor,
    outdated,
    supervisor,
)


def bring(module: AnsibleModule, keeper: Supervisor) -> bool:
    """Bring the unit into the wanted state; whether that changed something."""
    name, state = module.params["name"], module.params["state"]
    if state == "stopped":
        names = keeper.running(name) if "*" in name else [name]
        if module.check_mode:
            return any(is_active(keeper, one) for one in names)
        # All of them, also after the first that changed something.
        return True in [keeper.stop(one) for one in names]
    if state == "observed" or (state == "started" and is_active(keeper, name)):
        return False
    if module.check_mode:
        return True
    if module.params["command"]:
        limits = {"LimitNOFILE": "65536"} | ({"LimitMEMLOCK": "infinity"} if module.params["pins_memory"] else {})
        environment = {key: str(value) for key, value in module.params["environment"].items()}
        keeper.run(name, module.params["command"], environment, module.params["log"], limits)
        return True
    if state == "restarted":
        keeper.stop(name)
    return keeper.start(name)


def is_active(keeper: Supervisor, name: str) -> bool:
    """Whether a unit runs, or is about to, or is about to end."""
    return keeper.show(name).get("ActiveState", "") not in ("inactive", "failed", "")


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "state": {
                "type": "str",
                "choices": ["started", "stopped", "restarted", "observed"],
                "default": "observed",
            },
            "command": {"type": "list", "elements": "str"},
            "environment": {"type": "dict", "default": {}},
            "reads": {"type": "list", "elements": "path", "default": []},
            "log": {"type": "path"},
            "pins_memory": {"type": "bool", "default": False},
            **SUPERVISOR_OPTIONS,
        },
        required_by={"command": ["log"]},
        supports_check_mode=True,
    )
    keeper = supervisor(module.params["supervisor"], module.params["prefix"])
    try:
        changed = bring(module, keeper)
        shown = keeper.show(module.params["name"])
        late = outdated(keeper, module.params["name"], module.params["reads"])
    except (SuperviseError, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        exists=shown.get("LoadState") != "not-found",
        active=shown.get("ActiveState", "") not in ("inactive", "failed", ""),
        outdated=late,
        invocation_id=shown.get("InvocationID", ""),
    )


if __name__ == "__main__":
    main()
