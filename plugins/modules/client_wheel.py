#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Build the wheel of the load client once for each state of its sources."""

from __future__ import annotations

DOCUMENTATION = r"""
module: client_wheel
short_description: Build the wheel of the package servelab, unless it was built from the same sources before
version_added: 0.1.0
description:
  - Runs on the controller. The wheel is kept in a directory named after a hash of the sources, so that nothing is built
    when nothing has changed.
  - Needs pip and hatchling in the Python that runs the module; nothing is downloaded.
author:
  - The Servelab developers
options:
  source:
    description: Root of the collection, where C(pyproject.toml) is.
    type: path
    required: true
  cache_dir:
    description: Where built wheels are kept.
    type: path
    default: ~/.cache/servelab/client
attributes:
  check_mode:
    support: full
    description: Builds in check mode, too, because only a cache of the controller changes.
  diff_mode:
    support: none
    description: A wheel has no readable difference.
"""

EXAMPLES = r"""
- name: Build the client
  servelab.sglang.client_wheel:
    source: "{{ role_path }}/../.."
  delegate_to: localhost
"""

RETURN = r"""
path:
  description: The wheel on the controller.
  returned: success
  type: str
sha256:
  description: Its checksum.
  returned: success
  type: str
"""

import hashlib
import os
import sys
import tempfile
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule


def source_hash(root: Path) -> str:
    """Hash of all that goes into the wheel; src/servelab/shared is a link to plugins/module_utils."""
    digest = hashlib.sha256(sys.implementation.cache_tag.encode())
    files = [root / "pyproject.toml", root / "README.md", root / "LICENSE"]
    for directory in (root / "src" / "servelab", root / "plugins" / "module_utils"):
        files += [path for path in directory.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    for path in sorted(path for path in files if path.is_file()):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "source": {"type": "path", "required": True},
            "cache_dir": {"type": "path", "default": "~/.cache/servelab/client"},
        },
        supports_check_mode=True,
    )
    root = Path(module.params["source"]).resolve()
    if not (root / "pyproject.toml").is_file():
        module.fail_json(msg=f"{root} holds no pyproject.toml, so the load client cannot be built from it.")
    store = Path(module.params["cache_dir"]) / source_hash(root)
    built = sorted(store.glob("*.whl"))
    if not built:
        store.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=store.parent, prefix=".building-") as scratch:
            command = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation"]
            command += ["--no-index", "--disable-pip-version-check", "--wheel-dir", scratch, str(root)]
            # The same sources give the same bytes, whenever they are built.
            code, out, err = module.run_command(command, environ_update={"SOURCE_DATE_EPOCH": "315532800"})
            if code != 0:
                module.fail_json(
                    msg="The load client could not be built; `make venv` brings what that needs.", output=out + err
                )
            try:
                os.rename(scratch, store)  # noqa: PTH104 - another run may have been faster
                Path(scratch).mkdir()
            except OSError:
                pass
        built = sorted(store.glob("*.whl"))
    digest = hashlib.sha256(built[0].read_bytes()).hexdigest()
    # The cache is not what the play is about: a build there is no change of any machine.
    module.exit_json(changed=False, path=str(built[0]), sha256=digest)


if __name__ == "__main__":
    main()
