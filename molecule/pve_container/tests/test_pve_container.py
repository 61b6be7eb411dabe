"""Two guests as described; a change by hand is found and alone taken back; what was not described stays as it is."""

from __future__ import annotations

import re

import pytest

TASK = [("Create the guest, or set what differs", "lab-gpu1")]
DRIVER = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]


def config(node, vmid: int) -> dict[str, str]:
    lines = node.check_output(f"pct config {vmid}").splitlines()
    return dict(line.split(": ", 1) for line in lines)


def devices(found: dict[str, str]) -> set[str]:
    return {value for key, value in found.items() if re.fullmatch(r"dev\d+", key)}


def test_the_guest_is_as_the_inventory_says(node):
    found = config(node, 129)
    wanted = {
        "hostname": "gpu1",
        "memory": "8192",
        "swap": "0",
        "features": "nesting=1",
        "onboot": "1",
        "unprivileged": "1",
        "mp0": "/srv/cache,mp=/var/cache/servelab-lab",
        "mp1": "/srv/servelab-lab,mp=/opt/servelab-lab,ro=1",
    }
    assert wanted.items() <= found.items()
    assert devices(found) == {f"/dev/{name},mode=0666" for name in [*(f"nvidia{n}" for n in range(8)), *DRIVER]}
    assert "lxc.prlimit.memlock: 4194304" in node.file("/etc/pve/lxc/129.conf").content_string.splitlines()


def test_the_other_guest_is_as_described(node):
    found = config(node, 199)
    wanted = {
        "hostname": "other.example",
        "cores": "1",
        "cpulimit": "0.5",
        "cpuunits": "50",
        "memory": "1024",
        "swap": "64",
        "onboot": "0",
        "startup": "order=3,up=5",
        "protection": "1",
        "nameserver": "192.0.2.53 192.0.2.54",
        "searchdomain": "example.org",
        "tags": "gpu;spare",
        "timezone": "Europe/Berlin",
        "mp0": "/srv/servelab-lab,mp=/mnt/doubles,ro=1",
    }
    assert {key: found.get(key) for key in wanted} == wanted
    assert set(found["features"].split(",")) == {"keyctl=1", "nesting=1"}
    assert {"name=eth1", "hwaddr=02:00:00:00:01:99", "mtu=1400"} <= set(found["net0"].split(","))
    assert {frozenset(value.split(",")) for value in devices(found)} == {
        frozenset({f"/dev/{name}", "mode=0660", "gid=44"}) for name in ["nvidia2", "nvidia5", *DRIVER]
    }


def test_the_other_guest_runs_and_sees_its_cards_only(node):
    seen = node.check_output("pct exec 199 -- sh -c 'ls /dev | grep nvidia; hostname; stat -c %a:%g /dev/nvidia5'")
    assert set(seen.split()) == {"nvidia2", "nvidia5", *DRIVER, "other", "660:44"}


def test_both_people_may_log_in(node):
    keys = node.check_output("pct exec 199 -- cat /root/.ssh/authorized_keys").splitlines()
    assert [line.rsplit(" ", 1)[-1] for line in keys if line.startswith("ssh-")].count("person") == 1
    assert len([line for line in keys if line.startswith("ssh-")]) == 2


def test_memory_changed_by_hand_is_found_and_alone_taken_back(play, node):
    # The description says nothing about a description, so that one stays.
    node.check_output("pct set 129 --memory 4096 --description by-hand")
    before = config(node, 129)
    checked = play("--check", "--diff")
    assert checked.changed == TASK
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert old - new == {"memory: 4096"} and new - old == {"memory: 8192"}
    assert config(node, 129) == before
    assert play().changed == TASK
    assert config(node, 129) == {**before, "memory": "8192"}
    node.check_output("pct set 129 --delete description")


def test_a_card_taken_away_by_hand_is_given_back(play, node):
    card = next(key for key, value in config(node, 129).items() if value.startswith("/dev/nvidia6,"))
    node.check_output(f"pct set 129 --delete {card}")
    checked = play("--check", "--diff")
    assert checked.changed[0] == TASK[0]
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert "/dev/nvidia6,mode=0666" in {line.split(": ", 1)[-1] for line in new - old}
    assert play().ok
    assert len(devices(config(node, 129))) == 11
    assert play().changed == []


def test_what_is_fixed_at_creation_is_refused_with_the_remedy(play, node):
    before = config(node, 129)
    played = play(pve_container_guest={"vmid": 129, "hostname": "gpu1", "unprivileged": False})
    assert not played.ok
    assert "unprivileged" in played.said
    assert played.changed == []
    assert config(node, 129) == before


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"pve_node": "pve9"}, "pve_node of lab-gpu1 is pve9; it must be a host of the group pve_nodes (lab-pve1)"),
        ({"pve_container_ssh_public_keys": []}, "pve_container_ssh_public_keys is empty, so nobody could log in"),
    ],
)
def test_a_guest_without_node_or_keys_is_refused(play, variables, sentence):
    played = play(**variables)
    assert not played.ok
    assert sentence in played.said
    assert played.changed == []


def test_a_locked_guest_is_left_alone_and_the_lock_is_named(play, node, fault):
    node.check_output("pct set 129 --memory 4096")
    try:
        with fault("guest_locked"):
            played = play()
            assert not played.ok
            assert "CT is locked (backup)" in played.said
            assert config(node, 129)["memory"] == "4096"
        assert play().changed == TASK
    finally:
        node.check_output("pct set 129 --memory 8192")
