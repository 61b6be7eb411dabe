"""A router of another user that listens for all: it uses both servers in turns, and each reads its own keys only."""

from __future__ import annotations

import time

import pytest
from routed import (
    answered,
    assert_keys_are_nowhere_else,
    assert_runs_as,
    complete,
    guest_of,
    reached,
    start_baseline,
)
from testinfra.host import Host

LOCAL = "http://127.0.0.1:31100"


@pytest.fixture
def first() -> Host:
    return guest_of("lab-gpu1")


@pytest.fixture
def second() -> Host:
    return guest_of("lab-gpu3")


def test_it_runs_as_it_should(second: Host) -> None:
    assert_runs_as(second, "router", "enabled")


def test_others_reach_it_with_the_key_and_its_figures_are_for_nobody(first: Host, second: Host) -> None:
    address = reached()["lab-gpu3"]["host"]
    assert complete(first, f"http://{address}:31100") == 200
    assert complete(first, f"http://{address}:31100", key="a-wrong-key-0123456789") == 401
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 31101), 5)"
    assert "ConnectionRefusedError" in first.run("python3 -c %s %s", knock, address).stderr
    # On the machine itself they are there.
    assert second.run("python3 -c %s %s", knock, "127.0.0.1").rc == 0


def test_it_uses_both_servers(first: Host, second: Host) -> None:
    before = answered(first), answered(second)
    for _ in range(4):
        assert complete(second, LOCAL) == 200
    # The journal may be a moment behind.
    deadline = time.monotonic() + 10
    while answered(first) + answered(second) < sum(before) + 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (answered(first) - before[0], answered(second) - before[1]) == (2, 2)


def test_keys_are_in_their_file_and_nowhere_else(second: Host) -> None:
    assert_keys_are_nowhere_else(second, "router")


def test_a_server_starts_again_beside_a_router_of_another_user(second: Host) -> None:
    """Each reads its own keys, in a directory that the other cannot enter."""
    second.check_output("systemctl stop servelab-baseline.service")
    start_baseline(second)
    second.check_output(
        # Port 30000 as /proc has it, and listening: connections that are over have it too, for a minute.
        'timeout 60 sh -c \'until grep -q ":7530 00000000:0000 0A" /proc/net/tcp; do '
        "systemctl is-active -q servelab-baseline || exit 1; sleep 0.5; done'"
    )
