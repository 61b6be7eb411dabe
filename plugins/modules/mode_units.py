#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Which modes have a unit on this machine, which runs, and who started it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: mode_units
short_description: List the modes' units, whether they run and who started them
version_added: 0.1.0
description:
  - Reads the rendered modes in C(/etc/servelab/modes), the state of their units and the notes in C(/run/servelab).
  - Changes nothing.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  modes_dir:
    description: Directory of the rendered modes. Default is C(etc/servelab/modes) below O(prefix).
    type: path
  owners_dir:
    description: Directory of the notes about who started a unit. Default is C(run/servelab) below O(prefix).
    type: path
attributes:
  check_mode:
    support: full
    description: Looks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: List the servers
  servelab.sglang.mode_units:
  register: units
"""

RETURN = r"""
units:
  description: One entry a mode, sorted by name.
  returned: always
  type: list
  elements: dict
  contains:
    mode:
      description: Name of the mode.
      type: str
    unit:
      description: Name of its unit.
      type: str
    running:
      description: Whether the unit is neither inactive nor failed.
      type: bool
    owner:
      description: V(bench), V(prove), V(serve), or null where nobody left a note.
      type: str
in_use:
  description: Units that run and were not started by a measurement or a proof. Nobody may stop them unasked.
  returned: always
  type: list
  elements: str
measuring:
  description: Units of load clients at work. What they measure is spoilt by whoever stops or starts a server.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor

OURS = ("bench", "prove")
CLIENTS = "servelab-load-*.service"


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "modes_dir": {"type": "path"},
            "owners_dir": {"type": "path"},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    prefix = module.params["prefix"].rstrip("/")
    keeper = supervisor(module.params["supervisor"], prefix)
    modes = Path(module.params["modes_dir"] or f"{prefix}/etc/servelab/modes")
    notes = Path(module.params["owners_dir"] or f"{prefix}/run/servelab")
    units = []
    for path in sorted(modes.glob("*.json")):
        unit = f"servelab-{path.stem}.service"
        note = notes / f"{path.stem}.owner"
        units.append(
            {
                "mode": path.stem,
                "unit": unit,
                "running": keeper.show(unit).get("ActiveState", "") not in ("inactive", "failed", ""),
                "owner": note.read_text().strip() or None if note.is_file() else None,
            }
        )
    in_use = [unit["unit"] for unit in units if unit["running"] and unit["owner"] not in OURS]
    module.exit_json(changed=False, units=units, in_use=in_use, measuring=keeper.running(CLIENTS))


if __name__ == "__main__":
    main()
