"""The two commands over a local connection, end to end: what `make test` runs where no container can be started.

    pytest tests/local        (some minutes: SGLang's wheel and CUDA's are installed below .lab/test)

Everything is below .lab/test of the checkout, started as whoever runs it, and gone afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servelab.shared.supervision import Process, supervisor

ROOT = Path(__file__).resolve().parents[2]
PREFIX = ROOT / ".lab/test"
UNIT = "servelab-baseline.service"
# Another than the demo's, which may run here too.
PORT = 30900


def play(playbook: str, *words: str, check: bool = True) -> str:
    """Run a playbook on the local inventory; its output. Fails with it unless `check` is False."""
    environment = {**os.environ, "ANSIBLE_INVENTORY": "inventory/local", "SERVELAB_PREFIX": str(PREFIX)}
    command = [
        str(Path(sys.executable).with_name("ansible-playbook")),
        playbook,
        "-e",
        f"sglang_server_port={PORT}",
        *words,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def changed(output: str) -> int:
    found = re.search(r"^local +: ok=\d+ +changed=(\d+)", output, re.M)
    assert found is not None, output[-2000:]
    return int(found[1])


@pytest.fixture(scope="module")
def site() -> Iterator[str]:
    yield play("site.yml")
    play("playbooks/lab_down.yml")
    assert not PREFIX.exists()


@pytest.fixture(scope="module")
def keeper(site: str) -> Process:
    made = supervisor("process", str(PREFIX))
    assert isinstance(made, Process)
    return made


def test_what_is_skipped_is_said_by_name(site: str) -> None:
    said = " ".join(site.split())
    for name in ("pve_gpu_host", "pve_container", "nvidia_userspace"):
        assert f"skipped: {name}: " in said


def test_the_modes_were_seen_to_serve_and_nothing_was_left_running(keeper: Process) -> None:
    assert {path.name for path in (PREFIX / "var/lib/servelab/proofs").iterdir()} == {"baseline.json", "eagle3.json"}
    assert keeper.running("servelab-*.service") == ["servelab-gpu-driver.service"]


def test_a_second_run_changes_nothing(site: str) -> None:
    assert changed(play("site.yml")) == 0


def test_a_unit_that_was_edited_by_hand_is_found_and_repaired(keeper: Process) -> None:
    unit = keeper.unit_file(UNIT)
    right = unit.read_text()
    unit.write_text(right.replace("TimeoutStopSec=90", "TimeoutStopSec=1"))
    # The proof was of another unit, which check mode says, too, and changes nothing about.
    assert changed(play("site.yml", "--check", "--tags", "sglang_server_configure,sglang_server_validate")) == 1
    assert "TimeoutStopSec=1\n" in unit.read_text()
    assert changed(play("site.yml", "--tags", "sglang_server_configure,sglang_server_validate")) == 1
    assert unit.read_text() == right


def test_a_kept_server_goes_on_into_the_next_run_and_is_stopped_after_the_last(keeper: Process, tmp_path: Path) -> None:
    """The baseline twice, which is an A/A test: its second run finds the server of the first."""
    wanted = {"description": "A/A", "modes": ["baseline", "baseline"], "levels": [1], "repetitions": 1}
    (tmp_path / "kept.yml").write_text(json.dumps({**wanted, "keep_server": True}))
    command = [str(Path(sys.executable).with_name("servelab")), "campaign", str(tmp_path / "kept.yml")]
    command += ["-i", "inventory/local", "--results", str(tmp_path), "-e", f"sglang_server_port={PORT}"]
    environment = {**os.environ, "SERVELAB_PREFIX": str(PREFIX)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    first, second = (
        json.loads((path / "provenance.json").read_text()) for path in sorted((tmp_path / "kept").glob("*-baseline"))
    )
    assert (first["start"]["went_on"], first["start"]["left_running"]) == (False, True), done.stdout[-4000:]
    assert (second["start"]["went_on"], second["start"]["left_running"]) == (True, False)
    assert first["start"]["id"] == second["start"]["id"]
    # Clean before the first and after the last; between them nobody looked, and the record does not say so.
    assert [bool(run["gpu_clean"][when]) for run in (first, second) for when in ("before", "after")] == [
        True,
        False,
        False,
        True,
    ]
    assert keeper.running("servelab-*.service") == ["servelab-gpu-driver.service"]


def test_a_kept_server_with_an_older_unit_than_the_record_does_not_go_on(keeper: Process, tmp_path: Path) -> None:
    told = [f"bench_results_dir={tmp_path}", "mode=baseline", "levels=1", "bench_invalid_ok=true", "campaign=older"]
    words = [word for one in told for word in ("-e", one)]
    play("bench.yml", *words, "-e", '{"bench_leave_running": true}')
    start = keeper.show(UNIT)["InvocationID"]
    keeper.unit_file(UNIT).touch()
    play("bench.yml", *words, "-e", f"bench_go_on_with={start}")
    first, second = (
        json.loads((path / "provenance.json").read_text())["start"]
        for path in sorted((tmp_path / "older").glob("*-baseline"))
    )
    assert (first["id"], first["left_running"]) == (start, True)
    assert (second["went_on"], second["id"] == start) == (False, False)


@pytest.fixture(scope="module")
def run(keeper: Process, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    words = [f"bench_results_dir={results}", "mode=baseline", "levels=1", "bench_invalid_ok=true", "campaign=local"]
    play("bench.yml", *(word for one in words for word in ("-e", one)))
    (bundle,) = [path for path in (results / "local").iterdir() if path.is_dir()]
    return bundle


def test_a_run_is_measured_and_says_what_it_was_made_with(run: Path) -> None:
    record: dict[str, Any] = json.loads((run / "run.json").read_text())
    assert record["status"] in ("ok", "invalid"), record["reason"]
    assert record["simulated"]["profile"] == "story"
    assert record["skipped"]["pve_container"].startswith("there is no node")
    provenance = json.loads((run / "provenance.json").read_text())
    assert provenance["supervisor"] == "process"
    assert "ExecStart=" in (run / "unit.service").read_text()
    assert "simulated" in (run / "server.log").read_text()[:2000]


def test_the_cards_were_watched_while_they_worked(run: Path) -> None:
    before = json.loads((run / "provenance.json").read_text())["gpus"]
    assert {(card["power_limit_w"], card["clock_max_sm_mhz"]) for card in before} == {(600.0, 2430)}
    assert {(card["clock_sm_mhz"], *card["throttle_reasons"]) for card in before} == {(180, "gpu_idle")}
    readings = [json.loads(line) for line in (run / "cards.jsonl").read_text().splitlines()]
    assert {len(reading["gpus"]) for reading in readings} == {8}
    assert {card["clock_sm_mhz"] for reading in readings for card in reading["gpus"]} == {2430}
    (level,) = json.loads((run / "summary.json").read_text())["levels"]
    assert level["cards"]["throttle"] == {}


def test_a_run_leaves_nothing_behind(run: Path, keeper: Process) -> None:
    assert keeper.running("servelab-*.service") == ["servelab-gpu-driver.service"]
    assert not list((PREFIX / "run/servelab").glob("*.owner"))
    assert list((PREFIX / "var/lib/servelab/runs").iterdir()) == []


def test_a_server_in_use_is_not_stopped_and_a_survivor_is_cleaned(keeper: Process) -> None:
    play("playbooks/serve.yml", "-e", "mode=baseline")
    assert keeper.show(UNIT)["ActiveState"] == "active"
    refused = play("bench.yml", "-e", "mode=eagle3", "-e", "levels=1", check=False)
    assert "runs for use" in " ".join(refused.split())
    assert keeper.show(UNIT)["ActiveState"] == "active"
    # As if a benchmark had started it, and its supervisor was killed.
    (PREFIX / "run/servelab/baseline.owner").write_text("bench\n")
    os.kill(keeper.places.read(UNIT)["supervisor"]["pid"], signal.SIGKILL)
    time.sleep(0.5)
    play("playbooks/clean.yml")
    assert keeper.pids(UNIT) == set()
    assert keeper.show(UNIT)["ActiveState"] == "inactive"
