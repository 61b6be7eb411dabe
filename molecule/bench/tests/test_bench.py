"""A run came home whole, tells the simulator's truth and says so; wrong calls end in one sentence."""

from __future__ import annotations

import json
import re
import subprocess

import pytest
from bundles import (
    CAMPAIGN,
    ROOT,
    assert_at_the_storys_rate,
    assert_whole,
    bench,
    last_in_the_ledger,
    load,
    measured,
    newest,
)

# Tokens per second of one stream, as the story reports them.
STORY = 89.5


def test_the_bundle_is_whole():
    assert_whole("baseline")


def test_a_single_stream_decodes_at_the_storys_rate():
    assert_at_the_storys_rate("baseline", STORY)


def test_the_rate_can_be_recomputed_from_the_raw_rows():
    measured("baseline", 1)
    path = newest("baseline")
    rows = [json.loads(line) for line in (path / "levels/level-0001.jsonl").read_text().splitlines()]
    scale = load(path / "run.json")["simulated"]["time_scale"]
    done = [row for row in rows if row["error"] is None and row["finish_reason"]]
    gaps = [(row["t_last"] - row["t_first"]) / (row["completion_tokens"] - 1) for row in done]
    # One stream: the rate of decoding is one token per TPOT; 1 / STORY s of simulated time.
    assert sum(gaps) / len(gaps) * scale == pytest.approx(1 / STORY, rel=0.03)


def test_more_options_reach_the_client():
    for level in load(newest("baseline") / "summary.json")["levels"]:
        assert level["goodput"]["slo"] == {"ttft_ms": 60000, "e2e_ms": 600000}
        assert level["goodput"]["share"] == 1


def test_a_chunk_is_a_token_without_speculation():
    for level in load(newest("baseline") / "summary.json")["levels"]:
        assert level["tokens_per_chunk"] == pytest.approx(1, abs=0.01)


def test_simulated_is_written_on_everything():
    path = newest("baseline")
    told = {"profile": "story"}
    assert told.items() <= load(path / "run.json")["simulated"].items()
    assert told.items() <= load(path / "summary.json")["server"]["simulated"].items()
    assert "simulated" in (path / "server.log").read_text().splitlines()[0]


def test_provenance_says_what_was_measured():
    found = load(newest("baseline") / "provenance.json")
    text = json.dumps(found)
    assert len(found["gpus"]) == 8
    assert found["patch"]["shape"] == "B4"
    assert found["gpu_clean"]["before"]["view"] == "node and guest"
    assert re.search(r'"boot_id": "[0-9a-f-]{36}"', text)


def test_the_ledger_has_its_line():
    line = last_in_the_ledger()
    valid = all(level["valid"] for level in load(newest("baseline") / "summary.json")["levels"])
    assert (line["mode"], line["campaign"]) == ("baseline", "molecule")
    assert line["status"] == ("ok" if valid else "invalid")


def test_correctness_has_a_record_of_the_baseline(guest):
    assert load(newest("baseline") / "run.json")["correctness"]["status"] in ("unverified", "verified")
    assert guest.check_output("ls /var/lib/servelab/correctness").endswith(".json")


def test_nccls_variables_were_seen_in_the_schedulers():
    seen = load(newest("baseline") / "provenance.json")["ready"]["evidence"]
    assert {"NCCL_ALGO=Ring in 8 schedulers", "NCCL_PROTO=LL in 8 schedulers"} <= set(seen)


def test_an_option_that_the_role_gives_itself_is_refused():
    status, said = bench("-e", "mode=baseline", "-e", '{"bench_more_options": ["--levels", "3"]}')
    assert status != 0
    assert "bench_more_options has --levels, which the role gives itself" in said


def test_nothing_is_left_running(guest):
    assert not guest.run("systemctl list-units --no-legend --state=active 'servelab-*.service'").stdout
    used = guest.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    assert max(int(mib) for mib in used) <= 4


def test_a_load_client_that_failed_does_not_degrade_the_guest(guest):
    """As one whose levels are invalid does; bench heard it, and stops its unit like any other."""
    unit = "servelab-load-test-baseline.service"
    guest.check_output(f"systemd-run --quiet --wait --unit={unit} false || true")
    assert guest.check_output(f"systemctl show {unit} --property=ActiveState --value") == "failed"
    stop = ["ansible", "lab-gpu1", "-m", "servelab.sglang.unit", "-a", f"name={unit} state=stopped"]
    subprocess.run(stop, cwd=ROOT, capture_output=True, check=True)
    assert guest.check_output(f"systemctl show {unit} --property=LoadState --value") == "not-found"


def test_an_unknown_mode_is_answered_with_the_known_ones():
    before = sorted(CAMPAIGN.iterdir())
    status, said = bench("-e", "mode=eagle4")
    assert status != 0
    known = re.search(r"There is no mode eagle4; the known modes are: ([\w, ]+)", said)
    assert known and {"baseline", "eagle3"} <= set(known[1].split(", "))
    assert sorted(CAMPAIGN.iterdir()) == before


def test_no_mode_is_answered_with_the_command():
    status, said = bench()
    assert status != 0
    assert "Say which mode to measure: ansible-playbook bench.yml -e mode=NAME." in said
