#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""List the stacks of a machine, or its routers, and who uses each."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: stacks
short_description: List the stacks of a machine and who uses each
version_added: 0.1.0
description:
  - A stack is used when the link names it, when a unit of a mode does, or when a process runs from it. Units are
    systemd's and those of the collection's own supervisor.
  - Changes nothing.
author: Servelab contributors (@servelab)
options:
  dir:
    description: The directory of all stacks. It need not exist.
    type: path
    required: true
  current:
    description: The link to the stack in use, where there is one.
    type: path
  prefix:
    description: Directory below which C(etc/servelab/units) is. Empty means the machine's own.
    type: path
    default: ""
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Look which stacks are used, and by whom
  servelab.sglang.stacks:
    dir: /opt/servelab/stacks
    current: /opt/servelab/stack
  register: found
"""

RETURN = r"""
stacks:
  description: Each with V(name), V(path), V(used) and a V(sentence) that says why.
  returned: success
  type: list
  elements: dict
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.stack_users import unit_files, users


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "current": {"type": "path"},
            "prefix": {"type": "path", "default": ""},
        },
        supports_check_mode=True,
    )
    directory = Path(module.params["dir"])
    current = Path(module.params["current"]) if module.params["current"] else None
    installed = sorted(path for path in directory.glob("*") if path.is_dir() and not path.is_symlink())
    stacks = []
    for stack, by in users(installed, current, unit_files(module.params["prefix"])).items():
        sentence = f"{stack.name}: {', '.join(by) or 'nothing uses it'}."
        stacks.append({"name": stack.name, "path": str(stack), "used": bool(by), "sentence": sentence})
    module.exit_json(changed=False, stacks=stacks)


if __name__ == "__main__":
    main()
