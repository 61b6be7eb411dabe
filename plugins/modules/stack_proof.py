#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Hold an installed stack against its lock, against itself and against what it said when it was tried."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: stack_proof
short_description: Say why an installed stack must not be used
version_added: 0.1.0
description:
  - Compares what is installed with the lock, looks for packages of different CUDA generations, for shared libraries
    that nothing provides, and for versions that SGLang would refuse at its start.
  - Takes what C(probe.py) found when it ran in the stack, as O(probe); without it only what the files say is judged.
  - Changes nothing.
author: Servelab contributors (@servelab)
options:
  stack:
    description: The stack's directory, a venv.
    type: path
    required: true
  lock:
    description: The lock that it was installed from.
    type: path
    required: true
  nvcc:
    description: The compiler for kernels that are compiled at run time; not looked at where it does not exist.
    type: path
  probe:
    description: What C(probe.py) printed.
    type: dict
  libraries:
    description: Whether to read what every shared library needs. Takes seconds, and needs C(readelf).
    type: bool
    default: false
attributes:
  check_mode:
    description: Runs the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: See whether the stack may be used
  servelab.sglang.stack_proof:
    stack: /opt/servelab/stacks/0.5.23-full-1a2b3c4d
    lock: /opt/servelab/stacks/0.5.23-full-1a2b3c4d/servelab-lock.txt
    nvcc: /opt/servelab/cuda-13.0/cuda/bin/nvcc
    libraries: true
  register: proof
  failed_when: proof.findings | length > 0
"""

RETURN = r"""
findings:
  description: Why it must not be used, a sentence each.
  returned: success
  type: list
  elements: str
packages:
  description: What is installed, name and version.
  returned: success
  type: dict
libraries:
  description: How many files were asked what they need; 0 where they were not.
  returned: success
  type: int
"""

import os
import subprocess
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils import stack_rules
from ansible_collections.servelab.sglang.plugins.module_utils.run_files import packages as installed
from ansible_collections.servelab.sglang.plugins.module_utils.stack_lock import LockError, normalize, parse


def site_packages(stack: Path) -> Path:
    """The only site-packages of a venv. Raises ValueError where there is none or several."""
    found = sorted(stack.glob("lib/python3*/site-packages"))
    if len(found) != 1:
        raise ValueError(f"{stack} is no venv: it has {len(found)} directories lib/python3*/site-packages.")
    return found[0]


def shared_libraries(site: Path) -> list[Path]:
    """Every shared library below a directory, without those that are links to another."""
    return sorted(
        path
        for path in site.rglob("*.so*")
        if path.is_file() and not path.is_symlink() and (path.suffix == ".so" or ".so." in path.name)
    )


def needed(libraries: list[Path], site: Path) -> dict[str, list[str]]:
    """Library → sonames, as readelf reads them. Raises OSError where there is no readelf."""
    found: dict[str, list[str]] = {}
    for start in range(0, len(libraries), 200):
        part = [str(path.relative_to(site)) for path in libraries[start : start + 200]]
        # Twice the first: of a single file readelf does not print the name.
        done = subprocess.run(
            ["readelf", "--dynamic", "--wide", part[0], *part],
            cwd=site,
            capture_output=True,
            text=True,
            errors="replace",
            env={**os.environ, "LC_ALL": "C"},
            check=False,
        )
        found.update(stack_rules.read_needed(done.stdout))
    return found


def provided(site: Path) -> set[str]:
    """The sonames that the wheels and the system have."""
    names = {path.name for path in site.rglob("*.so*")}
    listed = subprocess.run(["/sbin/ldconfig", "-p"], capture_output=True, text=True, check=False).stdout
    return names | {line.split()[0] for line in listed.splitlines()[1:] if line.strip()}


def nvcc_release(nvcc: str | None) -> str | None:
    """The compiler's release; None where there is no compiler."""
    if not nvcc or not os.access(nvcc, os.X_OK):
        return None
    return stack_rules.nvcc_release(subprocess.run([nvcc, "--version"], capture_output=True, text=True).stdout)


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "stack": {"type": "path", "required": True},
            "lock": {"type": "path", "required": True},
            "nvcc": {"type": "path"},
            "probe": {"type": "dict"},
            "libraries": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    asked = module.params
    probe = asked["probe"] or {}
    try:
        site = site_packages(Path(asked["stack"]))
        lock = parse(Path(asked["lock"]).read_text(encoding="utf-8"))
        packages = {normalize(name): version for name, version in installed(site).items()}
        engine = site / "sglang/srt/entrypoints/engine.py"
        least = stack_rules.minimums(engine.read_text(encoding="utf-8")) if engine.is_file() else {}
        libraries = shared_libraries(site) if asked["libraries"] else []
        asks = needed(libraries, site) if libraries else {}
    except (LockError, OSError, ValueError, SyntaxError) as error:
        module.fail_json(msg=str(error))
    findings = stack_rules.differs(packages, lock.pins)
    # A light stack has none of them, and runs nothing.
    if "torch" in lock.pins:
        cuda = lock.one("cuda") or ""
        findings += stack_rules.mixed(packages, cuda, probe.get("torch_cuda"), nvcc_release(asked["nvcc"]))
        findings += stack_rules.too_old(packages, least)
    if asks:
        findings += stack_rules.unresolved(asks, provided(site), stack_rules.DRIVER_LIBRARIES)
    findings += probe.get("errors") or []
    module.exit_json(changed=False, findings=findings, packages=packages, libraries=len(libraries))


if __name__ == "__main__":
    main()
