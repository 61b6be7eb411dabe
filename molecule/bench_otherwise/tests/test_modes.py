"""Two modes were measured and compared; runs that fail say why, and leave a line in the ledger and nothing else."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys

import pytest
from bundles import (
    CAMPAIGN,
    RESULTS,
    ROOT,
    assert_at_the_storys_rate,
    assert_whole,
    bench,
    last_in_the_ledger,
    load,
    measured,
    newest,
)

# Two runs more; the same is tested against the simulator without containers.
slow = pytest.mark.skipif(not os.environ.get("SERVELAB_SLOW"), reason="takes minutes: SERVELAB_SLOW=1 runs it")


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_both_bundles_are_whole(mode):
    assert_whole(mode)


def test_a_single_stream_decodes_at_the_storys_rate():
    assert_at_the_storys_rate("eagle3", 54.1)


def test_chunks_are_not_tokens_under_speculation():
    levels = {level["concurrency"]: level for level in load(newest("eagle3") / "summary.json")["levels"]}
    assert levels[10]["tokens_per_chunk"] > 1.5


def test_no_options_no_goodput():
    assert all(level["goodput"] is None for level in load(newest("eagle3") / "summary.json")["levels"])


def test_it_was_the_mode_that_was_asked_for():
    path = newest("eagle3")
    assert load(path / "run.json")["simulated"]["profile"] == "story"
    assert "--speculative-algorithm" in (path / "unit.service").read_text()


def test_the_ledger_has_a_line_for_each():
    lines = [json.loads(line) for line in (RESULTS / "ledger.jsonl").read_text().splitlines()]
    told = {(line["mode"], line["campaign"]): line["status"] for line in lines}
    for mode in ("baseline", "eagle3"):
        valid = all(level["valid"] for level in load(newest(mode) / "summary.json")["levels"])
        assert told[mode, "molecule"] == ("ok" if valid else "invalid")


def test_the_other_mode_is_held_against_the_record_of_the_baseline():
    compared = load(newest("eagle3") / "run.json")["correctness"]
    assert compared["status"] in ("unverified", "verified")
    # The simulated model's answer depends on nothing but the prompt.
    assert (compared["figures"]["match"], compared["figures"]["kl"]) == (1.0, 0.0)


def test_the_comparison_gives_the_storys_verdict():
    for mode in ("baseline", "eagle3"):
        for concurrency in (1, 10):
            measured(mode, concurrency)
    command = [sys.executable, "-m", "servelab", "compare", str(CAMPAIGN)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "eagle3 pays nowhere from C=1 to C=10" in done.stdout
    assert "(simulated)" in done.stdout


def test_a_persons_process_on_a_card_stops_the_run_and_lives(guest):
    guest.check_output("systemd-run --unit=persons --property=StandardInput=file:/dev/nvidia3 sleep infinity")
    try:
        status, said = bench("-e", "mode=baseline", "-e", "campaign=refused", "-e", '{"levels": [1]}')
        pid = guest.check_output("systemctl show persons --property=MainPID --value")
        assert status != 0
        assert guest.service("persons").is_running
        assert "hold GPUs of lab-gpu1" in said
        assert re.search(rf"\b{pid}\b.* /usr/bin/sleep infinity", said)
    finally:
        guest.run("systemctl stop persons")
    # It is data: the refused run is in the ledger, with its reason.
    line = last_in_the_ledger()
    assert (line["campaign"], line["status"]) == ("refused", "failed")


def test_a_mode_that_cannot_start_is_a_failed_run_with_its_cause(guest):
    status, said = bench(
        "-e", "mode=baseline", "-e", "campaign=broken", "-e", '{"levels": [1], "sglang_server_tp_size": 16}'
    )
    assert status != 0
    cause = "/dev/nvidia8 is missing or is not a character device"
    assert cause in said
    line = last_in_the_ledger()
    assert (line["campaign"], line["status"]) == ("broken", "failed")
    assert cause in line["reason"]
    assert not guest.run("systemctl list-units --no-legend --state=active 'servelab-*.service'").stdout


@slow
def test_garbage_is_a_failed_run_by_that_name_and_is_never_put_under_load(fault):
    with fault("garbage_output"):
        status, said = bench("-e", "mode=custom_ar_pcie", "-e", "campaign=garbage", "-e", '{"levels": [1]}')
    assert status != 0
    assert "Wrong output: every answer is one token repeated" in said
    (path,) = (RESULTS / "garbage").glob("*-custom_ar_pcie")
    run = load(path / "run.json")
    assert (run["status"], run["correctness"]["status"]) == ("failed", "wrong")
    assert run["reason"].startswith("Wrong output: ")
    assert not (path / "levels").exists()


@slow
def test_a_way_that_fell_back_is_a_failed_run_by_that_name(fault):
    with fault("fell_back_to_nccl"):
        status, _ = bench("-e", "mode=custom_ar_pcie", "-e", "campaign=fell", "-e", '{"levels": [1]}')
    assert status != 0
    line = last_in_the_ledger()
    assert line["reason"].startswith("Mode custom_ar_pcie fell back to NCCL: the custom all-reduce could not be set up")
