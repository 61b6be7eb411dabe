"""One (simulated) server over two guests, over a local connection, end to end.

pytest tests/local/test_nodes.py      (some minutes: SGLang's wheel is installed below .lab)
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from two_guests import FIRST, MEETING, ROOT, SECOND, Guest, changed, command, complete, play

pytestmark = pytest.mark.usefixtures("guests")
SERVE, PAIR = "playbooks/serve.yml", ("-e", "mode=pair")
UNIT = "servelab-pair.service"


def states() -> list[str]:
    return [guest.keeper.show(UNIT)["ActiveState"] for guest in (FIRST, SECOND)]


def start_of(guest: Guest) -> str:
    return guest.keeper.show(UNIT)["InvocationID"]


@pytest.fixture(scope="module")
def served(guests: None) -> str:
    return play(SERVE, *PAIR)


def test_every_rank_is_started_with_its_own_number_and_the_first_answers(served: str) -> None:
    assert "ready: answered a completion and a long prompt" in served
    assert states() == ["active", "active"]
    assert complete(FIRST.port) == 200 and complete(SECOND.port) == 404
    for number, guest in enumerate((FIRST, SECOND)):
        mode = json.loads((guest.prefix / "etc/servelab/modes/pair.json").read_text())
        assert (mode["args"]["nnodes"], mode["args"]["node_rank"]) == (2, number)
        assert mode["args"]["dist_init_addr"] == f"127.0.0.1:{MEETING}"
        assert mode["env"]["GLOO_SOCKET_IFNAME"] == mode["env"]["NCCL_SOCKET_IFNAME"] == "lo"


def test_status_tells_the_ranks(served: str) -> None:
    said = play("playbooks/status.yml")
    assert "rank 0 of 2" in said and "rank 1 of 2" in said


def test_a_second_start_changes_nothing(served: str) -> None:
    before = [start_of(guest) for guest in (FIRST, SECOND)]
    again = play(SERVE, *PAIR)
    assert [start_of(guest) for guest in (FIRST, SECOND)] == before
    assert changed(again) == changed(again, SECOND)
    assert "runs with older settings than" not in again


def test_what_an_earlier_run_wrote_is_told_and_a_restart_is_one_of_both(served: str) -> None:
    before = [start_of(guest) for guest in (FIRST, SECOND)]
    changing = ("-e", "sglang_server_stop_timeout=33")
    said = play(SERVE, *PAIR, *changing)
    assert "servelab-pair runs with older settings than its files have" in said
    assert [start_of(guest) for guest in (FIRST, SECOND)] == before
    # As if only the second's had changed: the first ends with it all the same.
    os.utime(FIRST.keeper.unit_file(UNIT), (1, 1))
    play(SERVE, *PAIR, *changing, "-e", "sglang_server_restart_ok=true")
    after = [start_of(guest) for guest in (FIRST, SECOND)]
    assert states() == ["active", "active"] and not set(after) & set(before)
    assert complete(FIRST.port) == 200


def test_stop_ends_both(served: str) -> None:
    play("playbooks/stop.yml")
    assert states() == ["inactive", "inactive"]
    assert [guest.keeper.pids(UNIT) for guest in (FIRST, SECOND)] == [set(), set()]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--limit", "first"], "and second is not in this play any more, or never was"),
        (["-f", "1"], "which are watched at the same time, and forks is 1; add -f 2."),
        (
            ["-e", '{"sglang_server_nodes": ["first"]}'],
            "and sglang_server_nodes has 1 (first); add guests to the group",
        ),
        (["-e", "sglang_server_dist_address=0.0.0.0"], "has the address 0.0.0.0, at which the others cannot reach it"),
        (["-e", "sglang_server_dist_address=192.0.2.7"], "no interface of first has the address at which the others"),
        (["-e", '{"sglang_server_extra_args": {"tp_size": 5}}'], "its 5 ranks (tp_size) do not divide by 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(words: list[str], sentence: str) -> None:
    said = play(SERVE, *PAIR, *words, check=False)
    assert sentence in said
    assert states() == ["inactive", "inactive"]


@pytest.fixture
def slow_to_load() -> Iterator[None]:
    """Starts that last, so that a rank can be killed in one."""
    files = [guest.prefix / "opt/servelab-lab/server.json" for guest in (FIRST, SECOND)]
    before = [file.read_text() for file in files]
    for file, text in zip(files, before, strict=True):
        file.write_text(json.dumps(json.loads(text) | {"load_seconds": 1200}))
    yield
    for file, text in zip(files, before, strict=True):
        file.write_text(text)


def test_a_rank_that_dies_ends_the_start_with_its_own_cause(slow_to_load: None) -> None:
    # The log of an earlier start is another's.
    earlier = start_of(SECOND)
    start = subprocess.Popen(command(SERVE, *PAIR), cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        until = time.monotonic() + 600
        while start_of(SECOND) == earlier or "Load weight begin" not in SECOND.keeper.log(start_of(SECOND)):
            assert time.monotonic() < until and start.poll() is None, start.communicate(timeout=60)[0]
            time.sleep(0.2)
        for pid in SECOND.keeper.pids(UNIT):
            os.kill(pid, signal.SIGKILL)
        said = " ".join(start.communicate(timeout=600)[0].split())
    finally:
        start.kill()
    assert start.returncode != 0
    assert "rank 1 (second) ended, and with it the server over several guests: somebody killed the server" in said
    assert states() != ["active", "active"]
    assert FIRST.keeper.pids(UNIT) == set()


def test_a_run_is_measured_at_the_first_and_keeps_what_the_others_said(tmp_path: Path) -> None:
    words = [*PAIR, "-e", "campaign=pair", "-e", "levels=1,4", "-e", f"bench_results_dir={tmp_path}"]
    said = play("bench.yml", *words)
    [bundle] = (tmp_path / "pair").glob("*-pair")
    assert json.loads((bundle / "run.json").read_text())["status"] == "ok", said
    provenance = json.loads((bundle / "provenance.json").read_text())
    assert [rank["guest"] for rank in provenance["ranks"]] == ["first", "second"]
    other = (bundle / "ranks/1/server.log").read_text()
    # The supervisor may have told of limits before the server says anything.
    assert "] simulated: profile=story" in other and "Dummy health check server started" in other
    assert "--node-rank 1" in (bundle / "ranks/1/unit.service").read_text()
    assert states() == ["inactive", "inactive"]
