"""A router before two servers on two nodes: it uses both, gives no key away, and loses nothing when one stops."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from conftest import ROOT, connect, reach
from testinfra.host import Host

INVENTORY = ROOT / "inventory/lab-router"
ROUTER = ROOT / "playbooks/router.yml"
UNIT = "servelab-sglang-router.service"
KEY, ADMIN = "SENTINELapikey4711", "SENTINELadminkey4711"
MODEL = "/shared/kimi-k2.5-int4"
PROMPT = "Which of the two keeps this one in its cache?"


@pytest.fixture(scope="module")
def reached() -> dict[str, dict[str, Any]]:
    return reach("gpu_guests", "-i", str(INVENTORY))


@pytest.fixture(scope="module")
def first(reached: dict[str, dict[str, Any]]) -> Host:
    return connect(reached["lab-gpu1"])


@pytest.fixture(scope="module")
def second(reached: dict[str, dict[str, Any]]) -> Host:
    return connect(reached["lab-gpu3"])


def complete(host: Host, url: str, key: str = KEY, prompt: str = "Say something") -> int:
    """The HTTP status of a completion, asked for on `host`."""
    body = json.dumps({"model": MODEL, "prompt": prompt, "max_tokens": 4})
    script = (
        "import sys,urllib.request as u,urllib.error as e\n"
        "r=u.Request(sys.argv[1]+'/v1/completions',sys.argv[3].encode(),"
        "{'Content-Type':'application/json','Authorization':'Bearer '+sys.argv[2]})\n"
        "try: print(u.urlopen(r,timeout=60).status)\n"
        "except e.HTTPError as x: print(x.code)"
    )
    return int(host.check_output("python3 -c %s %s %s %s", script, url, key, body))


def answered(host: Host) -> int:
    """How many completions the server of a guest has answered."""
    return host.check_output("journalctl -u servelab-baseline.service --no-pager").count(
        '"POST /v1/completions HTTP/1.1" 200'
    )


def test_both_routers_run_as_they_should(first: Host, second: Host) -> None:
    for host, user, boot in ((first, "sglang", "disabled"), (second, "router", "enabled")):
        assert host.service(UNIT).is_running
        assert host.run(f"systemctl is-enabled {UNIT}").stdout.strip() == boot
        pid = host.check_output(f"systemctl show -P MainPID {UNIT}")
        assert host.check_output(f"stat -c %U /proc/{pid}") == user


def test_only_who_was_told_reaches_it(first: Host, second: Host, reached: dict[str, dict[str, Any]]) -> None:
    assert complete(first, "http://127.0.0.1:30100") == 200
    assert complete(first, "http://127.0.0.1:30100", key="a-wrong-key-0123456789") == 401
    # The other listens for all, and its figures for nobody.
    assert complete(first, f"http://{reached['lab-gpu3']['host']}:31100") == 200
    knock = "import socket, sys; socket.create_connection((sys.argv[1], 31101), 5)"
    assert "ConnectionRefusedError" in first.run("python3 -c %s %s", knock, reached["lab-gpu3"]["host"]).stderr
    assert complete(second, f"http://{reached['lab-gpu3']['host']}:31100", key="a-wrong-key-0123456789") == 401


def test_it_uses_both_servers(first: Host, second: Host) -> None:
    before = answered(first), answered(second)
    for _ in range(4):
        assert complete(second, "http://127.0.0.1:31100") == 200
    # The journal may be a moment behind.
    deadline = time.monotonic() + 10
    while answered(first) + answered(second) < sum(before) + 4 and time.monotonic() < deadline:
        time.sleep(0.2)
    assert (answered(first) - before[0], answered(second) - before[1]) == (2, 2)


def test_keys_are_in_their_file_and_nowhere_else(first: Host, second: Host) -> None:
    for host, user in ((first, "sglang"), (second, "router")):
        file = host.file("/etc/servelab/router/keys.json")
        assert (file.user, file.mode) == (user, 0o400)
        said = host.check_output(f"systemctl show {UNIT}; systemctl cat {UNIT}; ps -eww -o args; journalctl --no-pager")
        logs = host.check_output("cat /var/log/servelab/sglang-router/*.log")
        assert KEY not in said + logs and ADMIN not in said + logs


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


def start(host: Host) -> None:
    host.check_output("systemctl reset-failed servelab-baseline.service; systemctl start servelab-baseline.service")


@pytest.fixture
def of_the_prompt(first: Host, second: Host) -> Iterator[str]:
    """The server that has answered the prompt, and with which the router keeps it, stops; its inventory name."""
    servers = {"lab-gpu1": first, "lab-gpu3": second}
    before = {name: answered(host) for name, host in servers.items()}
    assert complete(first, "http://127.0.0.1:30100", prompt=PROMPT) == 200
    for _ in range(50):  # a log may be a moment behind
        took = [name for name, host in servers.items() if answered(host) > before[name]]
        if took:
            break
        time.sleep(0.2)
    [name] = took
    servers[name].check_output("systemctl stop servelab-baseline.service")
    yield name
    start(servers[name])


def test_nothing_is_lost_when_a_server_stops(first: Host, play: Any, of_the_prompt: str) -> None:
    assert [complete(first, "http://127.0.0.1:30100", prompt=PROMPT) for _ in range(4)] == [200] * 4
    done = play("-i", str(INVENTORY), playbook=ROUTER)
    assert (
        not done.ok and f"{of_the_prompt} (http://" in done.said and "does not answer the router's machine" in done.said
    )


def test_a_server_starts_again_beside_a_router_of_another_user(second: Host) -> None:
    """Each reads its own keys, in a directory that the other cannot enter."""
    second.check_output("systemctl stop servelab-baseline.service")
    start(second)
    second.check_output(
        # Port 30000 as /proc has it, and listening: connections that are over have it too, for a minute.
        'timeout 60 sh -c \'until grep -q ":7530 00000000:0000 0A" /proc/net/tcp; do '
        "systemctl is-active -q servelab-baseline || exit 1; sleep 0.5; done'"
    )
