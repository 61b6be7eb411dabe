#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Open SGLang's custom allreduce for PCIe GPUs, or close it again."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_patch
short_description: Open SGLang's custom allreduce for more than two PCIe GPUs, reversibly
version_added: 0.1.0
description:
  - Changes a few lines of the installed SGLang so that its custom allreduce can be forced onto more than two GPUs
    without NVLink.
    Without E(SGLANG_FORCE_CUSTOM_AR_PCIE=1) in the server's environment the changed files behave as before.
  - The form of the installed release is found by its structure. A form that is not known, and a file that somebody
    edited, are refused, and nothing is changed.
  - The originals and a manifest are kept beside the package; O(state=absent) restores them to the byte.
author: Servelab contributors (@servelab)
options:
  package_dir:
    description: The installed package, the directory named V(sglang). May hold wildcards that fit one directory.
    type: str
    required: true
  state:
    description: Whether the patch is to be in the package.
    type: str
    choices: [present, absent]
    default: present
attributes:
  check_mode:
    description: Says what would change.
    support: full
  diff_mode:
    description: Shows the changed lines.
    support: full
notes:
  - In check mode a package that is not there yet is no error, as an earlier task may be about to install it.
"""

EXAMPLES = r"""
- name: Make the forced PCIe allreduce available
  servelab.sglang.sglang_patch:
    package_dir: /opt/servelab/stack/lib/python3*/site-packages/sglang
    state: present
"""

RETURN = r"""
release:
  description: The installed release; null in check mode when SGLang is not installed yet.
  returned: success
  type: str
  sample: 0.5.23
shape:
  description: The form of the release's allreduce code (V(unknown) is possible with O(state=absent)); null as above.
  returned: success
  type: str
  sample: B4
package_dir:
  description: The directory that O(package_dir) stands for.
  returned: success
  type: str
manifest_sha256:
  description: Digest of the manifest that describes the patched files as they are now; null without the patch.
  returned: success
  type: str
files:
  description: The files that were changed, relative to the package.
  returned: success
  type: list
  elements: str
"""

import hashlib
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_patch import (
    PatchRefused,
    Plan,
    execute,
    plan,
    store_dir,
)
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_release import ReleaseError, find_package


def _diff(todo: Plan) -> list[dict[str, Any]]:
    return [
        {
            "before": change.before.decode(),
            "after": change.after.decode(),
            "before_header": str(todo.package_dir / change.path),
            "after_header": str(todo.package_dir / change.path),
        }
        for change in todo.changes
    ]


def _manifest_sha256(todo: Plan) -> str | None:
    file = store_dir(todo.package_dir) / "manifest.json"
    return hashlib.sha256(file.read_bytes()).hexdigest() if file.is_file() else None


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "package_dir": {"type": "str", "required": True},
            "state": {"type": "str", "choices": ["present", "absent"], "default": "present"},
        },
        supports_check_mode=True,
    )
    state = module.params["state"]
    try:
        package_dir = find_package(module.params["package_dir"])
    except ReleaseError as error:
        if not module.check_mode:
            module.fail_json(msg=str(error))
        module.exit_json(
            changed=state == "present", release=None, shape=None, manifest_sha256=None, files=[],
            package_dir=module.params["package_dir"], msg="SGLang is not installed yet; its shape is not known.",
        )  # fmt: skip
    try:
        todo = plan(package_dir, state)
        changed = todo.changed
        if changed and not module.check_mode:
            execute(todo)
            if plan(package_dir, state).changed:
                module.fail_json(msg=f"The files in {package_dir} are not as they were just written. Run again.")
    except (PatchRefused, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(
        changed=changed,
        release=todo.release,
        shape=todo.shape,
        package_dir=str(package_dir),
        manifest_sha256=_manifest_sha256(todo),
        files=[change.path for change in todo.changes],
        diff=_diff(todo),
    )


if __name__ == "__main__":
    main()
