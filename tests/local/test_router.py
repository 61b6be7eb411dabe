"""Two (simulated) servers and SGLang's real router before them, over a local connection, end to end.

    pytest tests/local/test_router.py      (some minutes: SGLang's wheel and the router's are installed below .lab)

The router runs on the first guest.
"""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from two_guests import ADMIN, FIRST, KEY, ROUTER_METRICS, ROUTER_PORT, SECOND, Guest, ask, changed, complete, play

SERVER, ROUTER = "servelab-baseline.service", "servelab-sglang-router.service"
ROUTE = "playbooks/router.yml"


def answered(guest: Guest) -> int:
    """How many completions the server of a guest has answered."""
    logs = (guest.prefix / "var/log/servelab/baseline").glob("*.log")
    return sum(path.read_text().count('"POST /v1/completions HTTP/1.1" 200') for path in logs)


@pytest.fixture(scope="module")
def routed(guests: None) -> str:
    # Without servers a router is refused, and nothing changes.
    refused = play(ROUTE, check=False)
    assert changed(refused) == 0
    for guest in (FIRST, SECOND):
        assert f"{guest.name} (http://127.0.0.1:{guest.port}) does not answer the router's machine" in refused
    assert "would be refused" in play(ROUTE, "--check", "--diff")
    # One after the other: they share a machine, and so its lease.
    for guest in (FIRST, SECOND):
        play("playbooks/serve.yml", "-e", "mode=baseline", "--limit", guest.name)
    return play(ROUTE)


def test_it_is_proved_by_a_completion_through_it(routed: str) -> None:
    assert "2 of 2 servers taken, and a completion came through the router" in routed
    assert FIRST.keeper.show(ROUTER)["ActiveState"] == "active"
    before = answered(FIRST), answered(SECOND)
    assert [complete(ROUTER_PORT) for _ in range(4)] == [200] * 4
    # A log may be a moment behind.
    deadline = time.monotonic() + 10
    while answered(FIRST) + answered(SECOND) < sum(before) + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (answered(FIRST) - before[0], answered(SECOND) - before[1]) == (2, 2)


def test_a_second_run_changes_nothing(routed: str) -> None:
    again = play(ROUTE)
    assert changed(again) == 0
    assert changed(play(ROUTE, "--check", "--diff")) == 0


def test_what_an_interrupted_run_wrote_reaches_a_router_that_runs(routed: str) -> None:
    before = FIRST.keeper.show(ROUTER)["InvocationID"]
    FIRST.keeper.unit_file(ROUTER).touch()
    assert changed(play(ROUTE)) == 2, "stopped and started"
    assert FIRST.keeper.show(ROUTER)["InvocationID"] != before


def test_it_asks_for_the_keys_and_gives_none_away(routed: str) -> None:
    assert complete(ROUTER_PORT, "a-wrong-key-0123456789") == 401
    assert ask(ROUTER_PORT, "/workers", KEY) == 401 and ask(ROUTER_PORT, "/workers", ADMIN) == 200
    for pid in FIRST.keeper.pids(ROUTER):
        words = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert b"SENTINEL" not in words
    secrets, own = (FIRST.prefix / "etc/servelab" / name for name in ("secrets", "router"))
    assert (own / "keys.json").stat().st_mode & 0o777 == 0o400
    told = [path for place in ("etc", "run", "var") for path in (FIRST.prefix / place).rglob("*") if path.is_file()]
    assert {path.parent for path in told if b"SENTINEL" in path.read_bytes()} == {secrets, own}
    assert "SENTINEL" not in routed


def test_its_figures_are_for_this_machine_alone(routed: str) -> None:
    # 30914 in hexadecimal, as /proc has it, after the address.
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert ROUTER_METRICS == 0x78C2
    assert [address for address in listening if address.endswith(":78C2")] == ["0100007F:78C2"]


def test_bad_settings_are_refused_all_at_once(routed: str) -> None:
    before = FIRST.keeper.show(ROUTER)["InvocationID"]
    wrong = {"sglang_router_port": 80, "sglang_router_args": {"api_key": "x"}, "sglang_router_host": "0.0.0.0"}
    said = play(ROUTE, "-e", json.dumps(wrong | {"sglang_server_admin_api_key": ""}), check=False)
    assert changed(said) == 0
    for part in ("sglang_router_port is 80", "sglang_router_args sets api_key", "sglang_router_host is 0.0.0.0"):
        assert part in said
    flags = play(ROUTE, "-e", json.dumps({"sglang_router_args": {"no_such_flag": 1}}), check=False)
    assert "unrecognized arguments: --no-such-flag 1" in flags
    assert FIRST.keeper.show(ROUTER)["InvocationID"] == before


def test_an_old_router_is_pruned_and_the_one_in_use_stays(routed: str) -> None:
    place = FIRST.prefix / "opt/servelab/router"
    installed = sorted(place.iterdir())
    assert len(installed) == 1
    (place / "0.0.1-00000000/bin").mkdir(parents=True)
    said = play("playbooks/prune.yml")
    assert f"{installed[0].name}: {ROUTER} runs from it" in said
    assert sorted(place.iterdir()) == installed
    # The stack that the link names stays too.
    assert (FIRST.prefix / "opt/servelab/stack").resolve().is_dir()


def test_nothing_is_lost_when_a_server_stops_and_it_is_named(routed: str) -> None:
    SECOND.keeper.stop(SERVER)
    assert [complete(ROUTER_PORT) for _ in range(4)] == [200] * 4
    refused = play(ROUTE, check=False)
    assert f"second (http://127.0.0.1:{SECOND.port}) does not answer the router" in refused


def test_status_and_stop(routed: str) -> None:
    assert f"The router runs ({ROUTER}, port {ROUTER_PORT}): " in play("playbooks/status.yml")
    play("playbooks/stop.yml")
    assert FIRST.keeper.show(ROUTER)["ActiveState"] == "inactive"
    assert FIRST.keeper.pids(ROUTER) == set()
    assert "No router runs." in play("playbooks/status.yml", "--limit", "first")
