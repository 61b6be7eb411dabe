"""Two guests that serve behind a router, and how the scenarios of the router ask them."""

from __future__ import annotations

import functools
import json
from typing import Any

from conftest import ROOT, connect, reach
from testinfra.host import Host

INVENTORY = ROOT / "inventory/lab-router"
UNIT = "servelab-sglang-router.service"
KEY, ADMIN = "SENTINELapikey4711", "SENTINELadminkey4711"
MODEL = "/shared/kimi-k2.5-int4"


@functools.cache
def reached() -> dict[str, dict[str, Any]]:
    return reach("gpu_guests", "-i", str(INVENTORY))


@functools.cache
def guest_of(name: str) -> Host:
    return connect(reached()[name])


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


def assert_runs_as(host: Host, user: str, boot: str) -> None:
    assert host.service(UNIT).is_running
    assert host.run(f"systemctl is-enabled {UNIT}").stdout.strip() == boot
    pid = host.check_output(f"systemctl show -P MainPID {UNIT}")
    assert host.check_output(f"stat -c %U /proc/{pid}") == user


def assert_keys_are_nowhere_else(host: Host, user: str) -> None:
    file = host.file("/etc/servelab/router/keys.json")
    assert (file.user, file.mode) == (user, 0o400)
    said = host.check_output(f"systemctl show {UNIT}; systemctl cat {UNIT}; ps -eww -o args; journalctl --no-pager")
    logs = host.check_output("cat /var/log/servelab/sglang-router/*.log")
    assert KEY not in said + logs and ADMIN not in said + logs


def start_baseline(host: Host) -> None:
    host.check_output("systemctl reset-failed servelab-baseline.service; systemctl start servelab-baseline.service")
