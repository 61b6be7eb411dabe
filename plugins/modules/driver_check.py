#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Compare the NVIDIA libraries of a guest with the kernel driver, and look at its device nodes."""

from __future__ import annotations

DOCUMENTATION = r"""
module: driver_check
short_description: Compare a guest's NVIDIA libraries with the kernel driver
version_added: 0.1.0
description:
  - Reads C(/proc/driver/nvidia/version), which shows the node's kernel driver inside a guest too, and the versions of
    C(libcuda.so) and C(libnvidia-ml.so), and looks whether the device nodes are character devices.
  - Never fails because of what it finds; the problems are returned.
author: The Servelab developers
options:
  gpus:
    description: How many cards the guest should see, or null where that is not known.
    type: int
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Compare the driver libraries with the node's kernel driver
  servelab.sglang.driver_check:
    gpus: 8
  register: driver
"""

RETURN = r"""
kernel_version:
  description: The version of the kernel driver, or null.
  returned: always
  type: str
libraries:
  description: The versions found of each library.
  returned: always
  type: dict
  sample: {"libcuda.so": ["580.95.05"], "libnvidia-ml.so": ["580.95.05"]}
cards:
  description: The numbers of the cards whose nodes are character devices.
  returned: always
  type: list
  elements: int
library_problems:
  description: Those of the problems that are about libraries, which an installation mends.
  returned: always
  type: list
  elements: str
problems:
  description: Sentences, each with its remedy. Empty if all is well.
  returned: always
  type: list
  elements: str
"""

import contextlib
import re
import stat
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.driver_version import (
    installed_libraries,
    library_problems,
    node_problems,
    parse_kernel_driver,
)


def main() -> None:
    module = AnsibleModule(argument_spec={"gpus": {"type": "int"}}, supports_check_mode=True)
    kernel = None
    with contextlib.suppress(OSError):
        kernel = parse_kernel_driver(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace"))
    cache = ""
    if ldconfig := module.get_bin_path("ldconfig", opt_dirs=["/sbin", "/usr/sbin"]):
        _rc, cache, _err = module.run_command([ldconfig, "-p"])
    libraries = installed_libraries(cache)
    nodes = {path.name: stat.S_ISCHR(path.stat().st_mode) for path in Path("/dev").glob("nvidia*") if path.exists()}
    cards = sorted(int(name[6:]) for name, device in nodes.items() if re.fullmatch(r"nvidia\d+", name) and device)
    about_libraries = library_problems(kernel, libraries)
    module.exit_json(
        changed=False,
        kernel_version=kernel.version if kernel else None,
        libraries=libraries,
        cards=cards,
        library_problems=about_libraries,
        problems=[*about_libraries, *node_problems(nodes, module.params["gpus"])],
    )


if __name__ == "__main__":
    main()
