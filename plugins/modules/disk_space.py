#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Tell how much room there is where something is about to be installed."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: disk_space
short_description: Tell how much room there is for a directory that may not exist yet
version_added: 0.1.0
description:
  - Looks at the file system that holds O(path), or its nearest parent that exists.
  - Gathered facts leave out the file systems that containers often have (a ZFS dataset as root); this does not.
  - Changes nothing, and therefore runs for real in check mode too.
author: Servelab contributors (@servelab)
options:
  path:
    description: A directory, existing or not.
    type: path
    required: true
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: See how much room there is
  servelab.sglang.disk_space:
    path: /opt/servelab
  register: disk
"""

RETURN = r"""
available_mib:
  description: MiB that an unprivileged user may still write.
  returned: success
  type: int
  sample: 51200
checked:
  description: The existing directory that was looked at.
  returned: success
  type: str
  sample: /opt
"""

import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def main() -> None:
    module = AnsibleModule(
        argument_spec={"path": {"type": "path", "required": True}},
        supports_check_mode=True,
    )
    path = Path(module.params["path"])
    try:
        existing = next(place for place in (path, *path.parents) if place.is_dir())
        free = shutil.disk_usage(existing).free
    except (StopIteration, OSError) as error:
        module.fail_json(msg=f"The free space for {path} cannot be told: {error}.")
    module.exit_json(changed=False, available_mib=free // 2**20, checked=str(existing))


if __name__ == "__main__":
    main()
