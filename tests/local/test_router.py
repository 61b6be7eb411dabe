"""Two (simulated) servers and SGLang's real router before them, over a local connection, end to end.

    pytest tests/local/test_router.py      (some minutes: SGLang's wheel and the router's are installed below .lab)

Two names of this machine, each with a directory and simulated cards of its own, are the guests; the router runs on the
first. All is gone afterwards.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servelab.shared.supervision import Process

ROOT = Path(__file__).resolve().parents[2]
# Two levels below the checkout, as the variables of inventory/local want it.
INVENTORY = ROOT / ".lab/router-inventory"
FIRST, SECOND = ROOT / ".lab/ra", ROOT / ".lab/rb"
SERVER, ROUTER = "servelab-baseline.service", "servelab-sglang-router.service"
KEY, ADMIN = "SENTINELapikey4711", "SENTINELadminkey4711"
MODEL = "/shared/kimi-k2.5-int4"
PORT = 30913


def inventory() -> dict[str, Any]:
    guests = {
        "first": {"servelab_prefix": str(FIRST), "sglang_server_port": 30911},
        "second": {
            "servelab_prefix": str(SECOND),
            "sglang_server_port": 30912,
            # One installation of SGLang is enough to read flags from.
            "sglang_env_current": str(FIRST / "opt/servelab/stack"),
        },
    }
    keys = {"sglang_server_api_key": KEY, "sglang_server_admin_api_key": ADMIN, "lab_node_time_scale": 20}
    router = {
        "sglang_router_packages": [],
        "sglang_router_python": "{{ ansible_playbook_python }}",
        "sglang_router_port": PORT,
        "sglang_router_metrics_port": 30914,
        "sglang_router_policy": "round_robin",
    }
    return {
        "gpu_guests": {"hosts": guests, "vars": keys},
        "lab_doubles": {"hosts": {"first": None, "second": None}},
        "sglang_routers": {"hosts": {"first": None}, "vars": router},
    }


def play(playbook: str, *words: str, check: bool = True) -> str:
    """Run a playbook on the two; its output. Fails with it unless `check` is False."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [program, "-i", str(INVENTORY), f"playbooks/{playbook}.yml", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def changed(output: str) -> int:
    found = re.search(r"^first +: ok=\d+ +changed=(\d+)", output, re.M)
    assert found is not None, output[-2000:]
    return int(found[1])


