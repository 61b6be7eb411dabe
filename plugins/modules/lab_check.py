#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Whether this machine can carry a lab."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_check
short_description: Tell what keeps this machine from carrying a lab
version_added: 0.1.0
description:
  - Looks, changes nothing, and returns one sentence for everything that stands in the way, all of them at once.
options:
  subnet:
    description: The network the lab wants for itself, as V(10.200.1.0/24).
    type: str
    required: true
  bridge:
    description: The lab's own bridge, whose route is no overlap.
    type: str
    required: true
  directories:
    description: Where the lab will write; they need not exist yet.
    type: list
    elements: path
    required: true
  needed_gib:
    description: Free space that each file system under O(directories) must have.
    type: int
    default: 8
  nameservers:
    description: The name servers that node and guest will use.
    type: list
    elements: str
    required: true
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
- name: See whether a lab can be built here
  servelab.sglang.lab_check:
    subnet: 10.200.1.0/24
    bridge: slab0a1b2c
    directories: [/var/lib/servelab-lab, /var/cache/servelab-lab]
    nameservers: [192.0.2.53]
  register: looked
"""

RETURN = r"""
problems:
  description: One sentence for each obstacle, with its remedy. Empty when a lab can be built.
  returned: always
  type: list
  elements: str
"""

import json
import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import (
    apt_packages_missing,
    overlapping_route,
    with_sbin,
)


def free_gib(path: Path) -> float:
    """Free space of the file system that holds `path`, or would."""
    while not path.exists():
        path = path.parent
    return shutil.disk_usage(path).free / 2**30


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "subnet": {"type": "str", "required": True},
            "bridge": {"type": "str", "required": True},
            "directories": {"type": "list", "elements": "path", "required": True},
            "needed_gib": {"type": "int", "default": 8},
            "nameservers": {"type": "list", "elements": "str", "required": True},
        },
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    wanted = module.params
    problems = []
    if os.geteuid() != 0:
        problems.append("The lab needs root: it makes a bridge, firewall rules and an LXC container; run it as root.")
    if Path("/etc/pve").exists():
        problems.append(
            "This machine is a Proxmox node (/etc/pve exists), and the lab is never built on a real one: "
            "run it on another Linux machine, or use an inventory of your own for this node."
        )
    missing = apt_packages_missing(shutil.which, lambda path: Path(path).exists())
    if missing:
        packages = " ".join(missing)
        problems.append(f"Programs of these packages are missing: {packages}; run `apt-get install {packages}`.")
    for directory in map(Path, wanted["directories"]):
        free = free_gib(directory)
        if free < wanted["needed_gib"]:
            problems.append(
                f"{directory} has {free:.1f} GiB free and the lab needs {wanted['needed_gib']}: "
                "free some space, or remove other labs and the cache."
            )
    if module.get_bin_path("ip"):
        _, out, _ = module.run_command(["ip", "-json", "-4", "route", "show", "table", "all"], check_rc=True)
        overlap = overlapping_route(wanted["subnet"], json.loads(out or "[]"), wanted["bridge"])
        if overlap:
            problems.append(
                f"The lab's network {wanted['subnet']} overlaps this machine's route {overlap}: "
                "name the lab differently (SERVELAB_LAB) or set lab_node_subnet to a free /24."
            )
    if not wanted["nameservers"]:
        problems.append(
            "This machine asks only a name server on its own loopback, which a container cannot reach: "
            "set lab_node_nameservers to one that it can."
        )
    module.exit_json(changed=False, problems=problems)


if __name__ == "__main__":
    main()
