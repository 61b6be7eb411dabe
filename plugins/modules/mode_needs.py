#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Whether this machine has what a mode needs."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: mode_needs
short_description: Say why a mode cannot work on this machine
version_added: 0.1.0
description:
  - Holds what a rendered mode requires against the installed SGLang, its patch, the GPUs and the programs that are
    here. Asks only for what the mode names, and changes nothing.
author: Servelab contributors (@servelab)
options:
  mode:
    description: The mode as rendered for this machine.
    type: dict
    required: true
  package_dir:
    description: The installed package, the directory named V(sglang). May hold wildcards that fit one directory.
    type: str
    required: true
  search:
    description: Directories in which the server finds programs before those of E(PATH).
    type: list
    elements: path
    default: []
  compiles:
    description: Whether the server is one that compiles kernels; the toolchain is looked for only then.
    type: bool
    default: true
  timeout:
    description: Seconds to wait for C(nvidia-smi).
    type: float
    default: 20
attributes:
  check_mode:
    description: Runs in check mode, as it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
"""

EXAMPLES = r"""
- name: Ask before anything is stopped
  servelab.sglang.mode_needs:
    mode: {name: flashinfer_fusion, requires: {architectures: [SM90, SM10x]}}
    package_dir: /opt/servelab/stack/lib/python3*/site-packages/sglang
  register: needs
  failed_when: needs.unmet | length > 0
"""

RETURN = r"""
unmet:
  description: Why the mode cannot work here, a sentence each.
  returned: always
  type: list
  elements: str
  sample: ["FlashInfer all-reduce fusion needs SM90 or SM10x; this is SM120."]
unknown:
  description: What could not be found out, a sentence each.
  returned: always
  type: list
  elements: str
"""

import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.modes_needs import Machine, architecture, ask
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import run_bounded
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_patch import PatchRefused, describe
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_release import (
    ReleaseError,
    find_package,
    read_version,
)


def architectures(timeout: float) -> list[str] | None:
    """The kinds of the GPUs here, each once; None where nvidia-smi does not tell."""
    try:
        answer = run_bounded(["nvidia-smi", "--query-gpu=compute_cap", "--format=csv,noheader"], timeout)
    except OSError:
        return None
    if answer is None or answer[0]:
        return None
    kinds = [architecture(line) for line in answer[1].splitlines() if line.strip()]
    return list(dict.fromkeys(kind for kind in kinds if kind is not None)) if kinds and all(kinds) else None


def patches(package: Path) -> list[str] | None:
    """The patches that are in place in the package."""
    try:
        return ["custom_allreduce"] if describe(package)["state"] == "present" else []
    except (PatchRefused, ReleaseError, OSError):
        return None


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "dict", "required": True},
            "package_dir": {"type": "str", "required": True},
            "search": {"type": "list", "elements": "path", "default": []},
            "compiles": {"type": "bool", "default": True},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    asked = module.params
    mode = asked["mode"]
    requires = mode.get("requires") or {}
    package: Path | None
    try:
        package = find_package(asked["package_dir"])
        release = read_version(package)
    except ReleaseError:
        package = release = None
    path = os.pathsep.join([*asked["search"], os.environ.get("PATH", os.defpath)])
    tools = requires.get("toolchain") or []
    answer = ask(
        mode,
        Machine(
            sglang=release,
            architectures=architectures(asked["timeout"]) if requires.get("architectures") else None,
            missing_tools=[tool for tool in tools if not shutil.which(tool, path=path)] if asked["compiles"] else None,
            patches=patches(package) if package and mode.get("patches") else None,
        ),
    )
    module.exit_json(changed=False, unmet=answer.unmet, unknown=answer.unknown)


if __name__ == "__main__":
    main()
