#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Files of a lab, brought to a wanted state in one go."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_files
short_description: Write the files, links and directories of a lab in one go
version_added: 0.1.0
description:
  - Does for many small paths what M(ansible.builtin.file) and M(ansible.builtin.copy) do for one. All paths are below
    one root, and a symbolic link that leads out of it is an error, because the root may be that of a container and the
    link's target a file of the host.
options:
  root:
    description: The directory in which all paths are. It is made when it is missing.
    type: path
    default: /
  directories:
    description: Directories, in their order.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Relative to the root; a leading slash is that of the root.
        type: str
        required: true
      mode:
        description: Permissions, as V(0755).
        type: str
        default: "0755"
      owner:
        description: Number of user and group. Left alone by default.
        type: int
  files:
    description: Files and symbolic links.
    type: list
    elements: dict
    default: []
    suboptions:
      path:
        description: Relative to the root; a leading slash is that of the root.
        type: str
        required: true
      content:
        description: The text.
        type: str
      link:
        description: Makes it a symbolic link to this, instead of a file.
        type: str
      mode:
        description: Permissions, as V(0644).
        type: str
        default: "0644"
  trees:
    description:
      - Directories made equal to others, as a path below the root and the directory to copy. One may lie in another.
      - Byte code (C(__pycache__)) is neither copied nor deleted.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Tells what would change.
    support: full
  diff_mode:
    description: Shows files before and after; of O(trees) the names.
    support: full
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Lay out the doubles
  servelab.sglang.lab_files:
    root: /var/lib/servelab-lab/0a1b2c/doubles
    trees:
      servelab_lab: /srv/checkout/roles/lab_node/files/servelab_lab
      servelab_lab/shared: /srv/checkout/plugins/module_utils
    files:
      - path: server.json
        content: "{}"
"""

RETURN = r"""
written:
  description: Paths that were written, or would be, relative to the root.
  returned: always
  type: list
  elements: str
deleted:
  description: Files of the trees' copies that the sources no longer have.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_files import (
    EscapeError,
    Wanted,
    delete,
    differs,
    put,
    surplus,
    tree,
)


def wanted_of(module: AnsibleModule, copied: list[Wanted]) -> list[Wanted]:
    """All wanted paths: directories first, in their order."""
    directories = [
        Wanted(each["path"].lstrip("/"), mode=int(each["mode"], 8), owner=each["owner"])
        for each in module.params["directories"]
    ]
    files = [
        Wanted(
            each["path"].lstrip("/"),
            None if each["link"] else (each["content"] or "").encode(),
            each["link"],
            int(each["mode"], 8),
        )
        for each in module.params["files"]
    ]
    return directories + copied + files


def shown(root: Path, item: Wanted) -> dict[str, str]:
    """A difference as Ansible prints it."""
    path = root / item.path
    if path.is_symlink():
        before = f"-> {path.readlink()}\n"
    elif path.is_file():
        before = path.read_text(errors="replace")
    else:
        before = ""
    after = f"-> {item.link}\n" if item.link else (item.content or b"").decode(errors="replace")
    if before == after:
        before, after = "", f"mode {item.mode:04o}\n"
    return {"before_header": str(path), "after_header": str(path), "before": before, "after": after}


def main() -> None:
    directory = {
        "path": {"type": "str", "required": True},
        "mode": {"type": "str", "default": "0755"},
        "owner": {"type": "int"},
    }
    file = {
        "path": {"type": "str", "required": True},
        "content": {"type": "str"},
        "link": {"type": "str"},
        "mode": {"type": "str", "default": "0644"},
    }
    module = AnsibleModule(
        argument_spec={
            "root": {"type": "path", "default": "/"},
            "directories": {"type": "list", "elements": "dict", "default": [], "options": directory},
            "files": {
                "type": "list",
                "elements": "dict",
                "default": [],
                "options": file,
                "mutually_exclusive": [("content", "link")],
            },
            "trees": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["root"])
    trees = {below: Path(source) for below, source in module.params["trees"].items()}
    for source in trees.values():
        if not source.is_dir():
            module.fail_json(msg=f"{source} is not a directory.")
    copied = [item for below, source in trees.items() for item in tree(below, source)]
    wanted = wanted_of(module, copied)
    to_write = [item for item in wanted if differs(root, item)]
    to_delete = surplus(root, trees, wanted)
    diff = [shown(root, item) for item in to_write if item not in copied]
    # Of a copied tree the names are enough; its text is in the source.
    names = [item.path for item in to_write if item in copied]
    if names or to_delete:
        lists = {"before": "".join(f"{name}\n" for name in to_delete), "after": "".join(f"{name}\n" for name in names)}
        diff.append({"before_header": f"deleted from {root}", "after_header": f"copied to {root}", **lists})
    if not module.check_mode:
        try:
            for item in to_write:
                put(root, item)
            for name in to_delete:
                delete(root, name)
        except EscapeError as error:
            module.fail_json(msg=str(error))
    module.exit_json(
        changed=bool(to_write or to_delete), written=[item.path for item in to_write], deleted=to_delete, diff=diff
    )


if __name__ == "__main__":
    main()
