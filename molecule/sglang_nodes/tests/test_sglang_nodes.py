"""One server over two guests on two nodes: started together, measured at the first, and ended by any of its ranks."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, connect, reach
from testinfra.host import Host

INVENTORY = ("-i", str(ROOT / "inventory/lab-nodes"))
SERVE, STOP, STATUS, BENCH = (ROOT / "playbooks" / f"{name}.yml" for name in ("serve", "stop", "status", "bench"))
MODE = "two_guests"
UNIT = f"servelab-{MODE}.service"


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, Any]]:
    return reach("pve_nodes:gpu_guests", *INVENTORY)


@pytest.fixture(scope="module")
def first(reached: dict[str, dict[str, Any]]) -> Host:
    return connect(reached["lab-gpu1"])


@pytest.fixture(scope="module")
def second(reached: dict[str, dict[str, Any]]) -> Host:
    return connect(reached["lab-gpu3"])


def status_of(host: Host, path: str) -> int:
    """The HTTP status of what a server says on its guest."""
    script = (
        "import sys,urllib.request as u,urllib.error as e\n"
        "try: print(u.urlopen('http://127.0.0.1:30000'+sys.argv[1],timeout=60).status)\n"
        "except e.HTTPError as x: print(x.code)"
    )
    return int(host.check_output("python3 -c %s %s", script, path))


def state(host: Host) -> str:
    return host.check_output(f"systemctl show -P ActiveState {UNIT}")


def test_each_guest_has_its_rank_and_half_of_the_cards(
    first: Host, second: Host, reached: dict[str, dict[str, Any]]
) -> None:
    for rank, host in enumerate((first, second)):
        unit = host.file(f"/etc/systemd/system/{UNIT}").content_string
        assert "--nnodes 2" in unit and f"--node-rank {rank}" in unit and "--tp-size 8" in unit
        assert f"--dist-init-addr {reached['lab-gpu1']['host']}:20000" in unit
        assert "Environment=GLOO_SOCKET_IFNAME=eth0" in unit and "Environment=NCCL_SOCKET_IFNAME=eth0" in unit
        assert re.findall(r"test -c /dev/nvidia(\d)", unit) == ["0", "1", "2", "3"]
        # A mode over one guest has all of them, and is told of no other.
        alone = host.file("/etc/systemd/system/servelab-baseline.service").content_string
        assert "--nnodes" not in alone and "IFNAME" not in alone and "/dev/nvidia7" in alone


@pytest.mark.parametrize(
    ("options", "variables", "sentence"),
    [
        (["--limit", "lab-gpu1"], {}, "lab-gpu3 is not in this play any more, or never was"),
        ([], {"sglang_server_nodes": ["lab-gpu1"]}, "and sglang_server_nodes has 1 (lab-gpu1)"),
        ([], {"sglang_server_dist_address": "127.0.0.1"}, "has the address 127.0.0.1, at which the others cannot"),
        ([], {"sglang_server_dist_address": "192.0.2.9"}, "no interface of lab-gpu3 has the address at which"),
        (
            [],
            {"sglang_server_dist_isolated": False},
            "set sglang_server_dist_isolated=true where nobody but the guests",
        ),
        ([], {"sglang_server_extra_args": {"tp_size": 7}}, "its 7 ranks (tp_size) do not divide by 2"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_changes(
    play: Any, options: list[str], variables: dict[str, Any], sentence: str
) -> None:
    done = play(*INVENTORY, *options, playbook=SERVE, mode=MODE, **variables)
    assert not done.ok and sentence in done.said
    assert [name for name, _ in done.changed if "lease" not in name] == []


@pytest.fixture(scope="module")
def served(play: Any) -> Iterator[None]:
    done = play(*INVENTORY, playbook=SERVE, mode=MODE)
    assert done.ok, done.said
    yield
    assert play(*INVENTORY, playbook=STOP).ok


def test_the_first_answers_and_the_second_lives(served: None, first: Host, second: Host) -> None:
    assert [status_of(host, "/health") for host in (first, second)] == [200, 200]
    assert [status_of(host, "/v1/models") for host in (first, second)] == [200, 404]
    for host, ranks in ((first, "0123"), (second, "4567")):
        titles = host.check_output("ps -eo args")
        assert [f"sglang::scheduler_TP{rank}" in titles for rank in "01234567"] == [r in ranks for r in "01234567"]


def test_status_names_the_ranks(served: None, play: Any, reached: dict[str, dict[str, Any]]) -> None:
    done = play(*INVENTORY, playbook=STATUS)
    said = json.dumps(done.results["Tell it"])
    assert "rank 0 of 2" in said and "rank 1 of 2" in said
    assert f"the guest that answers is at {reached['lab-gpu1']['host']}:20000" in said


def test_one_that_is_killed_takes_the_other_along(served: None, play: Any, first: Host, second: Host) -> None:
    second.check_output(f"systemctl kill --kill-whom=all --signal=KILL {UNIT}")
    first.check_output(f"timeout 60 sh -c 'while systemctl is-active -q {UNIT}; do sleep 0.2; done'")
    log = first.check_output(f"journalctl -u {UNIT} --no-pager -o cat")
    assert "Connection closed by peer" in log
    assert state(second) == "failed"


@pytest.fixture
def slow_to_load(reached: dict[str, dict[str, Any]]) -> Iterator[None]:
    """Starts that last, so that a rank can be killed in one. Both nodes have the same directory of doubles."""
    node = connect(reached["lab-pve1"])
    file = "/srv/servelab-lab/server.json"
    before = node.file(file).content_string
    node.check_output("printf %%s %s > %s", json.dumps(json.loads(before) | {"load_seconds": 1200}), file)
    yield
    node.check_output("printf %%s %s > %s", before, file)


def test_a_rank_that_dies_ends_the_start_with_its_own_cause(
    slow_to_load: None, play: Any, first: Host, second: Host
) -> None:
    second.check_output(f"systemctl reset-failed {UNIT} || true")
    kill = f"systemctl kill --kill-whom=all --signal=KILL {UNIT}"
    # It waits for this start: the log of an earlier one is another invocation's.
    wait = (
        f"until systemctl is-active -q {UNIT}; do sleep 0.2; done; i=$(systemctl show -P InvocationID {UNIT}); "
        f"until journalctl _SYSTEMD_INVOCATION_ID=$i -o cat | grep -q 'Load weight begin'; do sleep 0.2; done; {kill}"
    )
    second.check_output("systemd-run --quiet --collect --unit kill-a-rank sh -c %s", wait)
    try:
        done = play(*INVENTORY, playbook=SERVE, mode=MODE)
    finally:
        second.run("systemctl stop kill-a-rank.service")
    assert not done.ok
    assert (
        "rank 1 (lab-gpu3) ended, and with it the server over several guests: somebody killed the server" in done.said
    )
    assert first.check_output(f"systemctl show -P MainPID {UNIT}") == "0"


def test_a_run_is_measured_at_the_first_and_has_what_the_others_said(
    play: Any, first: Host, second: Host, tmp_path: Path
) -> None:
    done = play(
        *INVENTORY,
        playbook=BENCH,
        mode=MODE,
        campaign="nodes",
        levels=[4],
        bench_results_dir=str(tmp_path),
        # A busy machine's figures may not be valid; what is asked here is where things are.
        bench_invalid_ok=True,
    )
    assert done.ok, done.said
    [bundle] = (tmp_path / "nodes").glob(f"*-{MODE}")
    provenance = json.loads((bundle / "provenance.json").read_text())
    assert [rank["guest"] for rank in provenance["ranks"]] == ["lab-gpu1", "lab-gpu3"]
    other = (bundle / "ranks/1/server.log").read_text()
    assert "simulated" in other.splitlines()[0] and "Dummy health check server started" in other
    assert "--node-rank 1" in (bundle / "ranks/1/unit.service").read_text()
    # Both were proved clean, before and after.
    assert json.loads((bundle / "ranks/1/provenance.json").read_text())["gpu_clean"]["after"]
    assert provenance["gpu_clean"]["after"]
    assert [host.check_output(f"systemctl show -P MainPID {UNIT}") for host in (first, second)] == ["0", "0"]


def test_a_server_that_ends_with_0_is_told_from_one_that_nobody_started(play: Any) -> None:
    done = play(
        *INVENTORY, "--limit", "lab-gpu1", playbook=SERVE, mode="baseline", sglang_server_command=["/usr/bin/true"]
    )
    assert not done.ok
    assert "the server ended by itself with exit status 0, and nobody asked it to" in done.said
