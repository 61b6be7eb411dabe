"""The run with most variables changed: its record has what was asked for, and its files are where they were to be."""

from __future__ import annotations

import json
from pathlib import Path

from bundles import RESULTS

PATH = RESULTS / "otherwise"


def run() -> Path:
    (path,) = PATH.glob("*-baseline")
    return path


def load(name: str) -> dict:
    return json.loads((run() / name).read_text())


def test_the_load_is_what_was_asked_for():
    summary = load("summary.json")
    wanted = {
        "api": "chat",
        "input_tokens": 64,
        "output_tokens": 32,
        "seed": 7,
        "min_seconds": 2,
        "min_waves": 2,
        "warmup_requests": 1,
    }
    assert wanted.items() <= summary["workload"].items()
    assert [level["concurrency"] for level in summary["levels"]] == [2]
    rows = [json.loads(line) for line in (run() / "levels/level-0002.jsonl").read_text().splitlines()]
    assert {row["completion_tokens"] for row in rows if row["finish_reason"]} == {32}


def test_nobody_looked_at_the_cards_meanwhile():
    assert not (run() / "cards.jsonl").exists()


def test_its_files_stayed_on_the_guest_and_stand_where_they_were_to(guest):
    assert guest.file(f"/srv/other/runs/{run().name}/summary.json").exists
    assert guest.check_output("ls /srv/other/client").endswith(".whl")
    assert (
        guest.check_output(f"sha256sum /srv/other/runs/{run().name}/summary.json").split()[0]
        in (run() / "SHA256SUMS").read_text()
    )


def test_the_start_was_its_own_and_did_not_outlive_it():
    start = load("provenance.json")["start"]
    assert len(start["id"]) == 32
    assert (start["went_on"], start["left_running"]) == (False, False)
