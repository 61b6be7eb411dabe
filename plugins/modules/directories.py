#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Bring several directories to their wanted state in one call."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: directories
short_description: Have several directories, each with its owner, group and mode
version_added: 0.1.0
description:
  - Does for several directories what M(ansible.builtin.file) does for one.
    Each call of a module costs some tenths of a second, whatever it does, and a role has a dozen directories.
  - Nothing changes when one of them cannot be, because something else has its name.
author: Servelab contributors (@servelab)
options:
  directories:
    description:
      - Groups of directories that are alike, made in their order.
      - Directories on the way that are missing and not listed are made too, with what the system gives.
    type: list
    elements: dict
    required: true
    suboptions:
      paths:
        description: Directories, or links to some.
        type: list
        elements: path
        required: true
      owner:
        description: Left as it is when not given.
        type: str
      group:
        description: Left as it is when not given.
        type: str
      mode:
        description: Permissions, as V(0755).
        type: str
        required: true
attributes:
  check_mode:
    description: Tells what would change; who shall own what is not there yet may not exist yet.
    support: full
  diff_mode:
    description: Shows state, owner, group and mode before and after.
    support: full
"""

EXAMPLES = r"""
- name: Create the directories
  servelab.sglang.directories:
    directories:
      - {paths: [/etc/servelab, /etc/servelab/modes], owner: root, group: root, mode: "0755"}
      - {paths: [/etc/servelab/secrets], owner: root, group: sglang, mode: "0750"}
"""

RETURN = r"""
changed_paths:
  description: The directories that were made or changed, or would be.
  returned: success
  type: list
  elements: str
  sample: [/etc/servelab/secrets]
"""

import grp
import os
import pwd
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def unknown(wanted: dict[str, str]) -> dict[str, str]:
    """Which of owner and group this machine does not know yet."""
    known = {"owner": pwd.getpwnam, "group": grp.getgrnam}
    found = {}
    for what, look in known.items():
        name = wanted[what]
        if name and not name.isdigit():
            try:
                look(name)
            except KeyError:
                found[what] = name
    return found


def bring(module: AnsibleModule, wanted: dict[str, str]) -> dict[str, dict[str, object]] | None:
    """Have one directory. What differed, as `--diff` shows it, or None."""
    path = Path(wanted["path"])
    diff: dict[str, dict[str, object]] = {"before": {"path": str(path)}, "after": {"path": str(path)}}
    made = not path.is_dir()
    if made:
        diff["before"]["state"], diff["after"]["state"] = "absent", "directory"
        if module.check_mode:
            return diff
        # 0700 until it has its owner: nobody looks into what shall be closed.
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(mode=0o700)
    elif module.check_mode and (later := unknown(wanted)):
        diff["after"] |= later
        return diff
    attributes = module.load_file_common_arguments(wanted | {"follow": True})
    changed = module.set_fs_attributes_if_different(attributes, False, diff)
    return diff if made or changed else None


def main() -> None:
    alike = {
        "paths": {"type": "list", "elements": "path", "required": True},
        "owner": {"type": "str"},
        "group": {"type": "str"},
        "mode": {"type": "str", "required": True},
    }
    module = AnsibleModule(
        argument_spec={"directories": {"type": "list", "elements": "dict", "required": True, "options": alike}},
        supports_check_mode=True,
    )
    all_of_them = [{**alike, "path": path} for alike in module.params["directories"] for path in alike["paths"]]
    others = [each["path"] for each in all_of_them if os.path.lexists(each["path"]) and not Path(each["path"]).is_dir()]
    if others:
        module.fail_json(
            msg=f"{', '.join(others)} must be a directory and is something else; nothing was changed. "
            "Move it away first."
        )
    diffs = [diff for each in all_of_them if (diff := bring(module, each))]
    module.exit_json(changed=bool(diffs), diff=diffs, changed_paths=[diff["after"]["path"] for diff in diffs])


if __name__ == "__main__":
    main()
