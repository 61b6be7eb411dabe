"""Two runs came home whole, tell the simulator's truth and say so; wrong calls end in one sentence."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
RESULTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results"
CAMPAIGN = RESULTS / "molecule"


# Two runs more, a minute each; the same is tested against the simulator without containers.
slow = pytest.mark.skipif(not os.environ.get("SERVELAB_SLOW"), reason="takes minutes: SERVELAB_SLOW=1 runs it")


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


@contextmanager
def played(node, fault: str) -> Iterator[None]:
    """A fault of the lab's switchboard is on, and off again whatever happens."""
    switch = f"PYTHONPATH=/srv/servelab-lab python3 -P -m servelab_lab.faults {fault}"
    node.check_output(f"{switch} on")
    try:
        yield
    finally:
        node.check_output(f"{switch} off")


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_the_bundle_is_whole(mode):
    path = newest(mode)
    wanted = {"run.json", "summary.json", "provenance.json", "server.log", "unit.service", "SHA256SUMS"}
    assert wanted <= {p.name for p in path.iterdir()}
    assert {p.name for p in (path / "levels").iterdir()} == {"level-0001.jsonl", "level-0010.jsonl"}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=path, check=True)


@pytest.mark.parametrize(
    ("mode", "story"),
    [
        # Tokens per second of one stream, as the story reports them.
        ("baseline", 89.5),
        ("eagle3", 54.1),
    ],
)
def test_a_single_stream_decodes_at_the_storys_rate(mode, story):
    level = measured(mode, 1)
    assert 1000 / level["tpot_ms"]["p50"] == pytest.approx(story, rel=0.03)
    # Over a whole request the wait for its first token counts too.
    assert story * 0.85 < level["output_tok_s"] < story


def test_the_rate_can_be_recomputed_from_the_raw_rows():
    measured("baseline", 1)
    path = newest("baseline")
    rows = [json.loads(line) for line in (path / "levels/level-0001.jsonl").read_text().splitlines()]
    scale = load(path / "run.json")["simulated"]["time_scale"]
    done = [row for row in rows if row["error"] is None and row["finish_reason"]]
    gaps = [(row["t_last"] - row["t_first"]) / (row["completion_tokens"] - 1) for row in done]
    # One stream: the rate of decoding is one token per TPOT; 1 / 89.5 s of simulated time.
    assert sum(gaps) / len(gaps) * scale == pytest.approx(1 / 89.5, rel=0.03)


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_every_figure_can_be_recomputed_by_a_program_that_shares_no_code_with_the_client(mode):
    command = [sys.executable, "-m", "servelab", "verify-bundle", str(newest(mode))]
    done = subprocess.run(command, cwd=ROOT / "src", capture_output=True, text=True, check=False)
    assert "figures recomputed, all agree" in done.stdout


def test_more_options_reach_the_client():
    for level in load(newest("baseline") / "summary.json")["levels"]:
        assert level["goodput"]["slo"] == {"ttft_ms": 60000, "e2e_ms": 600000}
        assert level["goodput"]["share"] == 1
    assert all(level["goodput"] is None for level in load(newest("eagle3") / "summary.json")["levels"])


def test_an_option_that_the_role_gives_itself_is_refused():
    status, said = bench("-e", "mode=baseline", "-e", '{"bench_more_options": ["--levels", "3"]}')
    assert status != 0
    assert "bench_more_options has --levels, which the role gives itself" in said


def test_chunks_are_not_tokens_under_speculation():
    levels = {level["concurrency"]: level for level in load(newest("eagle3") / "summary.json")["levels"]}
    assert levels[10]["tokens_per_chunk"] > 1.5
    for level in load(newest("baseline") / "summary.json")["levels"]:
        assert level["tokens_per_chunk"] == pytest.approx(1, abs=0.01)


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_simulated_is_written_on_everything(mode):
    path = newest(mode)
    told = {"profile": "story"}
    assert told.items() <= load(path / "run.json")["simulated"].items()
    assert told.items() <= load(path / "summary.json")["server"]["simulated"].items()
    assert "simulated" in (path / "server.log").read_text().splitlines()[0]


def test_provenance_says_what_was_measured():
    found = load(newest("eagle3") / "provenance.json")
    text = json.dumps(found)
    assert len(found["gpus"]) == 8
    assert found["patch"]["shape"] == "B4"
    assert found["gpu_clean"]["before"]["view"] == "node and guest"
    assert re.search(r'"boot_id": "[0-9a-f-]{36}"', text)
    assert "--speculative-algorithm" in (newest("eagle3") / "unit.service").read_text()


def test_the_ledger_has_a_line_for_each():
    lines = [json.loads(line) for line in (RESULTS / "ledger.jsonl").read_text().splitlines()]
    told = {(line["mode"], line["campaign"]): line["status"] for line in lines}
    for mode in ("baseline", "eagle3"):
        valid = all(level["valid"] for level in load(newest(mode) / "summary.json")["levels"])
        assert told[mode, "molecule"] == ("ok" if valid else "invalid")


def test_the_comparison_gives_the_storys_verdict():
    for mode in ("baseline", "eagle3"):
        for concurrency in (1, 10):
            measured(mode, concurrency)
    command = [sys.executable, "-m", "servelab", "compare", str(CAMPAIGN)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    assert "eagle3 pays nowhere from C=1 to C=10" in done.stdout
    assert "(simulated)" in done.stdout


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


def test_correctness_has_a_record_of_the_baseline_and_the_other_mode_is_held_against_it(guest):
    assert load(newest("baseline") / "run.json")["correctness"]["status"] in ("unverified", "verified")
    compared = load(newest("eagle3") / "run.json")["correctness"]
    assert compared["status"] in ("unverified", "verified")
    # The simulated model's answer depends on nothing but the prompt.
    assert (compared["figures"]["match"], compared["figures"]["kl"]) == (1.0, 0.0)
    assert guest.check_output("ls /var/lib/servelab/correctness").endswith(".json")


@slow
def test_garbage_is_a_failed_run_by_that_name_and_is_never_put_under_load(node):
    with played(node, "garbage_output"):
        status, said = bench("-e", "mode=custom_ar_pcie", "-e", "campaign=garbage", "-e", '{"levels": [1]}')
    assert status != 0
    assert "Wrong output: every answer is one token repeated" in said
    (path,) = (RESULTS / "garbage").glob("*-custom_ar_pcie")
    run = load(path / "run.json")
    assert (run["status"], run["correctness"]["status"]) == ("failed", "wrong")
    assert run["reason"].startswith("Wrong output: ")
    assert not (path / "levels").exists()


@slow
def test_a_way_that_fell_back_is_a_failed_run_by_that_name(node):
    with played(node, "fell_back_to_nccl"):
        status, _ = bench("-e", "mode=custom_ar_pcie", "-e", "campaign=fell", "-e", '{"levels": [1]}')
    assert status != 0
    line = last_in_the_ledger()
    assert line["reason"].startswith("Mode custom_ar_pcie fell back to NCCL: the custom all-reduce could not be set up")


def test_nccls_variables_were_seen_in_the_schedulers():
    seen = load(newest("baseline") / "provenance.json")["ready"]["evidence"]
    assert {"NCCL_ALGO=Ring in 8 schedulers", "NCCL_PROTO=LL in 8 schedulers"} <= set(seen)