def ask(path: str, key: str = KEY, body: Any = None) -> int:
    """The HTTP status of the router's answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{PORT}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def complete(key: str = KEY) -> int:
    return ask("/v1/completions", key, {"model": MODEL, "prompt": "Say something", "max_tokens": 4})


def answered(prefix: Path) -> int:
    """How many completions the server below a prefix has answered."""
    logs = (prefix / "var/log/servelab/baseline").glob("*.log")
    return sum(path.read_text().count('"POST /v1/completions HTTP/1.1" 200') for path in logs)


@pytest.fixture(scope="module")
def keepers() -> Iterator[tuple[Process, Process]]:
    INVENTORY.mkdir(parents=True, exist_ok=True)
    (INVENTORY / "hosts.yml").write_text(json.dumps(inventory()))
    link = INVENTORY / "group_vars"
    link.unlink(missing_ok=True)
    link.symlink_to("../../inventory/local/group_vars")
    try:
        play("lab")
        play("guest", "--tags", "sglang_env", "--limit", "first")
        yield Process(str(FIRST)), Process(str(SECOND))
    finally:
        play("lab_down")
        (INVENTORY / "hosts.yml").unlink()
        link.unlink()
        INVENTORY.rmdir()
    assert not FIRST.exists() and not SECOND.exists()


@pytest.fixture(scope="module")
def routed(keepers: tuple[Process, Process]) -> str:
    # Without servers a router is refused, and nothing changes.
    refused = play("router", check=False)
    said = " ".join(refused.split())
    assert changed(refused) == 0
    for name, port in (("first", 30911), ("second", 30912)):
        assert f"{name} (http://127.0.0.1:{port}) does not answer the router's machine" in said.replace("''", "'")
    assert "would be refused" in play("router", "--check", "--diff")
    # One after the other: they share a machine, and so its lease.
    for name in ("first", "second"):
        play("serve", "-e", "mode=baseline", "--limit", name)
    return play("router")


def test_it_is_proved_by_a_completion_through_it(routed: str, keepers: tuple[Process, Process]) -> None:
    assert "2 of 2 servers taken, and a completion came through the router" in routed
    assert keepers[0].show(ROUTER)["ActiveState"] == "active"
    before = answered(FIRST), answered(SECOND)
    assert [complete() for _ in range(4)] == [200] * 4
    # A log may be a moment behind.
    deadline = time.monotonic() + 10
    while answered(FIRST) + answered(SECOND) < sum(before) + 4 and time.monotonic() < deadline:
        time.sleep(0.1)
    assert (answered(FIRST) - before[0], answered(SECOND) - before[1]) == (2, 2)


def test_a_second_run_changes_nothing(routed: str) -> None:
    again = play("router")
    assert changed(again) == 0
    assert changed(play("router", "--check", "--diff")) == 0


def test_it_asks_for_the_keys_and_gives_none_away(routed: str, keepers: tuple[Process, Process]) -> None:
    assert complete(key="a-wrong-key-0123456789") == 401
    assert ask("/workers", KEY) == 401 and ask("/workers", ADMIN) == 200
    for pid in keepers[0].pids(ROUTER):
        words = b"".join(Path(f"/proc/{pid}/{name}").read_bytes() for name in ("cmdline", "environ"))
        assert b"SENTINEL" not in words
    secrets = FIRST / "etc/servelab/secrets"
    assert (secrets / "router.json").stat().st_mode & 0o777 == 0o400
    told = [path for place in ("etc", "run", "var") for path in (FIRST / place).rglob("*") if path.is_file()]
    assert {path.parent for path in told if b"SENTINEL" in path.read_bytes()} == {secrets}
    assert "SENTINEL" not in routed


def test_its_figures_are_for_this_machine_alone(routed: str) -> None:
    # 30914 in hexadecimal, as /proc has it, after the address.
    listening = [line.split()[1] for line in Path("/proc/net/tcp").read_text().splitlines() if " 0A " in line]
    assert [address for address in listening if address.endswith(f":{30914:04X}")] == ["0100007F:78C2"]


def test_bad_settings_are_refused_all_at_once(routed: str, keepers: tuple[Process, Process]) -> None:
    before = keepers[0].show(ROUTER)["InvocationID"]
    wrong = {"sglang_router_port": 80, "sglang_router_args": {"api_key": "x"}, "sglang_router_host": "0.0.0.0"}
    output = play("router", "-e", json.dumps(wrong | {"sglang_server_admin_api_key": ""}), check=False)
    said = " ".join(output.split())
    assert changed(output) == 0
    for part in ("sglang_router_port is 80", "sglang_router_args sets api_key", "sglang_router_host is 0.0.0.0"):
        assert part in said
    flags = play("router", "-e", json.dumps({"sglang_router_args": {"no_such_flag": 1}}), check=False)
    assert "unrecognized arguments: --no-such-flag 1" in " ".join(flags.split())
    assert keepers[0].show(ROUTER)["InvocationID"] == before


def test_an_old_router_is_pruned_and_the_one_in_use_stays(routed: str) -> None:
    place = FIRST / "opt/servelab/router"
    installed = sorted(place.iterdir())
    assert len(installed) == 1
    (place / "0.0.1-00000000/bin").mkdir(parents=True)
    said = " ".join(play("prune").split())
    assert f"{installed[0].name}: {ROUTER} runs from it" in said
    assert sorted(place.iterdir()) == installed
    # The stack that the link names stays too.
    assert (FIRST / "opt/servelab/stack").resolve().is_dir()


def test_nothing_is_lost_when_a_server_stops_and_it_is_named(routed: str, keepers: tuple[Process, Process]) -> None:
    keepers[1].stop(SERVER)
    assert [complete() for _ in range(4)] == [200] * 4
    refused = " ".join(play("router", check=False).split())
    assert "second (http://127.0.0.1:30912) does not answer the router" in refused


def test_status_and_stop(routed: str, keepers: tuple[Process, Process]) -> None:
    assert f"The router runs ({ROUTER}, port {PORT}): " in " ".join(play("status").split())
    play("stop")
    assert keepers[0].show(ROUTER)["ActiveState"] == "inactive"
    assert keepers[0].pids(ROUTER) == set()
    assert "No router runs." in play("status", "--limit", "first")
