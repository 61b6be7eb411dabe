#!/usr/bin/python
# Apache-2.0
"""Remove what dead servers leave beside the GPUs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_leftovers
short_description: Remove shared memory, sockets and build locks of dead servers
version_added: 0.1.0
description:
  - Deletes files that SGLang, PyTorch and NCCL leave when they are killed - segments in /dev/shm, sockets in /tmp, the
    lock of PyTorch's extension builder.
  - Only by names that these programs give, and never what a living process has open, has mapped or listens on, what has
    the PID of a living process in its name, or what is quite new. Where one process may not be looked at, nothing is
    deleted.
  - Also reports processes without a GPU that survived a server nobody uses, and who listens on given ports. Signals
    nobody.
extends_documentation_fragment: servelab.sglang.supervisor
options:
  owners:
    description: Who started which unit, as RV(servelab.sglang.gpu_holders#module:owners) has it.
    type: dict
    default: {}
  ports:
    description: TCP ports that the next server needs.
    type: list
    elements: int
    default: []
  protect:
    description: Names of programs (shell patterns) that are not reported as survivors.
    type: list
    elements: str
  unprotect:
    description: Names (shell patterns) that are treated as ordinary although O(protect) lists them.
    type: list
    elements: str
    default: []
  min_age:
    description: Seconds since its last change after which a file may be left over.
    type: float
    default: 10
  shm_dir:
    description: Where shared memory is.
    type: path
    default: /dev/shm
  tmp_dir:
    description: Where sockets with the names of temporary files are.
    type: path
    default: /tmp
  jit_locks:
    description: Shell patterns of build locks. The default knows the homes of root and of people.
    type: list
    elements: path
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Says what would be deleted.
  diff_mode:
    support: none
    description: The result lists every file.
"""

EXAMPLES = r"""
- name: Take away what killed servers left
  servelab.sglang.gpu_leftovers:
    ports: [30000]
"""

RETURN = r"""
removed:
  description: Files that were deleted (in check mode, that would be).
  returned: always
  type: list
  elements: dict
  contains:
    path: {description: The file., type: str}
    kind: {description: "shared memory, socket or build lock.", type: str}
    bytes: {description: Its size., type: int}
kept:
  description: Files of such names that must stay, and C(kept), why.
  returned: always
  type: list
  elements: dict
survivors:
  description: Processes in the cgroups of units that nobody uses, as holders without devices.
  returned: always
  type: list
  elements: dict
listeners:
  description: Who listens on the ports, as holders with C(port); C(pid) is null when nobody visible does.
  returned: always
  type: list
  elements: dict
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_holders import PROTECT
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_leftovers import (
    JIT_LOCKS,
    find,
    listeners,
    pids,
    remove,
    survivors,
)
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "owners": {"type": "dict", "default": {}},
            "ports": {"type": "list", "elements": "int", "default": []},
            "protect": {"type": "list", "elements": "str"},
            "unprotect": {"type": "list", "elements": "str", "default": []},
            "min_age": {"type": "float", "default": 10},
            "shm_dir": {"type": "path", "default": "/dev/shm"},
            "tmp_dir": {"type": "path", "default": "/tmp"},
            "jit_locks": {"type": "list", "elements": "path"},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    wanted = module.params
    keeper = supervisor(wanted["supervisor"], wanted["prefix"])
    known = keeper.units_of(pids())
    protect = PROTECT if wanted["protect"] is None else wanted["protect"]
    locks = JIT_LOCKS if wanted["jit_locks"] is None else wanted["jit_locks"]
    found = find(wanted["shm_dir"], wanted["tmp_dir"], locks, min_age=wanted["min_age"])
    gone = [one for one in found if one.kept is None] if module.check_mode else remove(found)
    module.exit_json(
        changed=bool(gone),
        removed=[one.as_dict() for one in gone],
        kept=[one.as_dict() for one in found if one.kept],
        survivors=survivors(
            wanted["owners"], protect=protect, unprotect=wanted["unprotect"], known=known, keeper=keeper
        ),
        listeners=listeners(wanted["ports"]),
    )


if __name__ == "__main__":
    main()
