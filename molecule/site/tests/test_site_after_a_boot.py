"""A node that was restarted, with the driver's numbers moved as a boot may move them, needs nothing from anybody."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from conftest import reboot

ROOT = Path(__file__).resolve().parents[3]


def measure(results: Path) -> dict:
    """One level of the baseline, as a person measures it; the record of the run."""
    wishes = [f"bench_results_dir={results}", "mode=baseline", "campaign=boot", "levels=1", "bench_invalid_ok=true"]
    command = ["ansible-playbook", "bench.yml", *(word for wish in wishes for word in ("-e", wish))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    (path,) = (results / "boot").glob("*-baseline")
    return json.loads((path / "run.json").read_text())


def test_the_two_commands_work_untouched_on_a_node_that_was_restarted(play, node, fault, tmp_path):
    before = node.check_output("stat -c %Hr:%Lr /dev/nvidia-uvm")
    with fault("uvm_moved"):
        assert reboot(node) == "running"
        assert node.check_output("stat -c %Hr:%Lr /dev/nvidia-uvm") != before
        played = play()
        assert played.ok, played.said
        assert played.changed == []
        # The guest came up by itself, with the number of now.
        assert node.check_output("pct exec 129 -- stat -c %Hr:%Lr /dev/nvidia-uvm") != before
        run = measure(tmp_path)
        # A machine that others keep busy voids the level, which is no fault of the boot.
        assert run["status"] in ("ok", "invalid"), run["reason"]
    # The number is the old one again, and what is passed by dev[n] follows at the guest's next start.
    node.check_output("pct reboot 129")
    assert node.check_output("pct exec 129 -- stat -c %Hr:%Lr /dev/nvidia-uvm") == before
