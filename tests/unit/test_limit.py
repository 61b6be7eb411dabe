"""A run for a part of the machines (--limit) checks the whole inventory all the same."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def validate(*options: str) -> subprocess.CompletedProcess[str]:
    command = ["ansible-playbook", "-i", "inventory/lab-nodes", "playbooks/validate.yml", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("limit", ["lab-gpu3", "lab-pve2:lab-gpu3", "all"])
def test_the_inventory_is_checked_whatever_the_limit(limit):
    # No machine of it is there, so nothing can have been connected to.
    done = validate("--limit", limit, "-e", "sglang_server_prot=1")
    assert done.returncode == 2
    assert "lab-pve1: sglang_server_prot is no variable of the role sglang_server" in done.stdout
    assert "UNREACHABLE" not in done.stdout


def test_a_right_inventory_passes_under_a_limit():
    done = validate("--limit", "lab-gpu3")
    assert done.returncode == 0, done.stdout
    assert done.stdout.count("ok: [lab-gpu3]") == 1
