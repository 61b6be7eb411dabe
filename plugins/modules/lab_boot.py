#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Whether a lab's node is up, whole and reachable."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_boot
short_description: Wait until a lab's node has booted and answers ssh
version_added: 0.1.0
description:
  - Boot ends when the simulated GPUs answer and the guests that start with the node are started.
  - Fails with the units that failed, and with the command that shows why.
options:
  lxc_path:
    description: The directory that holds the container's directory.
    type: path
    required: true
  name:
    description: The container's name.
    type: str
    required: true
  address:
    description: Where it answers ssh.
    type: str
    required: true
  timeout:
    description: Seconds until the node must have booted.
    type: int
    default: 180
attributes:
  check_mode:
    description: Looks only, in check mode too.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Wait for the node
  servelab.sglang.lab_boot:
    lxc_path: /var/lib/servelab-lab/0a1b2c
    name: servelab-0a1b2c-pve1
    address: 10.200.1.11
"""

RETURN = r"""
seconds:
  description: How long it took.
  returned: success
  type: float
"""

import os
import socket
import subprocess
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import with_sbin


def answers_ssh(address: str, until: float) -> str | None:
    """None when an ssh server greets; else what went wrong last."""
    while True:
        try:
            with socket.create_connection((address, 22), timeout=3) as connection:
                if connection.recv(64).startswith(b"SSH-"):
                    return None
                why = "something else answers there"
        except OSError as error:
            why = error.strerror or str(error)
        if time.monotonic() > until:
            return why
        time.sleep(0.2)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lxc_path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "address": {"type": "str", "required": True},
            "timeout": {"type": "int", "default": 180},
        },
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    wanted = module.params
    started = time.monotonic()
    until = started + wanted["timeout"]
    attach = ["lxc-attach", "-P", wanted["lxc_path"], "-n", wanted["name"], "--clear-env", "--"]
    by_hand = f"`{' '.join(attach)} journalctl -b -p warning`"

    def asked(*words: str) -> str:
        """What a command in the node prints; empty while there is no node that could run it."""
        try:
            left = max(1.0, until - time.monotonic())
            done = subprocess.run(
                [*attach, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=left, check=False
            )
        except subprocess.TimeoutExpired:
            return "not ready in time"
        return done.stdout.strip()

    # Right after its start the node has no systemd yet that could be asked.
    while not (state := asked("systemctl", "is-system-running", "--wait")) or state == "offline":
        if time.monotonic() > until:
            break
        time.sleep(0.2)
    failed = asked("systemctl", "--failed", "--no-legend", "--plain") if state != "running" else ""
    if state != "running":
        units = "; ".join(failed.splitlines()) or "no unit failed"
        module.fail_json(
            msg=f"The lab's node is up, but its system is {state or 'silent'} ({units}); look with {by_hand}."
        )
    why = answers_ssh(wanted["address"], until=time.monotonic() + 20)
    if why:
        module.fail_json(
            msg=f"The lab's node has booted, but {wanted['address']} does not answer ssh from this machine ({why}); a "
            f"firewall or a route may be in the way: `ip route get {wanted['address']}`, `iptables-save`, {by_hand}."
        )
    module.exit_json(changed=False, seconds=round(time.monotonic() - started, 1))


if __name__ == "__main__":
    main()
