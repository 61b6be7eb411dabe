"""Two guests as described; a change by hand is found and alone taken back; what was not described stays as it is."""

from __future__ import annotations

import json
import re
import time

import pytest

TASK = [("Create the guest, or set what differs", "lab-gpu1")]
DRIVER = ["nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]
# Most tests change the one guest only; the other one need not be looked at again.
ONE = ("--limit", "lab-gpu1")


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
    checked = play(*ONE, "--check", "--diff")
    assert checked.changed == TASK
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert old - new == {"memory: 4096"} and new - old == {"memory: 8192"}
    assert config(node, 129) == before
    assert play(*ONE).changed == TASK
    assert config(node, 129) == {**before, "memory": "8192"}
    node.check_output("pct set 129 --delete description")


def test_a_card_taken_away_by_hand_is_given_back(play, node):
    card = next(key for key, value in config(node, 129).items() if value.startswith("/dev/nvidia6,"))
    node.check_output(f"pct set 129 --delete {card}")
    checked = play(*ONE, "--check", "--diff")
    assert checked.changed[0] == TASK[0]
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert "/dev/nvidia6,mode=0666" in {line.split(": ", 1)[-1] for line in new - old}
    assert play(*ONE).ok
    assert len(devices(config(node, 129))) == 11
    assert play(*ONE).changed == []


def test_what_is_fixed_at_creation_is_refused_with_the_remedy(play, node):
    before = config(node, 129)
    played = play(*ONE, pve_container_guest={"vmid": 129, "hostname": "gpu1", "unprivileged": False})
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
    played = play(*ONE, **variables)
    assert not played.ok
    assert sentence in played.said
    assert played.changed == []


def test_shared_memory_has_its_size_after_every_start(node):
    def size() -> str:
        return node.check_output("pct exec 199 -- df -k --output=size,target /dev/shm | tail -n 1").split()[0]

    assert size() == str(96 * 1024)
    node.check_output("pct reboot 199")
    wait_for(lambda: node.run("pct exec 199 -- systemctl is-system-running").stdout.strip() in ("running", "degraded"))
    assert size() == str(96 * 1024)
    assert node.run("pct exec 199 -- mountpoint -q /dev/hugepages").rc == 0


def wait_for(condition, seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(1)


# A change that any of these must not let through.
CHANGE = {"pve_container_guest": {"vmid": 129, "hostname": "gpu1", "memory": 4096}}


def test_a_locked_guest_is_left_alone_and_the_lock_is_named(play, node, fault):
    node.check_output("pct set 129 --memory 4096")
    try:
        with fault("guest_locked"):
            played = play(*ONE)
            assert not played.ok
            assert "CT is locked (backup)" in played.said
            assert config(node, 129)["memory"] == "4096"
        assert play(*ONE).changed == TASK
    finally:
        node.check_output("pct set 129 --memory 8192")


def test_a_cluster_without_quorum_is_recognised_before_anything_is_tried(play, node):
    members = {"cluster": {"name": "lab", "nodes": 3, "quorate": 0}, "nodelist": {"pve1": {"online": 1}}}
    node.check_output(f"echo '{json.dumps(members)}' > /etc/pve/.members")
    try:
        played = play(*ONE, **CHANGE)
        # Where nothing is to be changed, nothing is refused.
        assert play(*ONE).ok
    finally:
        node.check_output("rm /etc/pve/.members")
    assert not played.ok and played.changed == []
    assert "The cluster lab has no quorum (1 of 3 nodes online), so /etc/pve cannot be written" in played.said


def test_a_read_only_etc_pve_is_recognised(play, node):
    node.check_output("mount --bind /etc/pve /etc/pve && mount -o remount,bind,ro /etc/pve")
    try:
        played = play(*ONE, **CHANGE)
    finally:
        node.check_output("umount /etc/pve")
    assert not played.ok and played.changed == []
    assert "/etc/pve is mounted read-only, so nothing can be changed" in played.said


def test_a_guest_under_ha_is_told_so(play, node):
    node.check_output("mkdir -p /etc/pve/ha && printf 'ct: 129\\n\\tstate started\\n' > /etc/pve/ha/resources.cfg")
    try:
        played = play(*ONE)
        status = {"service_status": {"ct:129": {"state": "error"}}}
        node.check_output(f"echo '{json.dumps(status)}' > /etc/pve/ha/manager_status && pct stop 129")
        given_up = play(*ONE)
    finally:
        node.check_output("rm -r /etc/pve/ha")
    assert played.ok
    notices = [result["msg"] for result in played.results["Tell what differs and is left as it is"] if "msg" in result]
    assert "HA manages this guest (it is to be started)" in str(notices)
    assert not given_up.ok
    assert "HA has given guest 129 up (state error)" in given_up.said and "ha-manager set ct:129" in given_up.said
    assert play(*ONE).ok


def test_a_guest_with_snapshots_keeps_them(play, node):
    conf = node.file("/etc/pve/lxc/129.conf").content_string
    snapshot = "\n[before]\nmemory: 16384\nunprivileged: 0\nlxc.prlimit.memlock: 1\nsnaptime: 1780000000\n"
    node.check_output(f"cat >> /etc/pve/lxc/129.conf <<'END'\n{snapshot}END")
    try:
        assert play(*ONE).changed == []
        node.check_output("pct set 129 --memory 4096")
        assert play(*ONE).changed == TASK
        after = node.file("/etc/pve/lxc/129.conf").content_string
    finally:
        node.check_output("sed -i '/^\\[before\\]/,$d' /etc/pve/lxc/129.conf")
    now, _header, kept = after.partition("[before]\n")
    assert "memory: 8192" in now.splitlines()
    # pct writes a section's keys in its own order.
    assert sorted(kept.splitlines()) == sorted(snapshot.strip().splitlines()[1:])
    assert set(conf.split()) <= set(after.split())


def test_a_node_that_lost_nvidia_uvm_is_told_before_a_start_dies_of_it(play, node):
    node.check_output("pct stop 129 && mv /dev/nvidia-uvm /dev/held")
    try:
        played = play(*ONE)
    finally:
        node.check_output("mv /dev/held /dev/nvidia-uvm")
    assert not played.ok and played.changed == []
    assert "/dev/nvidia-uvm is not a character device on the node" in played.said
    assert "run `nvidia-modprobe -c=0 -u` on the node" in played.said
    assert play(*ONE).ok
    assert "running" in node.check_output("pct status 129")


def test_a_device_number_that_moved_at_a_boot_needs_no_change(play, node):
    """dev[n] entries are resolved at every start, whatever number the driver got this time."""
    node.check_output("mv /dev/nvidia-uvm /dev/held && mknod -m 666 /dev/nvidia-uvm c 1 5 && pct reboot 129")
    try:
        assert node.check_output("pct exec 129 -- stat -c %t:%T /dev/nvidia-uvm") == "1:5"
        assert node.run("pct exec 129 -- sh -c 'head -c 1 /dev/nvidia-uvm'").rc == 0
        assert play(*ONE).changed == []
    finally:
        node.check_output("mv -f /dev/held /dev/nvidia-uvm && pct reboot 129")
    assert play(*ONE).ok
