#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Read or write the stamp of a mode that was seen to serve."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mode_proof
short_description: Remember that a mode was seen to serve, for as long as nothing about it changes
version_added: 0.1.0
description:
  - Compares the fingerprint of unit, rendered mode and stack with the one of the last proof.
  - With O(stamp) writes a new proof.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  mode:
    description: Name of the mode.
    type: str
    required: true
  stack:
    description: The stack in use, usually a link.
    type: path
    required: true
  package_dir:
    description: The installed package C(sglang); may hold wildcards.
    type: str
    required: true
  stamp:
    description: What the proof found. Written beside fingerprint and time.
    type: dict
attributes:
  check_mode:
    support: full
    description: Compares, and says whether it would write.
  diff_mode:
    support: none
    description: A proof holds a time and a hash; there is nothing to read in a difference.
"""

EXAMPLES = r"""
- name: Ask whether the baseline was proved as it is now
  servelab.sglang.mode_proof:
    mode: baseline
    stack: /opt/servelab/stack
    package_dir: /opt/servelab/stack/lib/python3*/site-packages/sglang
  register: proof
"""

RETURN = r"""
proved:
  description: Whether there is a proof for exactly this unit, mode and stack.
  returned: always
  type: bool
fingerprint:
  description: The fingerprint as it is now.
  returned: always
  type: str
"""

import glob
import json
import os
import time
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.modes_proof import SCHEMA, fingerprint
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "mode": {"type": "str", "required": True},
            "stack": {"type": "path", "required": True},
            "package_dir": {"type": "str", "required": True},
            "stamp": {"type": "dict"},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    mode = module.params["mode"]
    prefix = module.params["prefix"].rstrip("/")
    unit = supervisor(module.params["supervisor"], prefix).unit_file(f"servelab-{mode}.service")
    packages = sorted(glob.glob(module.params["package_dir"]))  # noqa: PTH207 - the pattern is absolute
    now = fingerprint(
        [unit, Path(f"{prefix}/etc/servelab/modes/{mode}.json")],
        Path(module.params["stack"]),
        Path(packages[0]) if packages else None,
    )
    path = Path(f"{prefix}/var/lib/servelab/proofs/{mode}.json")
    try:
        proved = json.loads(path.read_text()).get("fingerprint") == now
    except (OSError, ValueError):
        proved = False
    if module.params["stamp"] is None:
        module.exit_json(changed=False, proved=proved, fingerprint=now)
    if not module.check_mode:
        when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        text = json.dumps(
            {"schema": SCHEMA, "mode": mode, "fingerprint": now, "proved": when, **module.params["stamp"]}, indent=2
        )
        new = path.with_suffix(".new")
        new.write_text(text + "\n")
        os.replace(new, path)  # noqa: PTH105 - atomic, and the target exists
    module.exit_json(changed=True, proved=True, fingerprint=now)


if __name__ == "__main__":
    main()
