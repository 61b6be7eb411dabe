"""0.5.12, then 0.5.23, and back, with a server of the first one: it stays what it is until its restart.

Then what nothing uses goes."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

PLAYBOOKS = Path(__file__).resolve().parents[3] / "playbooks"
UNITS = Path(__file__).resolve().parent.parent / "units.yml"
OWN = ("--tags", "own")
LINK = "/opt/servelab/stack"
OLD = {"sglang_version": "0.5.12"}
UNIT = "servelab-baseline.service"
LINK_ALONE = [("Use this stack", "lab-gpu1")]


def serving(guest):
    """The release and the process that answer, once one does."""
    for _ in range(120):
        answer = guest.run("curl --silent --fail --max-time 5 http://127.0.0.1:30000/server_info")
        if answer.rc == 0:
            return json.loads(answer.stdout)["version"], guest.check_output(f"systemctl show --value -p MainPID {UNIT}")
        time.sleep(1)
    pytest.fail("no server answered for two minutes")


def stack_of(guest):
    return Path(guest.check_output(f"readlink {LINK}")).name


def named(guest):
    """Stacks that the unit names."""
    return set(re.findall(r"/opt/servelab/stacks/([^/]+)/", guest.check_output(f"systemctl cat {UNIT}")))


@pytest.fixture(scope="module")
def states(play, guest):
    """What was seen at each step."""
    seen = {}
    try:
        began = play(playbook=UNITS, **OLD)
        assert began.ok, began.said
        served = play(playbook=PLAYBOOKS / "serve.yml", mode="baseline", **OLD)
        assert served.ok, served.said
        seen["old"] = stack_of(guest), serving(guest), named(guest)
        upgraded = play(*OWN)
        assert upgraded.ok, upgraded.said
        seen["switched"] = stack_of(guest), serving(guest), named(guest)
        seen["prune"] = play("--check", playbook=PLAYBOOKS / "prune.yml")
        rendered = play(playbook=UNITS)
        assert rendered.ok, rendered.said
        seen["rendered"] = stack_of(guest), serving(guest), named(guest)
        guest.check_output(f"systemctl restart {UNIT}")
        seen["restarted"] = stack_of(guest), serving(guest), named(guest)
        seen["back"] = play(*OWN, **OLD)
        seen["after the way back"] = stack_of(guest), serving(guest), named(guest)
        assert play(playbook=PLAYBOOKS / "stop.yml").ok
        seen["home"] = play(*OWN)
        return seen
    finally:
        guest.run(f"systemctl stop {UNIT}")
        play(*OWN)


def test_a_server_keeps_its_stack_until_its_restart(states):
    (old, before, unit), (new, after, same) = states["old"], states["switched"]
    assert old.startswith("0.5.12-light-") and new.startswith("0.5.23-light-")
    assert unit == same == {old}
    # Another process would be another server.
    assert after == before
    assert before[0] == "0.5.12"


def test_its_unit_may_be_written_anew_while_it_runs(states):
    new, served, unit = states["rendered"]
    assert unit == {new}
    assert served == states["old"][1]


def test_its_restart_brings_the_new_one(states):
    new, (release, pid), unit = states["restarted"]
    assert new.startswith("0.5.23-light-") and unit == {new}
    assert release == "0.5.23"
    assert pid != states["old"][1][1]


def test_the_way_back_moves_the_link_alone(states):
    assert states["back"].changed == states["home"].changed == LINK_ALONE
    old, served, _unit = states["after the way back"]
    assert old == states["old"][0]
    assert served == states["restarted"][1]


def test_a_stack_that_a_unit_names_stays(states):
    """When the link had moved on already."""
    old = states["old"][0]
    (said,) = states["prune"].results["Say what stays, and why"]
    assert f"{old}: {UNIT} runs from it." in said["msg"]
    gone = [result["item"] for result in states["prune"].results["Remove the others"][0].get("results", [])]
    assert f"/opt/servelab/stacks/{old}" not in gone


def test_what_nothing_uses_goes_with_its_kernels(play, guest, states):
    old, new = states["old"][0], stack_of(guest)
    guest.check_output(f"install -d /var/cache/servelab/jit/{old} /var/cache/servelab/jit/{new}")
    kept = play(playbook=PLAYBOOKS / "prune.yml", keep="0.5.12")
    assert kept.ok and guest.file(f"/opt/servelab/stacks/{old}").is_directory
    assert play(playbook=PLAYBOOKS / "prune.yml").ok
    for directory in ("/opt/servelab/stacks", "/var/cache/servelab/jit"):
        left = guest.file(directory).listdir()
        assert new in left and old not in left
    assert play(playbook=PLAYBOOKS / "prune.yml").changed == []
