#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Start, stop or restart one Proxmox container, and wait until it is in that state."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_state
short_description: Start, stop or restart one Proxmox container
version_added: 0.1.0
description:
  - Runs on a Proxmox VE node as root.
  - V(present) only looks.
author: The Servelab developers
options:
  vmid:
    description: The number of the guest.
    type: int
    required: true
  state:
    description:
      - What the guest shall be. V(restarted) shuts it down and starts it, so that what is pending takes effect.
    type: str
    choices: [present, started, stopped, restarted]
    default: present
  timeout:
    description: Seconds that the guest may take to shut down before it is stopped, and C(pct) to answer.
    type: int
    default: 120
attributes:
  check_mode:
    description: Tells what would change, without changing it.
    support: full
  diff_mode:
    description: Shows the state before and after.
    support: full
"""

EXAMPLES = r"""
- name: Start the guest
  servelab.sglang.pct_state:
    vmid: 129
    state: started
"""

RETURN = r"""
exists:
  description: Whether the node has this guest.
  returned: always
  type: bool
status:
  description: V(running), V(stopped) or V(absent), as it is now.
  returned: always
  type: str
"""

import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.pct_config import explain
from ansible_collections.servelab.sglang.plugins.module_utils.pct_run import Answer, PctMissing, run_pct
from ansible_collections.servelab.sglang.plugins.module_utils.pve_cluster import ha_state, unwritable


class Guest:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.vmid = str(module.params["vmid"])

    def pct(self, *args: str) -> Answer:
        try:
            # Twice the guest's own time: the shutdown may use all of it before pct stops the guest.
            return run_pct(*args, timeout=2 * self.module.params["timeout"] + 30)
        except PctMissing as missing:
            self.module.fail_json(msg=str(missing))
            raise

    def status(self) -> str:
        answer = self.pct("status", self.vmid)
        if answer.rc == 0 and answer.out.startswith("status: "):
            return answer.out.split()[1]
        if "does not exist" in answer.err:
            return "absent"
        self.module.fail_json(msg=f"pct status {self.vmid} failed: {explain(answer.said, int(self.vmid))}")
        raise AssertionError  # fail_json does not return

    def act(self, *args: str) -> None:
        answer = self.pct(*args)
        if answer.rc != 0:
            self.module.fail_json(
                msg=f"pct {args[0]} {self.vmid} was refused: {explain(answer.said, int(self.vmid))}",
                command=["pct", *args],
                rc=answer.rc,
            )

    def wait(self, state: str) -> None:
        deadline = time.monotonic() + self.module.params["timeout"]
        while self.status() != state:
            if time.monotonic() > deadline:
                self.module.fail_json(
                    msg=f"Guest {self.vmid} is not {state} after {self.module.params['timeout']} s; look at "
                    f"`pct status {self.vmid}` and `journalctl -u pve-container@{self.vmid}` on the node."
                )
            time.sleep(0.5)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "vmid": {"type": "int", "required": True},
            "state": {
                "type": "str",
                "choices": ["present", "started", "stopped", "restarted"],
                "default": "present",
            },
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    guest = Guest(module)
    wanted = {"started": "running", "restarted": "running", "stopped": "stopped"}.get(module.params["state"])
    now = guest.status()
    changed = wanted is not None and (now != wanted or module.params["state"] == "restarted")
    if changed and now == "absent" and not module.check_mode:
        module.fail_json(msg=f"Guest {guest.vmid} does not exist on this node; create it first, or correct vmid.")
    diff = {"before": f"{now}\n", "after": f"{wanted or now}\n"}
    if not changed or module.check_mode:
        module.exit_json(changed=changed, exists=now != "absent", status=now, diff=diff)
    if sentence := unwritable():
        module.fail_json(msg=sentence)
    ha = ha_state(int(guest.vmid))
    if ha and ha.state == "error":
        module.fail_json(
            msg=f"HA has given guest {guest.vmid} up (state error) and carries out no request for it; find out why "
            f"(`ha-manager status`), then `ha-manager set ct:{guest.vmid} --state disabled` and run again."
        )
    if wanted == "stopped" or (module.params["state"] == "restarted" and now == "running"):
        guest.act("shutdown", guest.vmid, "--timeout", str(module.params["timeout"]), "--forceStop", "1")
        guest.wait("stopped")
    if wanted == "running":
        guest.act("start", guest.vmid)
        guest.wait("running")
    module.exit_json(changed=True, exists=True, status=guest.status(), diff=diff)


if __name__ == "__main__":
    main()
