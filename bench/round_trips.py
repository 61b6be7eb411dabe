#!/usr/bin/env python3
"""What a run that changes nothing costs: time and round trips, with this repository's settings and with Ansible's own.

    python3 bench/round_trips.py [--inventory inventory/lab] [--repeat 3]

The machines must be converged (`playbooks/provision.yml`, `playbooks/guest.yml`). Every ssh, scp and sftp that Ansible
starts is a round trip; they are counted by standing in their place. Runs alternate, so that a busy machine is busy for
both.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parent.parent
ROLES = ("pve_gpu_host", "pve_container", "nvidia_userspace")
TOOLS = ("ssh", "scp", "sftp")
# What the runs have in common besides the inventory: where the collection is. Everything else is Ansible's default.
PLAIN = "[defaults]\ncollections_path = {root}/collections\ninject_facts_as_vars = false\nforks = 5\n"


@dataclass(frozen=True)
class Run:
    seconds: float
    trips: int


def stand_ins(directory: Path) -> dict[str, str]:
    """Programs in the place of ssh, scp and sftp that note each call."""
    environment = {}
    for tool in TOOLS:
        path = directory / tool
        path.write_text(f'#!/bin/sh\necho {tool} >> "{directory}/calls"\nexec /usr/bin/{tool} "$@"\n')
        path.chmod(0o755)
        environment[f"ANSIBLE_{tool.upper()}_EXECUTABLE"] = str(path)
    return environment


def play(config: Path, inventory: Path, directory: Path) -> Run:
    """One run. Raises SystemExit where something changed or failed: then it is not what is measured."""
    calls = directory / "calls"
    calls.write_text("")
    command = ["ansible-playbook", "-i", str(inventory), "--tags", ",".join(ROLES)]
    command += [str(ROOT / "playbooks" / name) for name in ("provision.yml", "guest.yml")]
    environment = {**os.environ, **stand_ins(directory), "ANSIBLE_CONFIG": str(config), "ANSIBLE_NOCOLOR": "1"}
    started = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - started
    recap = done.stdout.rpartition("PLAY RECAP")[2]
    if done.returncode or re.search(r"(changed|failed|unreachable)=[1-9]", recap):
        sys.exit(f"This run changed something or failed, so it tells nothing:\n{recap or done.stderr}")
    return Run(seconds, len(calls.read_text().splitlines()))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--inventory", type=Path, default=ROOT / "inventory/lab")
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    runs: dict[str, list[Run]] = {"this repository": [], "Ansible's defaults": []}
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        plain = directory / "ansible.cfg"
        plain.write_text(PLAIN.format(root=ROOT))
        configs = {"this repository": ROOT / "ansible.cfg", "Ansible's defaults": plain}
        for _ in range(asked.repeat):
            for label, config in configs.items():
                runs[label].append(play(config, asked.inventory, directory))
                print(f"{label}: {runs[label][-1].seconds:.1f} s, {runs[label][-1].trips} round trips", file=sys.stderr)
    result = {
        label: {
            "median_s": round(median(run.seconds for run in found), 1),
            "seconds": [round(run.seconds, 1) for run in found],
            "round_trips": sorted({run.trips for run in found}),
        }
        for label, found in runs.items()
    }
    print(json.dumps({"roles": ROLES, "inventory": str(asked.inventory), "runs": result}, indent=2))


if __name__ == "__main__":
    main()
