# SPDX-License-Identifier: Apache-2.0
"""The options of every module that asks about a unit."""

from __future__ import annotations


class ModuleDocFragment:
    """Documentation of SUPERVISOR_OPTIONS (module_utils/supervision.py)."""

    DOCUMENTATION = r"""
options:
  supervisor:
    description:
      - What keeps the units - V(systemd), or V(process), the collection's own supervisor for machines without it.
      - The role P(servelab.sglang.sglang_server#role) sets it in C(sglang_server_supervisor).
    type: str
    choices: [systemd, process]
    default: systemd
  prefix:
    description: Directory below which C(etc/servelab), C(run/servelab) and the like are. Empty means the machine's own.
    type: path
    default: ""
"""
