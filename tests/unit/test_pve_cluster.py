"""A cluster without quorum and a guest under HA, in the files' own formats."""

from __future__ import annotations

import json

import pytest

from servelab.shared.pve_cluster import ha_state, unwritable

MEMBERS = {
    "nodename": "pve1",
    "version": 7,
    "cluster": {"name": "lab", "version": 3, "nodes": 3, "quorate": 1},
    "nodelist": {
        "pve1": {"id": 1, "online": 1, "ip": "192.0.2.11"},
        "pve2": {"id": 2, "online": 0},
        "pve3": {"id": 3, "online": 0},
    },
}
RESOURCES = """ct: 1290
\tgroup all
\tstate stopped

ct: 129
\tcomment state of the art
\tgroup gpu
\tmax_restart 2
\tstate started

vm: 131
\tstate ignored

ct: 130
"""


@pytest.fixture
def pve(tmp_path):
    (tmp_path / "ha").mkdir()
    (tmp_path / "ha/resources.cfg").write_text(RESOURCES)
    return tmp_path


def test_a_cluster_without_quorum_is_said_with_the_remedy(pve):
    members = {**MEMBERS, "cluster": {**MEMBERS["cluster"], "quorate": 0}}
    (pve / ".members").write_text(json.dumps(members))
    sentence = unwritable(pve) or ""
    assert sentence.startswith("The cluster lab has no quorum (1 of 3 nodes online), so /etc/pve cannot be written")
    assert "pvecm status" in sentence


@pytest.mark.parametrize("text", [json.dumps(MEMBERS), json.dumps({"nodename": "pve1", "version": 0}), "", "[]", None])
def test_what_can_be_written_or_is_not_known_is_no_sentence(pve, text):
    if text is not None:
        (pve / ".members").write_text(text)
    assert unwritable(pve) is None


def test_a_guest_under_ha_is_recognised_by_its_own_number(pve):
    found = ha_state(129, pve)
    assert found is not None and (found.wanted, found.state) == ("started", "")
    assert "HA manages this guest (it is to be started)" in found.notice
    stopped = ha_state(1290, pve)
    assert stopped is not None and stopped.wanted == "stopped"
    # Without a state HA starts it.
    alone = ha_state(130, pve)
    assert alone is not None and alone.wanted == "started"


@pytest.mark.parametrize("vmid", [12, 131, 199])
def test_a_guest_without_ha_and_a_vm_are_none_of_them(pve, vmid):
    assert ha_state(vmid, pve) is None


def test_what_ha_is_about_is_read_where_it_is_known(pve):
    (pve / "ha/manager_status").write_text(
        json.dumps({"service_status": {"ct:129": {"state": "error", "node": "pve1"}}})
    )
    found = ha_state(129, pve)
    assert found is not None and found.state == "error"
    (pve / "ha/manager_status").write_text("{")
    found = ha_state(129, pve)
    assert found is not None and found.state == ""


def test_a_node_without_a_cluster_has_neither(tmp_path):
    assert unwritable(tmp_path) is None
    assert ha_state(129, tmp_path) is None
