#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""A directory made equal to another one on the same machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_tree
short_description: Make a directory equal to another one on the same machine
version_added: 0.1.0
description:
  - Copies what differs, deletes what the source no longer has, and makes everything readable by everyone. The lab's doubles are
    some hundred small files, for which M(ansible.builtin.copy) needs a module run each.
  - Byte code (C(__pycache__)) is neither copied nor deleted.
options:
  src:
    description: The directory to copy.
    type: path
    required: true
  dest:
    description: The directory to make equal to O(src).
    type: path
    required: true
attributes:
  check_mode:
    description: Tells what would change.
    support: full
  diff_mode:
    description: Lists the files that differ.
    support: full
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Lay out the doubles
  servelab.sglang.lab_tree:
    src: /srv/checkout/roles/lab_node/files/servelab_lab
    dest: /var/lib/servelab-lab/0a1b2c/doubles/servelab_lab
"""

RETURN = r"""
copied:
  description: Files that differed or were missing, relative to O(dest).
  returned: always
  type: list
  elements: str
deleted:
  description: Files that the source no longer has, relative to O(dest).
  returned: always
  type: list
  elements: str
"""

import filecmp
import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule

BYTE_CODE = "__pycache__"


def files_in(directory: Path) -> dict[str, Path]:
    """Regular files below the directory by relative path, byte code left out."""
    return {
        str(path.relative_to(directory)): path
        for path in directory.rglob("*")
        if BYTE_CODE not in path.parts and (path.is_file() or path.is_symlink())
    }


def mode_of(path: Path) -> int:
    """0755 for what its owner may run, else 0644: whoever checked the source out, every guest must be able to read it."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def put(source: Path, target: Path) -> None:
    """Replace at once: a program that is just being started reads the old file or the new one, nothing between."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}.half")
    shutil.copyfile(source, half)
    half.chmod(mode_of(source))
    half.rename(target)


def main() -> None:
    module = AnsibleModule(
        argument_spec={"src": {"type": "path", "required": True}, "dest": {"type": "path", "required": True}},
        supports_check_mode=True,
    )
    source, target = Path(module.params["src"]), Path(module.params["dest"])
    if not source.is_dir():
        module.fail_json(msg=f"{source} is not a directory.")
    wanted, there = files_in(source), files_in(target)
    copied = sorted(
        name
        for name, path in wanted.items()
        if name not in there
        or there[name].is_symlink()
        or mode_of(path) != there[name].stat().st_mode & 0o7777
        or not filecmp.cmp(path, there[name], shallow=False)
    )
    deleted = sorted(set(there) - set(wanted))
    if not module.check_mode:
        os.umask(0o022)
        for name in copied:
            put(wanted[name], target / name)
        for name in deleted:
            there[name].unlink()
    listed = [f"{name}\n" for name in sorted(there)]
    module.exit_json(
        changed=bool(copied or deleted),
        copied=copied,
        deleted=deleted,
        diff={
            "before_header": str(target),
            "after_header": str(target),
            "before": "".join(f"{line.strip()} (other)\n" if line.strip() in copied else line for line in listed),
            "after": "".join(f"{name}\n" for name in sorted(wanted)),
        },
    )


if __name__ == "__main__":
    main()
