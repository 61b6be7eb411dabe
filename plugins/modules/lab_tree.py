#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Directories made equal to others on the same machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_tree
short_description: Make directories equal to others on the same machine
version_added: 0.1.0
description:
  - Copies what differs, deletes what the sources no longer have, and makes everything readable by everyone. The lab's
    doubles are some hundred small files, for which M(ansible.builtin.copy) needs a module run each.
  - Byte code (C(__pycache__)) is neither copied nor deleted.
options:
  dest:
    description: The directory that holds O(trees).
    type: path
    required: true
  trees:
    description:
      - What to copy, as a directory below O(dest) and the directory it is made equal to. One may lie within another.
      - Files of O(dest) outside of them are left alone.
    type: dict
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
    dest: /var/lib/servelab-lab/0a1b2c/doubles
    trees:
      servelab_lab: /srv/checkout/roles/lab_node/files/servelab_lab
      servelab_lab/shared: /srv/checkout/plugins/module_utils
"""

RETURN = r"""
copied:
  description: Files that differed or were missing, relative to O(dest).
  returned: always
  type: list
  elements: str
deleted:
  description: Files that the sources no longer have, relative to O(dest).
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


def files_in(directory: Path, below: Path) -> dict[str, Path]:
    """Files in the directory by their path relative to it, prefixed by `below`; byte code left out."""
    return {
        str(below / path.relative_to(directory)): path
        for path in directory.rglob("*")
        if BYTE_CODE not in path.relative_to(directory).parts and (path.is_file() or path.is_symlink())
    }


def mode_of(path: Path) -> int:
    """0755 for what its owner may run, else 0644: whatever umask the checkout has, every guest can read it."""
    return 0o755 if path.stat().st_mode & 0o100 else 0o644


def differs(source: Path, target: Path | None) -> bool:
    return (
        target is None
        or target.is_symlink()
        or mode_of(source) != target.stat().st_mode & 0o7777
        or not filecmp.cmp(source, target, shallow=False)
    )


def put(source: Path, target: Path) -> None:
    """Replace at once: a program that is just being started reads the old file or the new one, nothing between."""
    target.parent.mkdir(parents=True, exist_ok=True)
    half = target.with_name(f".{target.name}.half")
    shutil.copyfile(source, half)
    half.chmod(mode_of(source))
    half.rename(target)


def main() -> None:
    module = AnsibleModule(
        argument_spec={"dest": {"type": "path", "required": True}, "trees": {"type": "dict", "required": True}},
        supports_check_mode=True,
    )
    dest = Path(module.params["dest"])
    wanted: dict[str, Path] = {}
    there: dict[str, Path] = {}
    for below, source in module.params["trees"].items():
        if not Path(source).is_dir():
            module.fail_json(msg=f"{source} is not a directory.")
        wanted |= files_in(Path(source), Path(below))
        there |= files_in(dest / below, Path(below))
    copied = sorted(name for name, path in wanted.items() if differs(path, there.get(name)))
    deleted = sorted(set(there) - set(wanted))
    if not module.check_mode:
        os.umask(0o022)
        for name in copied:
            put(wanted[name], dest / name)
        for name in deleted:
            there[name].unlink()
    before = [f"{name} (other)" if name in copied else name for name in sorted(there)]
    module.exit_json(
        changed=bool(copied or deleted),
        copied=copied,
        deleted=deleted,
        diff={
            "before_header": str(dest),
            "after_header": str(dest),
            "before": "".join(f"{line}\n" for line in before),
            "after": "".join(f"{name}\n" for name in sorted(wanted)),
        },
    )


if __name__ == "__main__":
    main()
