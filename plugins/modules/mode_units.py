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
options:
  modes_dir:
    description: Directory of the rendered modes.
    type: path
    default: /etc/servelab/modes
  owners_dir:
    description: Directory of the notes about who started a unit.
    type: path
    default: /run/servelab
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

OURS = ("bench", "prove")
CLIENTS = "servelab-load-*.service"


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "modes_dir": {"type": "path", "default": "/etc/servelab/modes"},
            "owners_dir": {"type": "path", "default": "/run/servelab"},
        },
        supports_check_mode=True,
    )
    units = []
    for path in sorted(Path(module.params["modes_dir"]).glob("*.json")):
        unit = f"servelab-{path.stem}.service"
        _, out, _ = module.run_command(["systemctl", "show", unit, "--property=ActiveState", "--value"])
        note = Path(module.params["owners_dir"]) / f"{path.stem}.owner"
        units.append(
            {
                "mode": path.stem,
                "unit": unit,
                "running": out.strip() not in ("inactive", "failed", ""),
                "owner": note.read_text().strip() or None if note.is_file() else None,
            }
        )
    in_use = [unit["unit"] for unit in units if unit["running"] and unit["owner"] not in OURS]
    command = ["systemctl", "list-units", "--plain", "--no-legend", "--state=active,activating", CLIENTS]
    _, out, _ = module.run_command(command)
    measuring = [line.split()[0] for line in out.splitlines() if line.strip()]
    module.exit_json(changed=False, units=units, in_use=in_use, measuring=measuring)


if __name__ == "__main__":
    main()
