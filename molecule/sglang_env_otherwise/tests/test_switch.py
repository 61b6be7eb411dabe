"""0.5.12, then 0.5.23, and back, with a server of the first one: it and its stack stay what they are until its restart.

Then the same under the collection's own supervisor, until nothing uses the old stack and it goes."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
from conftest import ROOT

PLAYBOOKS = ROOT / "playbooks"
UNITS = Path(__file__).resolve().parent.parent / "units.yml"
OWN = ROOT / "molecule/sglang_env/converge.yml"
LINK, STACKS, JIT = "/opt/servelab/stack", "/opt/servelab/stacks", "/var/cache/servelab/jit"
UNIT = "servelab-baseline.service"
UNIT_DIRS = {"systemd": "/etc/systemd/system", "process": "/etc/servelab/units"}
LINK_ALONE = [("Use this stack", "lab-gpu1")]
OLD = {"sglang_version": "0.5.12"}
# Run by the stack's own Python, as SGLang is, and not by the machine's as elsewhere in the lab.
SERVER = {
    "sglang_server_command": [
        "/usr/bin/env",
        "PYTHONPATH=/opt/servelab-lab",
        f"{LINK}/bin/python",
        "-P",
        "-m",
        "servelab_lab.server",
    ]
}
PROCESS = {"sglang_server_supervisor": "process"}
# What a process that the server starts now is given: a rank that is spawned anew, a module that is loaded late.
GIVEN = "import importlib.metadata, sys; print(sys.prefix, importlib.metadata.version('sglang'))"


@dataclass(frozen=True)
class Server:
    """release: what it says it is. pid: the process. given: stack and release that a process it starts now gets."""

    release: str
    pid: str
    given: str


def stack_of(guest):
    return Path(guest.check_output(f"readlink {LINK}")).name


def named(guest, keeper):
    """The stacks that the unit names."""
    return set(re.findall(rf"{STACKS}/([^/]+)/", guest.file(f"{UNIT_DIRS[keeper]}/{UNIT}").content_string))


def serving(guest, keeper):
    """The server, once one answers."""
    ask = "import urllib.request; print(urllib.request.urlopen('http://127.0.0.1:30000/server_info').read().decode())"
    for _ in range(120):
        answer = guest.run(f'python3 -c "{ask}"')
        if answer.rc == 0:
            break
        time.sleep(1)
    else:
        pytest.fail("no server answered for two minutes")
    if keeper == "systemd":
        main = guest.check_output(f"systemctl show --value -p MainPID {UNIT}")
    else:
        main = json.loads(guest.file(f"/run/servelab/units/{UNIT}.json").content_string)["main"]["pid"]
    # The unit's process filters the output of the server, which is its only child.
    (pid,) = guest.check_output(f"cat /proc/{main}/task/{main}/children").split()
    interpreter = guest.check_output(f"tr '\\0' '\\n' < /proc/{pid}/cmdline").splitlines()[0]
    return Server(json.loads(answer.stdout)["version"], pid, guest.check_output(f'{interpreter} -c "{GIVEN}"'))


def kept(played, stack):
    """Why prune.yml kept a stack, in its words."""
    assert played.ok, played.said
    (said,) = played.results["Say what stays, and why"]
    return [sentence for sentence in said["msg"] if sentence.startswith(f"{stack}: ")]


@pytest.fixture(scope="module")
def switched(play, guest):
    """What was seen at each step under systemd: link, stacks that the unit names, server; and what playbooks did."""
    seen = {}

    def look(step):
        seen[step] = stack_of(guest), named(guest, "systemd"), serving(guest, "systemd")

    try:
        for playbook, words in ((UNITS, OLD), (PLAYBOOKS / "serve.yml", OLD | {"mode": "baseline"})):
            played = play(playbook=playbook, **SERVER, **words)
            assert played.ok, played.said
        look("old")
        seen["upgrade"] = play(playbook=OWN)
        look("link moved")
        seen["status"] = play(playbook=PLAYBOOKS / "status.yml")
        seen["first prune"] = play(playbook=PLAYBOOKS / "prune.yml")
        seen["rendering"] = play(playbook=UNITS, **SERVER)
        look("unit rendered")
        seen["second prune"] = play(playbook=PLAYBOOKS / "prune.yml")
        look("pruned")
        guest.check_output(f"systemctl restart {UNIT}")
        look("restarted")
        seen["way back"] = play(playbook=OWN, **OLD)
        look("back")
        assert play(playbook=PLAYBOOKS / "stop.yml").ok
        seen["home"] = play(playbook=OWN)
        return seen
    finally:
        guest.run(f"systemctl stop {UNIT}")
        play(playbook=OWN)


def test_a_server_keeps_its_stack_when_the_link_moves(switched):
    (old, old_unit, before), (new, unit, after) = switched["old"], switched["link moved"]
    assert re.fullmatch(r"0\.5\.12-light-[0-9a-f]{8}", old) and re.fullmatch(r"0\.5\.23-light-[0-9a-f]{8}", new)
    assert switched["upgrade"].changed == LINK_ALONE
    assert (before.release, before.given) == ("0.5.12", f"{STACKS}/{old} 0.5.12")
    assert old_unit == unit == {old}
    # The same process, and what it would load and start is there and still of its release.
    assert after == before


def test_status_tells_what_runs_and_not_what_the_link_names(switched):
    (said,) = switched["status"].results["Tell it"]
    (stack,) = [line.strip() for line in said["msg"] if line.strip().startswith("stack: ")]
    assert stack.startswith("stack: SGLang 0.5.12, while the stack in use is 0.5.23 by now, patch state unknown;")


def test_its_unit_is_written_anew_while_it_runs(switched):
    old, _unit, before = switched["old"]
    new, unit, after = switched["unit rendered"]
    assert unit == {new} and new != old
    assert after == before
    (said,) = switched["rendering"].results["Say that the running server still is the old one"]
    assert "runs with older settings than its files have, and keeps them until it is restarted" in said["msg"]


def test_neither_its_unit_nor_it_alone_loses_the_stack(switched):
    """The link had moved on; then the unit had, too, and only the process was left of what used the stack."""
    old, _unit, before = switched["old"]
    (said,) = kept(switched["first prune"], old)
    assert re.fullmatch(rf"{old}: {UNIT} runs from it, processes [0-9, ]+ run from it\.", said)
    (said,) = kept(switched["second prune"], old)
    assert re.fullmatch(rf"{old}: processes [0-9, ]+ run from it\.", said)
    assert before.pid in re.findall(r"[0-9]+", said.partition(": ")[2])
    assert switched["pruned"][2] == before


def test_its_restart_brings_the_new_one(switched):
    new, unit, server = switched["restarted"]
    assert unit == {new}
    assert (server.release, server.given) == ("0.5.23", f"{STACKS}/{new} 0.5.23")
    assert server.pid != switched["old"][2].pid


def test_the_way_back_moves_the_link_alone(switched):
    assert switched["way back"].changed == switched["home"].changed == LINK_ALONE
    link, unit, server = switched["back"]
    assert link == switched["old"][0]
    assert unit == {switched["restarted"][0]}
    assert server == switched["restarted"][2]


@pytest.fixture(scope="module")
def supervised(play, guest, switched):
    """The same without systemd, up to a stack that nothing uses."""
    seen = {}
    try:
        for playbook, words in ((UNITS, OLD), (PLAYBOOKS / "serve.yml", OLD | {"mode": "baseline"})):
            played = play(playbook=playbook, **SERVER, **PROCESS, **words)
            assert played.ok, played.said
        seen["old"] = stack_of(guest)
        before = serving(guest, "process")
        assert play(playbook=OWN).changed == LINK_ALONE
        seen["unit and server"] = play(playbook=PLAYBOOKS / "prune.yml")
        assert play(playbook=UNITS, **SERVER, **PROCESS).ok
        seen["server"] = play(playbook=PLAYBOOKS / "prune.yml")
        seen["kept on"] = before, serving(guest, "process")
        assert play(playbook=PLAYBOOKS / "stop.yml", **PROCESS).ok
        # What its servers compiled, and what others did.
        guest.check_output(f"install -d {JIT}/{seen['old']}/triton {JIT}/{stack_of(guest)}/triton")
        seen["wanted"] = play(playbook=PLAYBOOKS / "prune.yml", keep="0.5.12")
        seen["stacks"] = guest.file(STACKS).listdir(), guest.file(JIT).listdir()
        seen["nothing"] = play(playbook=PLAYBOOKS / "prune.yml")
        seen["left"] = guest.file(STACKS).listdir(), guest.file(JIT).listdir()
        seen["again"] = play(playbook=PLAYBOOKS / "prune.yml")
        return seen
    finally:
        guest.run(f"python3 /opt/servelab/supervise.py stop {UNIT}")
        play(playbook=OWN)


def test_a_server_without_systemd_keeps_its_stack_too(supervised):
    old = supervised["old"]
    assert old.startswith("0.5.12-light-")
    (said,) = kept(supervised["unit and server"], old)
    assert re.fullmatch(rf"{old}: {UNIT} runs from it, processes [0-9, ]+ run from it\.", said)
    (said,) = kept(supervised["server"], old)
    assert re.fullmatch(rf"{old}: processes [0-9, ]+ run from it\.", said)
    before, after = supervised["kept on"]
    assert after == before
    assert before.given == f"{STACKS}/{old} 0.5.12"


def test_a_release_that_is_to_stay_stays(supervised):
    assert supervised["wanted"].ok
    assert all(supervised["old"] in directory for directory in supervised["stacks"])


def test_what_nothing_uses_goes_with_what_was_compiled_for_it(supervised, guest):
    assert supervised["nothing"].changed == [("Remove the others", "lab-gpu1")]
    for directory in supervised["left"]:
        assert stack_of(guest) in directory and supervised["old"] not in directory
    assert supervised["again"].ok and supervised["again"].changed == []
