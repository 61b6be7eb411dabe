"""The bundles that the scenarios of bench bring home."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

RESULTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results"
CAMPAIGN = RESULTS / "molecule"


def newest(mode: str) -> Path:
    return sorted(CAMPAIGN.glob(f"*-{mode}"))[-1]


def load(path: Path) -> dict:
    return json.loads(path.read_text())


def measured(mode: str, concurrency: int) -> dict:
    """The summary of a level that may be believed. The only excuse for another is that this machine was too busy."""
    (level,) = (one for one in load(newest(mode) / "summary.json")["levels"] if one["concurrency"] == concurrency)
    late = [reason for reason in level["invalid_reasons"] if "behind its own time" in reason]
    assert level["valid"] or late == level["invalid_reasons"]
    if late:
        pytest.skip(f"{mode}, C={concurrency}: {late[0]}")
    return level


def bench(*extra: str) -> tuple[int, str]:
    """Run bench.yml as a person does; its exit status and what it said, with line breaks taken out."""
    command = ["ansible-playbook", "bench.yml", "-e", f"bench_results_dir={RESULTS}", *extra]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.returncode, re.sub(r"\s+", " ", done.stdout + done.stderr)


def last_in_the_ledger() -> dict:
    return json.loads((RESULTS / "ledger.jsonl").read_text().splitlines()[-1])


def assert_whole(mode: str) -> None:
    """Its files are there, arrived as they left, and its figures follow from its rows."""
    path = newest(mode)
    wanted = {"run.json", "summary.json", "provenance.json", "server.log", "unit.service", "SHA256SUMS"}
    assert wanted <= {p.name for p in path.iterdir()}
    assert {p.name for p in (path / "levels").iterdir()} == {"level-0001.jsonl", "level-0010.jsonl"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=path, check=True)
    # By a program that shares no code with the client.
    command = [sys.executable, "-m", "servelab", "verify-bundle", str(path)]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert "figures recomputed, all agree" in done.stdout


def assert_at_the_storys_rate(mode: str, story: float) -> None:
    """One stream's tokens per second are the story's."""
    level = measured(mode, 1)
    assert 1000 / level["tpot_ms"]["p50"] == pytest.approx(story, rel=0.03)
    # Over a whole request the wait for its first token counts too.
    assert story * 0.85 < level["output_tok_s"] < story
