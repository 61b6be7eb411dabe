"""In check mode a host is passed over where its node or guest is not there yet, with a sentence; outside it, never."""

from __future__ import annotations

import json

import pytest

ASKED = ["See whether the node answers", "Ask the node for the guest"]


def runs(played, task: str) -> list[dict]:
    """The task's results where it was not skipped."""
    return [result for result in played.results.get(task, []) if not result.get("skipped")]


def told(played, task: str) -> list[str]:
    """What the task told, with line breaks taken out."""
    return [" ".join(result["msg"].split()) for result in runs(played, task)]


def reached(played) -> int:
    return sum(result.get("ping") == "pong" for result in runs(played, "Reach it"))


@pytest.fixture
def stopped(node):
    node.check_output("pct stop 129")
    yield
    node.check_output("pct start 129")


def test_outside_check_mode_nothing_is_asked(play):
    played = play()
    assert played.ok
    # Node, guest, and the machine without a node.
    assert reached(played) == 3
    assert [runs(played, task) for task in ASKED] == [[], []]


def test_in_check_mode_who_is_there_is_reached_and_who_is_not_is_passed_over(play):
    played = play("--check")
    assert played.ok and played.changed == []
    assert reached(played) == 3
    assert told(played, "Tell that the node is not there yet") == [
        "The node lost-node does not answer, so it is not made yet; check mode cannot tell what would happen on it, and"
        " passes over lost."
    ]
    assert told(played, "Tell that the guest is not there yet") == []


def test_a_guest_that_is_stopped(play, stopped):
    played = play("--check", "--skip-tags", "alternative")
    assert played.ok and played.changed == []
    assert reached(played) == 1
    assert told(played, "Tell that the guest is not there yet") == [
        "Guest 129 (lab-gpu1) is stopped on lab-pve1, so check mode cannot tell what would happen in it."
    ]


def test_a_guest_that_is_not_created(play):
    played = play("--check", "--skip-tags", "alternative", pve_container_guest={"vmid": 140})
    assert played.ok and played.changed == []
    assert told(played, "Tell that the guest is not there yet") == [
        "Guest 140 (lab-gpu1) is absent on lab-pve1, so check mode cannot tell what would happen in it."
    ]


def test_a_node_that_must_be_there_is_not_passed_over(play):
    """As without a lab, where every node is a machine that somebody has."""
    played = play("--check", "--skip-tags", "alternative", ansible_port=9, common_node_may_be_absent=False)
    assert not played.ok
    assert "port 9" in played.said


def test_the_role_alone_is_refused(play, tmp_path):
    playbook = tmp_path / "alone.yml"
    playbook.write_text(
        json.dumps([{"hosts": "lab_hosts", "gather_facts": False, "roles": ["servelab.sglang.common"]}])
    )
    played = play(playbook=playbook)
    assert not played.ok
    assert "use include_role with tasks_from: node_answers or guest_answers." in played.said
