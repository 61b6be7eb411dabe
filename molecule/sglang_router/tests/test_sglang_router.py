"""A router before two servers on two nodes: it gives no key away, and loses nothing when one stops."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT
from routed import (
    INVENTORY,
    UNIT,
    answered,
    assert_keys_are_nowhere_else,
    assert_runs_as,
    complete,
    guest_of,
    start_baseline,
)
from testinfra.host import Host

ROUTER = ROOT / "playbooks/router.yml"
URL = "http://127.0.0.1:30100"
PROMPT = "Which of the two keeps this one in its cache?"


@pytest.fixture
def first() -> Host:
    return guest_of("lab-gpu1")


@pytest.fixture
def second() -> Host:
    return guest_of("lab-gpu3")


def test_it_runs_as_it_should(first: Host) -> None:
    assert_runs_as(first, "sglang", "disabled")


def test_only_who_has_the_key_is_answered(first: Host) -> None:
    assert complete(first, URL) == 200
    assert complete(first, URL, key="a-wrong-key-0123456789") == 401


def test_keys_are_in_their_file_and_nowhere_else(first: Host) -> None:
    assert_keys_are_nowhere_else(first, "sglang")


def test_a_server_on_loopback_is_refused_before_anything_changes(play: Any) -> None:
    done = play("-i", str(INVENTORY), playbook=ROUTER, sglang_server_host="127.0.0.1")
    assert not done.ok and done.changed == []
    assert "lab-gpu3 serves on 127.0.0.1 only, which the router on lab-gpu1 cannot reach" in done.said


def test_all_that_is_wrong_is_said_at_once(play: Any) -> None:
    done = play(
        "-i",
        str(INVENTORY),
        playbook=ROUTER,
        sglang_router_guests=["lab-gpu1", "lab-gpu9"],
        sglang_router_port=80,
        sglang_router_args={"api_key": "x"},
    )
    assert not done.ok and done.changed == []
    for part in ("names lab-gpu9", "sglang_router_port is 80", "sglang_router_args sets api_key"):
        assert part in done.said


def test_a_flag_that_the_router_does_not_have_is_refused(play: Any, first: Host) -> None:
    before = first.check_output(f"systemctl show -P InvocationID {UNIT}")
    done = play("-i", str(INVENTORY), playbook=ROUTER, sglang_router_args={"no_such_flag": 1})
    assert not done.ok and "unrecognized arguments: --no-such-flag 1" in done.said
    assert first.check_output(f"systemctl show -P InvocationID {UNIT}") == before


def test_a_unit_that_was_edited_by_hand_is_found(play: Any, first: Host) -> None:
    path = f"/etc/systemd/system/{UNIT}"
    first.check_output(f"sed -i s/TimeoutStopSec=30/TimeoutStopSec=1/ {path}")
    try:
        done = play("-i", str(INVENTORY), "--check", "--diff", playbook=ROUTER)
        assert done.ok
        assert {name for name, _ in done.changed} == {"Write its unit", "Stop a router that has other settings"}
        assert "TimeoutStopSec=1\n" in done.diff[0] and "TimeoutStopSec=30\n" in done.diff[1]
    finally:
        first.check_output(f"sed -i s/TimeoutStopSec=1$/TimeoutStopSec=30/ {path}")


def test_a_router_that_nothing_uses_is_pruned_and_the_one_in_use_stays(play: Any, first: Host) -> None:
    installed = first.file("/opt/servelab/router").listdir()
    first.check_output("mkdir -p /opt/servelab/router/0.0.1-00000000/bin")
    # The stacks are not what is tested here.
    done = play("-i", str(INVENTORY), playbook=ROOT / "playbooks/prune.yml", keep="0.5.12,0.5.15,0.5.23")
    assert done.ok and done.changed == [("Remove the others", "lab-gpu1")]
    assert first.file("/opt/servelab/router").listdir() == installed
    assert len(installed) == 1


@pytest.fixture
def of_the_prompt(first: Host, second: Host) -> Iterator[str]:
    """The server that has answered the prompt, and with which the router keeps it, stops; its inventory name."""
    servers = {"lab-gpu1": first, "lab-gpu3": second}
    before = {name: answered(host) for name, host in servers.items()}
    assert complete(first, URL, prompt=PROMPT) == 200
    for _ in range(50):  # a log may be a moment behind
        took = [name for name, host in servers.items() if answered(host) > before[name]]
        if took:
            break
        time.sleep(0.2)
    [name] = took
    servers[name].check_output("systemctl stop servelab-baseline.service")
    yield name
    start_baseline(servers[name])


def test_nothing_is_lost_when_a_server_stops(first: Host, play: Any, of_the_prompt: str) -> None:
    assert [complete(first, URL, prompt=PROMPT) for _ in range(4)] == [200] * 4
    done = play("-i", str(INVENTORY), playbook=ROUTER)
    assert (
        not done.ok and f"{of_the_prompt} (http://" in done.said and "does not answer the router's machine" in done.said
    )
