"""One (simulated) server over two guests, over a local connection, end to end.

    pytest tests/local/test_nodes.py      (some minutes: SGLang's wheel is installed below .lab)

Two names of this machine, each with a directory and simulated cards of its own, are the guests; they meet on its
loopback, which only guests of one machine may. All is gone afterwards.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from servelab.shared.supervision import Process

ROOT = Path(__file__).resolve().parents[2]
# Two levels below the checkout, as the variables of inventory/local want it.
INVENTORY = ROOT / ".lab/nodes-inventory"
FIRST, SECOND = ROOT / ".lab/na", ROOT / ".lab/nb"
RESULTS = ROOT / ".lab/nodes-results"
UNIT = "servelab-pair.service"
MODEL = "/shared/kimi-k2.5-int4"
HEAD, OTHER, MEETING = 30921, 30922, 30925
PAIR = {
    "description": "Tensor parallel over two guests",
    "extends": "baseline",
    "nodes": 2,
    "args": {"tp_size": 4},
}
_ORDER = ["first", "second"]


def inventory() -> dict[str, Any]:
    guests = {
        "first": {"servelab_prefix": str(FIRST), "sglang_server_port": HEAD},
        "second": {
            "servelab_prefix": str(SECOND),
            "sglang_server_port": OTHER,
            # One installation of SGLang is enough to read flags from.
            "sglang_env_current": str(FIRST / "opt/servelab/stack"),
        },
    }
    together = {
        "lab_node_time_scale": 20,
        "sglang_server_dist_address": "127.0.0.1",
        "sglang_server_dist_port": MEETING,
        "sglang_server_mode_dirs": [str(INVENTORY / "modes")],
        "bench_results_dir": str(RESULTS),
        # They are one machine, and see each other's processes.
        "sglang_server_poll_interval": 0.5,
    }
    return {
        "gpu_guests": {"hosts": guests, "vars": together},
        "lab_doubles": {"hosts": {"first": None, "second": None}},
    }


def play(playbook: str, *words: str, check: bool = True) -> str:
    """Run a playbook on the two; its output. Fails with it unless `check` is False."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    place = playbook if playbook.endswith(".yml") else f"playbooks/{playbook}.yml"
    done = subprocess.run(
        [program, "-i", str(INVENTORY), place, *words], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert not check or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return " ".join(done.stdout.replace("''", "'").split())


def complete(port: int) -> int:
    """The HTTP status of a completion."""
    body = json.dumps({"model": MODEL, "prompt": "Say something", "max_tokens": 4}).encode()
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/v1/completions", body, {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def changed(output: str, host: str = "first") -> int:
    found = re.search(rf"{host} +: ok=\d+ +changed=(\d+)", output)
    assert found is not None, output[-2000:]
    return int(found[1])


def state(keeper: Process) -> str:
    return keeper.show(UNIT)["ActiveState"]


@pytest.fixture(scope="module")
def keepers() -> Iterator[tuple[Process, Process]]:
    (INVENTORY / "modes").mkdir(parents=True, exist_ok=True)
    (INVENTORY / "hosts.yml").write_text(json.dumps(inventory()))
    (INVENTORY / "modes/pair.yml").write_text(yaml.safe_dump(PAIR))
    link = INVENTORY / "group_vars"
    link.unlink(missing_ok=True)
    link.symlink_to("../../inventory/local/group_vars")
    try:
        play("lab")
        play("guest", "--tags", "sglang_env", "--limit", "first")
        yield Process(str(FIRST)), Process(str(SECOND))
    finally:
        play("lab_down")
    assert not FIRST.exists() and not SECOND.exists()


@pytest.fixture(scope="module")
def served(keepers: tuple[Process, Process]) -> str:
    return play("serve", "-e", "mode=pair")


def test_every_rank_is_started_with_its_own_number_and_the_first_answers(
    served: str, keepers: tuple[Process, Process]
) -> None:
    assert "ready: answered a completion and a long prompt" in served
    assert [state(keeper) for keeper in keepers] == ["active", "active"]
    assert complete(HEAD) == 200 and complete(OTHER) == 404
    for number, prefix in enumerate((FIRST, SECOND)):
        mode = json.loads((prefix / "etc/servelab/modes/pair.json").read_text())
        assert (mode["args"]["nnodes"], mode["args"]["node_rank"]) == (2, number)
        assert mode["args"]["dist_init_addr"] == f"127.0.0.1:{MEETING}"
        assert mode["env"]["GLOO_SOCKET_IFNAME"] == mode["env"]["NCCL_SOCKET_IFNAME"] == "lo"


def test_status_tells_the_ranks(served: str) -> None:
    said = play("status")
    assert "rank 0 of 2" in said and "rank 1 of 2" in said


def test_a_second_start_changes_nothing(served: str, keepers: tuple[Process, Process]) -> None:
    before = [keeper.show(UNIT)["InvocationID"] for keeper in keepers]
    again = play("serve", "-e", "mode=pair")
    assert [keeper.show(UNIT)["InvocationID"] for keeper in keepers] == before
    assert changed(again) == changed(again, "second")


def test_stop_ends_both(served: str, keepers: tuple[Process, Process]) -> None:
    play("stop")
    assert [state(keeper) for keeper in keepers] == ["inactive", "inactive"]
    assert [keeper.pids(UNIT) for keeper in keepers] == [set(), set()]


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
def test_what_cannot_work_is_refused_before_anything_changes(
    keepers: tuple[Process, Process], words: list[str], sentence: str
) -> None:
    said = play("serve", "-e", "mode=pair", *words, check=False)
    assert sentence in said
    assert [state(keeper) for keeper in keepers] == ["inactive", "inactive"]


def test_a_rank_that_dies_ends_the_start_with_its_own_cause(keepers: tuple[Process, Process]) -> None:
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    # Slow enough to be killed while it loads.
    config = SECOND / "opt/servelab-lab/server.json"
    slow = [path for path in (FIRST / "opt/servelab-lab/server.json", config) if path.exists()]
    kept = {path: path.read_text() for path in slow}
    for path in slow:
        path.write_text(json.dumps(json.loads(kept[path]) | {"load_seconds": 1200}))
    start = subprocess.Popen(
        [program, "-i", str(INVENTORY), "playbooks/serve.yml", "-e", "mode=pair"],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        until = time.monotonic() + 600
        while "Load weight begin" not in keepers[1].log(keepers[1].show(UNIT)["InvocationID"]):
            assert time.monotonic() < until
            time.sleep(0.2)
        for pid in keepers[1].pids(UNIT):
            os.kill(pid, signal.SIGKILL)
        said = " ".join(start.communicate(timeout=600)[0].split())
    finally:
        start.kill()
        for path, text in kept.items():
            path.write_text(text)
    assert start.returncode != 0
    assert "rank 1 (second) ended, and with it the server over several guests: somebody killed the server" in said
    assert [state(keeper) for keeper in keepers] != ["active", "active"]
    assert keepers[0].pids(UNIT) == set()


def test_a_run_is_measured_at_the_first_and_keeps_what_the_others_said(keepers: tuple[Process, Process]) -> None:
    said = play("bench.yml", "-e", "mode=pair", "-e", "campaign=pair", "-e", "levels=1,4")
    [bundle] = (RESULTS / "pair").glob("*-pair")
    assert json.loads((bundle / "run.json").read_text())["status"] == "ok", said
    provenance = json.loads((bundle / "provenance.json").read_text())
    assert [rank["guest"] for rank in provenance["ranks"]] == _ORDER
    assert "Dummy health check server started" in (bundle / "ranks/1/server.log").read_text()
    assert "simulated" in (bundle / "ranks/1/server.log").read_text().splitlines()[0]
    assert "--node-rank 1" in (bundle / "ranks/1/unit.service").read_text()
    assert [state(keeper) for keeper in keepers] == ["inactive", "inactive"]
