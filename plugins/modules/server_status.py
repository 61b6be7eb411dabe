#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""What the running servers of a machine do."""

from __future__ import annotations

DOCUMENTATION = r"""
module: server_status
short_description: Ask the running servers what they do
version_added: 0.1.0
description:
  - For each mode whose unit runs - since when, started by whom, and what it says of itself.
  - Changes nothing, and asks for nothing that costs a server time.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  host:
    description: Address on which the servers listen.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which the servers listen.
    type: int
    required: true
  timeout:
    description: Seconds for an answer.
    type: int
    default: 10
attributes:
  check_mode:
    support: full
    description: Asks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Ask what runs
  servelab.sglang.server_status:
    port: 30000
"""

RETURN = r"""
servers:
  description: >-
    One per running unit: RV(ignore:mode), RV(ignore:unit), RV(ignore:owner), RV(ignore:seconds), RV(ignore:health) and
    RV(ignore:figures); a figure that nobody says is null. Of a server over several guests RV(ignore:nodes),
    RV(ignore:rank) and RV(ignore:head), where they meet.
  returned: always
  type: list
  elements: dict
"""

import json
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import ask, use_key_of
from ansible_collections.servelab.sglang.plugins.module_utils.server_status import figures
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def document(url: str, timeout: int, *paths: str) -> dict[str, Any] | None:
    """The first JSON object among the answers; releases name the places differently."""
    for path in paths:
        answer = ask(f"{url}/{path}", timeout)
        if answer.status == 200 and isinstance(answer.body, dict):
            return answer.body
    return None


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "timeout": {"type": "int", "default": 10},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    asked = module.params
    prefix = asked["prefix"].rstrip("/")
    keeper = supervisor(asked["supervisor"], prefix)
    use_key_of(prefix)
    url = f"http://{asked['host']}:{asked['port']}"
    servers = []
    for path in sorted(Path(f"{prefix}/etc/servelab/modes").glob("*.json")):
        unit = f"servelab-{path.stem}.service"
        shown = keeper.show(unit)
        if shown.get("ActiveState", "") in ("inactive", "failed", ""):
            continue
        begun = int(shown.get("ExecMainStartTimestampMonotonic") or 0) / 1e6
        health = ask(f"{url}/health", max(5, asked["timeout"]))
        mode = json.loads(path.read_text())
        note = Path(f"{prefix}/run/servelab/{path.stem}.owner")
        servers.append(
            {
                "mode": path.stem,
                "unit": unit,
                "owner": note.read_text().strip() if note.is_file() else None,
                "seconds": time.clock_gettime(time.CLOCK_MONOTONIC) - begun if begun else 0.0,
                "health": "healthy" if health.status == 200 else f"health: {health.problem or f'HTTP {health.status}'}",
                "release": mode.get("release"),
                # Of a server over several guests.
                "nodes": mode.get("nodes"),
                "rank": mode.get("args", {}).get("node_rank"),
                "head": mode.get("args", {}).get("dist_init_addr"),
                "figures": figures(
                    document(url, asked["timeout"], "server_info", "get_server_info"),
                    document(url, asked["timeout"], "v1/loads"),
                ),
            }
        )
    module.exit_json(changed=False, servers=servers)


if __name__ == "__main__":
    main()
