#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Close the directory of one run on the guest: what ran, on what, what it said; then checksums and one archive."""

from __future__ import annotations

DOCUMENTATION = r"""
module: run_pack
short_description: Complete the directory of one run, checksum it and pack it
version_added: 0.1.0
description:
  - Adds the server's log, the unit, C(run.json) and C(provenance.json) to what the load client wrote, takes secrets out
    of all text, writes C(SHA256SUMS) and an archive.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  dir:
    description: Directory of the run. Its name is the run's id.
    type: path
    required: true
  run:
    description: C(run.json), except what follows from the summary.
    type: dict
    required: true
  provenance:
    description: What others found out, as it stands; what this machine knows itself is added.
    type: dict
    default: {}
  mode:
    description: Name of the mode.
    type: str
    required: true
  invocation_id:
    description: The supervisor's id of the start whose log belongs to the run. Empty when nothing was started.
    type: str
    default: ""
  stack:
    description: The stack in use.
    type: path
    default: /opt/servelab/stack
  client_log:
    description: What the load client printed.
    type: path
attributes:
  check_mode:
    support: none
    description: There is nothing to pack when nothing ran.
  diff_mode:
    support: none
    description: Measurements have no earlier state.
"""

EXAMPLES = r"""
- name: Pack the run
  servelab.sglang.run_pack:
    dir: /var/lib/servelab/runs/20261129T154312Z-baseline
    mode: baseline
    invocation_id: 0123456789abcdef0123456789abcdef
    run:
      run_id: 20261129T154312Z-baseline
      status: ok
"""

RETURN = r"""
archive:
  description: The archive on the guest.
  returned: success
  type: str
sha256:
  description: Its checksum.
  returned: success
  type: str
run:
  description: C(run.json) as written.
  returned: success
  type: dict
table:
  description: The levels as lines of a table; empty when nothing was measured.
  returned: success
  type: list
  elements: str
"""

import json
import platform
import tarfile
import time
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.redact import redact, redact_value
from ansible_collections.servelab.sglang.plugins.module_utils.run_files import (
    level_table,
    packages,
    sha256,
    simulated_of,
    write_sums,
)
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def text_of(path: str) -> str | None:
    """The stripped text of a file, None if there is none."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def json_of(path: Path) -> Any:
    """The content of a JSON file, None if there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def machine(stack: str) -> dict[str, Any]:
    """What this machine knows about itself."""
    real = Path(stack).resolve()
    site = next(iter(sorted(real.glob("lib/python3*/site-packages"))), None)
    return {
        "kernel": platform.release(),
        "python": platform.python_version(),
        "boot_id": text_of("/proc/sys/kernel/random/boot_id"),
        "os": (text_of("/etc/os-release") or "").split('PRETTY_NAME="')[-1].split('"')[0] or None,
        "nvidia_driver": text_of("/proc/driver/nvidia/version"),
        "stack": str(real),
        "packages": packages(site) if site else {},
    }


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "dir": {"type": "path", "required": True},
            "run": {"type": "dict", "required": True},
            "provenance": {"type": "dict", "default": {}},
            "mode": {"type": "str", "required": True},
            "invocation_id": {"type": "str", "default": ""},
            "stack": {"type": "path", "default": "/opt/servelab/stack"},
            "client_log": {"type": "path"},
            **SUPERVISOR_OPTIONS,
        }
    )
    asked = module.params
    directory, mode = Path(asked["dir"]), asked["mode"]
    directory.mkdir(parents=True, exist_ok=True)
    # The client's progress is news, not a result.
    (directory / "progress.json").unlink(missing_ok=True)

    prefix = asked["prefix"].rstrip("/")
    keeper = supervisor(asked["supervisor"], prefix)
    log = keeper.log(asked["invocation_id"], stamped=True)
    (directory / "server.log").write_text(redact(log))
    unit = text_of(str(keeper.unit_file(f"servelab-{mode}.service"))) or ""
    (directory / "unit.service").write_text(redact(unit) + "\n")
    said = text_of(asked["client_log"]) if asked["client_log"] else None
    if said:
        (directory / "client.log").write_text(redact(said) + "\n")

    summary = json_of(directory / "summary.json")
    # The load client has asked the server, with its key where it has one, and kept the answer without secrets.
    told = json_of(directory / "server_info.json") or {}
    server_info = asked["provenance"].get("server_info") or told.get("after") or told.get("before")
    run = {
        "schema": "servelab.run/1",
        **asked["run"],
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "simulated": simulated_of(summary, server_info, log),
    }
    provenance = {
        "schema": "servelab.provenance/1",
        **asked["provenance"],
        "server_info": server_info,
        "guest": machine(asked["stack"]),
        "mode": json_of(Path(f"{prefix}/etc/servelab/modes/{mode}.json")),
        "unit": unit,
        "supervisor": asked["supervisor"],
    }
    for name, content in (("run.json", run), ("provenance.json", provenance)):
        (directory / name).write_text(json.dumps(redact_value(content), indent=2, ensure_ascii=False) + "\n")
    write_sums(directory)
    archive = directory.with_name(f"{directory.name}.tar.gz")
    with tarfile.open(archive, "w:gz", compresslevel=3) as tar:
        tar.add(directory, arcname=".")
    table = level_table(summary, run["simulated"], run.get("skipped")) if summary else []
    module.exit_json(changed=True, archive=str(archive), sha256=sha256(archive), run=redact_value(run), table=table)


if __name__ == "__main__":
    main()
