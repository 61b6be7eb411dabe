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
  - A stack is used when the link names it, when a unit of a mode does, or when a process runs from it.
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
  units_dir:
    description: Where the units of modes are.
    type: path
    default: /etc/systemd/system
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


def users(stack: Path, current: Path | None, units: list[Path]) -> list[str]:
    """Who uses a stack, in words."""
    named = current is not None and current.is_symlink() and current.resolve() == stack.resolve()
    found = [f"{current} names it"] if named else []
    inside = f"{stack}/"
    found += [f"{unit.name} runs from it" for unit in units if inside in unit.read_text(encoding="utf-8")]
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
            # Files that are loaded say it even where a process was started through the link.
            loaded = inside in (process / "maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        if loaded or any(word.startswith(inside) for word in words):
            found.append(f"process {process.name} runs from it")
    return found


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "current": {"type": "path"},
            "units_dir": {"type": "path", "default": "/etc/systemd/system"},
        },
        supports_check_mode=True,
    )
    directory = Path(module.params["dir"])
    current = Path(module.params["current"]) if module.params["current"] else None
    units = sorted(Path(module.params["units_dir"]).glob("servelab-*.service"))
    stacks = []
    for stack in sorted(path for path in directory.glob("*") if path.is_dir() and not path.is_symlink()):
        by = users(stack, current, units)
        sentence = f"{stack.name}: {', '.join(by) or 'nothing uses it'}."
        stacks.append({"name": stack.name, "path": str(stack), "used": bool(by), "sentence": sentence})
    module.exit_json(changed=False, stacks=stacks)


if __name__ == "__main__":
    main()
