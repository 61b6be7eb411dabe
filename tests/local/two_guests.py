"""Two names of this machine as guests over a local connection, each with a directory and simulated cards of its own.

The fixture `guests` (conftest.py) brings them, once for all tests that use them, and takes all away afterwards. They
have SGLang's router too, and a mode over both; they meet on the machine's loopback, as only guests of one machine may.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.error
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from servelab.shared.supervision import Process

ROOT = Path(__file__).resolve().parents[2]
# Two levels below the checkout, as the variables of inventory/local want it.
INVENTORY = ROOT / ".lab/two-inventory"
KEY, ADMIN = "SENTINELapikey4711", "SENTINELadminkey4711"
MODEL = "/shared/kimi-k2.5-int4"
# Other ports than the demo's, which may run here too.
ROUTER_PORT, ROUTER_METRICS, MEETING = 30913, 30914, 30925
PAIR = {
    "description": "Tensor parallel over two guests",
    "extends": "baseline",
    "nodes": 2,
    "args": {"tp_size": 4},
}


@dataclass(frozen=True)
class Guest:
    """One of the two: its name in the inventory, the directory below which all of it is, its server's port."""

    name: str
    prefix: Path
    port: int

    @property
    def keeper(self) -> Process:
        return Process(str(self.prefix))


FIRST = Guest("first", ROOT / ".lab/a", 30911)
SECOND = Guest("second", ROOT / ".lab/b", 30912)


def write_inventory() -> None:
    hosts = {
        guest.name: {"servelab_prefix": str(guest.prefix), "sglang_server_port": guest.port}
        for guest in (FIRST, SECOND)
    }
    # One installation of SGLang is enough to read flags from.
    hosts["second"]["sglang_env_current"] = str(FIRST.prefix / "opt/servelab/stack")
    both = {
        "lab_node_time_scale": 20,
        "sglang_server_api_key": KEY,
        "sglang_server_admin_api_key": ADMIN,
        "sglang_server_dist_address": "127.0.0.1",
        "sglang_server_dist_port": MEETING,
        "sglang_server_mode_dirs": [str(INVENTORY / "modes")],
        "sglang_server_poll_interval": 0.5,
    }
    router = {
        "sglang_router_packages": [],
        "sglang_router_python": "{{ ansible_playbook_python }}",
        "sglang_router_port": ROUTER_PORT,
        "sglang_router_metrics_port": ROUTER_METRICS,
        "sglang_router_policy": "round_robin",
    }
    groups = {
        "gpu_guests": {"hosts": hosts, "vars": both},
        "lab_doubles": {"hosts": dict.fromkeys(hosts)},
        "sglang_routers": {"hosts": {"first": None}, "vars": router},
    }
    (INVENTORY / "modes").mkdir(parents=True, exist_ok=True)
    (INVENTORY / "hosts.yml").write_text(json.dumps(groups))
    (INVENTORY / "modes/pair.yml").write_text(yaml.safe_dump(PAIR))
    link = INVENTORY / "group_vars"
    link.unlink(missing_ok=True)
    link.symlink_to("../../inventory/local/group_vars")


def command(playbook: str, *words: str) -> list[str]:
    """What runs a playbook, named from the checkout's root, on the two."""
    return [str(Path(sys.executable).with_name("ansible-playbook")), "-i", str(INVENTORY), playbook, *words]


def play(playbook: str, *words: str, check: bool = True) -> str:
    """Run a playbook; what it said, on one line. Fails with it unless `check` is False."""
    done = subprocess.run(command(playbook, *words), cwd=ROOT, capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return " ".join(done.stdout.replace("''", "'").split())


def changed(said: str, guest: Guest = FIRST) -> int:
    """How many tasks of a playbook changed something on a guest."""
    found = re.search(rf"\b{guest.name} : ok=\d+ changed=(\d+)", said)
    assert found is not None, said[-2000:]
    return int(found[1])


def ask(port: int, path: str, key: str = KEY, body: Any = None) -> int:
    """The HTTP status of an answer."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", data, headers)
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def complete(port: int, key: str = KEY) -> int:
    """The HTTP status of a completion."""
    return ask(port, "/v1/completions", key, {"model": MODEL, "prompt": "Say something", "max_tokens": 4})
