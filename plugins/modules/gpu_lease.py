#!/usr/bin/python
# Apache-2.0
"""Say who works on which GPUs of a node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_lease
short_description: Take, renew, give back and read leases of a node's GPUs
version_added: 0.1.0
description:
  - An advisory lease says who works on which cards, so that two measurements never clean each other away. It is a file
    below O(directory) on the node (or on the machine itself where there is none).
  - Its owner is a process on the controller. An action plugin of the same name finds out which one, and which owners of
    other leases are dead where they are processes of the same controller.
  - A lease of a dead owner, of an earlier boot, or one that expired while nobody of its guest is on its cards, is stale
    and set aside.
  - Fails while somebody else has one of the cards.
options:
  state:
    description: Take or renew, give back, or only look.
    type: str
    choices: [present, absent, read]
    default: present
  gpus:
    description: Numbers N of /dev/nvidiaN. Needed with O(state=present).
    type: list
    elements: int
    default: []
  vmid:
    description: Guest that the lease is for; 0 for the machine itself.
    type: int
    default: 0
  ttl:
    description: Seconds without a renewal after which it may be stale.
    type: float
    default: 3600
  purpose:
    description: What the cards are needed for, for people.
    type: str
    default: cleaning
  pid:
    description: Process on the controller that owns the lease. Default is the playbook's own.
    type: int
  break_it:
    description: Set aside the leases of others that are in the way.
    type: bool
    default: false
  directory:
    description: Where the leases are.
    type: path
    default: /run/servelab/leases
  owner:
    description: Who takes the lease; filled in by the action plugin.
    type: dict
    default: {}
  dead:
    description: Keys of owners that are dead; filled in by the action plugin.
    type: list
    elements: str
    default: []
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Says whether the lease could be had.
  diff_mode:
    support: none
    description: A lease is no setting.
"""

EXAMPLES = r"""
- name: Have the cards for a measurement
  servelab.sglang.gpu_lease:
    gpus: [0, 1, 2, 3]
    vmid: 129
    purpose: campaign first
  delegate_to: "{{ pve_node }}"
"""

RETURN = r"""
leases:
  description: Those that were there before, the oldest first.
  returned: always
  type: list
  elements: dict
  contains:
    owner: {description: "machine, pid, start_time, who and purpose of the owner.", type: dict}
    vmid: {description: Guest., type: int}
    gpus: {description: Cards., type: list}
    said: {description: The lease in one line., type: str}
notes:
  description: A sentence for each lease that was set aside.
  returned: with O(state=present)
  type: list
  elements: str
"""

from dataclasses import asdict
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_holders import scan
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_lease import (
    Leased,
    Owner,
    describe,
    read,
    release,
    take,
)


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "state": {"type": "str", "choices": ["present", "absent", "read"], "default": "present"},
            "gpus": {"type": "list", "elements": "int", "default": []},
            "vmid": {"type": "int", "default": 0},
            "ttl": {"type": "float", "default": 3600},
            "purpose": {"type": "str", "default": "cleaning"},
            "pid": {"type": "int"},
            "break_it": {"type": "bool", "default": False},
            "directory": {"type": "path", "default": "/run/servelab/leases"},
            "owner": {"type": "dict", "default": {}},
            "dead": {"type": "list", "elements": "str", "default": []},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    directory, vmid = wanted["directory"], wanted["vmid"] or None
    there = read(directory)
    leases = [asdict(lease) | {"said": describe(lease)} for lease in there]
    if wanted["state"] == "read":
        module.exit_json(changed=False, leases=leases)
    owner = Owner(**wanted["owner"])
    if wanted["state"] == "absent":
        changed = release(owner, vmid, dry_run=module.check_mode, directory=directory)
        module.exit_json(changed=changed, leases=leases)
    # Only where somebody else's lease is in the way does it matter whether it still has processes.
    others = any(lease.owner.key != owner.key for lease in there)
    holders: list[dict[str, Any]] = scan()["holders"] if others else []
    try:
        taken = take(
            wanted["gpus"],
            owner,
            vmid,
            wanted["ttl"],
            dead=wanted["dead"],
            holders=holders,
            by_force=wanted["break_it"],
            dry_run=module.check_mode,
            directory=directory,
        )
    except Leased as leased:
        module.fail_json(
            msg="\n".join(leased.reasons)
            + "\nWait for it. If you know that nobody works there any more: -e gpu_clean_lease_break=true.",
            leases=leases,
        )
    # A renewal is no change that anybody would want to hear of.
    module.exit_json(changed=False, leases=leases, notes=taken["notes"])


if __name__ == "__main__":
    main()
