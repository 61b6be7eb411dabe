#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""The bridge and the firewall rules of a lab."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_network
short_description: Give a lab its bridge and its way out, or take them away
version_added: 0.1.0
description:
  - A bridge with the host's address on it, masquerading, accept rules for forwarded traffic, and IPv4 forwarding.
  - Nothing here outlives a reboot. Forwarding is turned on once for all labs; what it was before is kept under
    C(/run) and put back when the last lab goes.
options:
  name:
    description: The bridge.
    type: str
    required: true
  address:
    description: The host's address on the bridge, as V(10.200.1.1/24). Needed when O(state=present).
    type: str
  comment:
    description: The mark in every firewall rule; rules with this mark and no others are removed.
    type: str
    required: true
  state:
    description: Whether bridge and rules should be there.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Tells what would change.
    support: full
  diff_mode:
    description: Shows bridge, address and rules before and after.
    support: full
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Give the lab its network
  servelab.sglang.lab_network:
    name: slab0a1b2c
    address: 10.200.1.1/24
    comment: servelab-0a1b2c
"""

RETURN = r"""
changes:
  description: What was done, or would be, one phrase each.
  returned: always
  type: list
  elements: str
"""

import contextlib
import fcntl
import ipaddress
import json
import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_firewall import lab_rules, marked_rules
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import with_sbin

FORWARDING = Path("/proc/sys/net/ipv4/ip_forward")
RUN = Path("/run/servelab-lab")


class Network:
    """Collects what has to change; does it unless in check mode."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.bridge = module.params["name"]
        self.before: list[str] = []
        self.after: list[str] = []
        self.changes: list[str] = []

    def do(self, phrase: str, *commands: list[str]) -> None:
        self.changes.append(phrase)
        if not self.module.check_mode:
            for command in commands:
                self.module.run_command(command, check_rc=True)

    def write(self, phrase: str, path: Path, text: str) -> None:
        self.changes.append(phrase)
        if not self.module.check_mode:
            path.write_text(text)

    def exists(self) -> bool:
        return Path("/sys/class/net", self.bridge).exists()

    def addresses(self) -> list[str]:
        if not self.exists():
            return []
        _, out, _ = self.module.run_command(["ip", "-json", "-4", "addr", "show", "dev", self.bridge], check_rc=True)
        return [f"{a['local']}/{a['prefixlen']}" for link in json.loads(out or "[]") for a in link.get("addr_info", [])]

    def is_up(self) -> bool:
        flags = Path("/sys/class/net", self.bridge, "flags")
        return flags.exists() and bool(int(flags.read_text(), 16) & 1)

    def present(self, address: str, comment: str) -> None:
        up = ["ip", "link", "set", self.bridge, "up"]
        # A bridge otherwise takes the lowest address of its ports and changes it as they come and go.
        mac = "02:" + ":".join(f"{byte:02x}" for byte in ipaddress.ip_interface(address).ip.packed) + ":01"
        if not self.exists():
            self.do(
                f"add bridge {self.bridge}",
                ["ip", "link", "add", self.bridge, "address", mac, "type", "bridge", "forward_delay", "0"],
                up,
            )
        elif not self.is_up():
            self.do(f"set {self.bridge} up", up)
        for other in self.addresses():
            self.before.append(f"{self.bridge} {other}")
            if other != address:
                self.do(f"remove address {other}", ["ip", "addr", "del", other, "dev", self.bridge])
        self.after.append(f"{self.bridge} {address}")
        if self.after[-1] not in self.before:
            self.do(f"add address {address}", ["ip", "addr", "add", address, "dev", self.bridge])
        for rule in lab_rules(self.bridge, str(ipaddress.ip_interface(address).network), comment):
            self.after.append(str(rule))
            if self.module.run_command(rule.command("-C"))[0] == 0:
                self.before.append(str(rule))
            else:
                self.do(f"add rule {rule}", rule.command("-I"))
        if FORWARDING.read_text().strip() == "0":
            if not self.module.check_mode:
                (RUN / "ip_forward").write_text("0\n")
            self.write("turn IPv4 forwarding on", FORWARDING, "1\n")

    def absent(self, comment: str) -> None:
        # Where there is no iptables any more there are no rules of it either.
        save = self.module.get_bin_path("iptables-save")
        saved = self.module.run_command([save], check_rc=True)[1] if save else ""
        for rule in marked_rules(saved, comment):
            self.before.append(str(rule))
            self.do(f"delete rule {rule}", rule.command("-D"))
        if self.exists():
            self.before.append(self.bridge)
            self.do(f"delete bridge {self.bridge}", ["ip", "link", "del", self.bridge])
        others = [path.name for path in Path("/sys/class/net").glob("slab*") if path.name != self.bridge]
        kept = RUN / "ip_forward"
        if kept.exists() and not others:
            self.write("put IPv4 forwarding back", FORWARDING, kept.read_text())
            if not self.module.check_mode:
                kept.unlink()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "name": {"type": "str", "required": True},
            "address": {"type": "str"},
            "comment": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        required_if=[("state", "present", ["address"])],
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    module.run_command_environ_update = {"LC_ALL": "C"}
    network = Network(module)
    with contextlib.ExitStack() as stack:
        if not module.check_mode:
            # Labs share the forwarding switch: who comes and who goes must not overlap.
            RUN.mkdir(exist_ok=True)
            fcntl.flock(stack.enter_context((RUN / "lock").open("w")), fcntl.LOCK_EX)
        if module.params["state"] == "present":
            network.present(module.params["address"], module.params["comment"])
        else:
            network.absent(module.params["comment"])
    module.exit_json(
        changed=bool(network.changes),
        changes=network.changes,
        diff={"before": "\n".join(network.before) + "\n", "after": "\n".join(network.after) + "\n"},
    )


if __name__ == "__main__":
    main()
