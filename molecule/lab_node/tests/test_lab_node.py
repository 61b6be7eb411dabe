"""Each failure that the lab can play is seen where a person would see it, and is gone when it is switched off."""

from __future__ import annotations

import contextlib
import json
import re
import time
from collections.abc import Iterator

import pytest

SMI = "timeout 5 nvidia-smi --query-gpu=index,memory.used,power.draw --format=csv,noheader,nounits"
SWITCH = "env PYTHONPATH=/srv/servelab-lab python3 -P -m servelab_lab.faults"
# docs/simulator.md, "Failures on demand".
SERVER = [
    *("oom_kv_pool", "oom_graph_capture", "unsupported_architecture", "assertion", "fell_back_to_nccl"),
    *("hang_nccl_init", "garbage_output", "death_on_first_request", "survivors"),
]


class Inside:
    """Guest 129, asked through its node: it is restarted here, and a kept ssh connection to what is gone hangs."""

    def __init__(self, node) -> None:
        self._node = node

    def run(self, command: str):
        return self._node.run("pct exec 129 -- sh -c %s", command)

    def check_output(self, command: str) -> str:
        return self._node.check_output("pct exec 129 -- sh -c %s", command)


@pytest.fixture
def guest(node) -> Inside:
    return Inside(node)


@pytest.fixture
def fault(node):
    """fault("smi_hang") plays it for the length of a with-block."""

    @contextlib.contextmanager
    def playing(name: str) -> Iterator[None]:
        said = node.check_output(f"{SWITCH} {name} on")
        assert said.startswith(f"on: {name}: ")
        try:
            yield
        finally:
            node.check_output(f"{SWITCH} {name} off")

    return playing


@pytest.fixture(autouse=True)
def the_guest_runs_for_the_next_test(node):
    yield
    node.run("pct status 129 | grep -q running || pct start 129 || true")


def settled(node) -> str:
    return node.run("systemctl is-system-running --wait").stdout.strip()


def test_all_is_well(node, guest):
    assert settled(node) == settled(guest) == "running"
    assert node.check_output(f"{SWITCH} all off") == "already off: all"
    for host in (node, guest):
        assert len(host.check_output(SMI).splitlines()) == 8


@pytest.mark.parametrize(
    ("name", "status", "said"),
    [
        ("smi_hang", 124, ""),
        ("no_devices", 6, "No devices were found"),
        ("no_driver", 9, "couldn't communicate with the NVIDIA driver"),
        ("driver_mismatch", 18, "Driver/library version mismatch"),
        ("off_the_bus", 15, "Unable to determine the device handle for GPU3: 0000:61:00.0: GPU is lost."),
    ],
)
def test_nvidia_smi_fails_on_node_and_guest(node, guest, fault, name, status, said):
    with fault(name):
        for host in (node, guest):
            done = host.run(SMI.replace("timeout 5", "timeout 1"))
            assert done.rc == status
            assert said in done.stdout
    assert node.run(SMI).rc == guest.run(SMI).rc == 0


@pytest.mark.parametrize(
    ("name", "row"), [("needs_reset", r"3, \[GPU requires reset\], "), ("unreadable", r"3, 4, \[Unknown Error\]")]
)
def test_one_card_answers_with_a_sentinel(guest, fault, name, row):
    with fault(name):
        rows = guest.check_output(SMI).splitlines()
    assert re.match(row, rows[3])
    assert [line for line in rows if "[" in line] == [rows[3]]


def tried(node, command: str) -> tuple[int, str]:
    """Status and output of what may fail. 255, the status of a failed pct, means to testinfra that ssh failed."""
    *said, status = node.check_output(f"({command}) 2>&1; echo $?").splitlines()
    return int(status), "\n".join(said)


@pytest.fixture
def handmade(node):
    """Guest 198 has the device as people pass it by hand: a fixed number in the filter, and a bind mount."""
    number = node.check_output("stat -c %Hr:%Lr /dev/nvidia-uvm")
    template = node.check_output("basename /var/lib/vz/template/cache/debian-13-*.zst")
    # What a creation leaves that is cut off together with its node is in nobody's way.
    node.check_output("mkdir -p /var/lib/lxc/198/rootfs/etc")
    node.check_output(f"pct create 198 local:vztmpl/{template} --rootfs local:4 --features nesting=1 --memory 1024")
    for line in (
        f"lxc.cgroup2.devices.allow: c {number} rwm",
        "lxc.mount.entry: /dev/nvidia-uvm dev/nvidia-uvm none bind,optional,create=file",
    ):
        node.check_output(f"echo '{line}' >> /etc/pve/lxc/198.conf")
    node.check_output("pct start 198")
    yield 198
    node.check_output("pct destroy 198 --force 1")


def test_a_moved_number_breaks_fixed_numbers_and_no_dev_entry(node, fault, handmade):
    opens = "pct exec {} -- head -c0 /dev/nvidia-uvm"
    assert tried(node, opens.format(129)) == tried(node, opens.format(handmade)) == (0, "")
    with fault("uvm_moved"):
        if node.check_output("stat -c %Hr /dev/nvidia-uvm") == "1":
            pytest.skip("this machine lets no container open a device of another major number")
        node.check_output(f"pct reboot 129 && pct reboot {handmade}")
        assert tried(node, opens.format(129)) == (0, "")
        status, said = tried(node, opens.format(handmade))
        assert status == 1 and said.endswith("Operation not permitted")
    node.check_output("pct reboot 129")


def test_a_missing_node_at_boot_leaves_the_guest_down_and_says_why(node, fault):
    with fault("uvm_missing"):
        # As a boot does: guests are started by this unit.
        node.check_output("pct shutdown 129")
        assert tried(node, "systemctl restart pve-guests")[0] == 1
        assert settled(node) == "degraded"
        assert node.check_output("pct status 129") == "status: stopped"
        assert re.search(
            r"CT 129: Device /dev/nvidia-uvm\S* does not exist", node.check_output("journalctl -b -u pve-guests")
        )
    node.check_output("systemctl restart pve-guests")
    assert node.check_output("pct status 129") == "status: running"
    assert settled(node) == "running"


def test_a_regular_file_in_place_of_a_node(node, fault):
    with fault("node_is_file"):
        assert node.file("/dev/nvidia3").is_file
        assert tried(node, "pct reboot 129") == (255, "/dev/nvidia3 is not a device")
    node.check_output("test -c /dev/nvidia3 && pct start 129")


def test_a_locked_guest(node, fault):
    with fault("guest_locked"):
        assert tried(node, "pct set 129 --memory 4096") == (255, "CT is locked (backup)")
        assert re.search(r"^129 +running +backup ", node.check_output("pct list"), re.M)
    assert not re.search(r"^lock:", node.check_output("pct config 129"), re.M)


@pytest.mark.parametrize("name", ["node_process", "other_guest"])
def test_a_card_is_held_elsewhere(node, guest, fault, name):
    apps = "nvidia-smi --query-compute-apps=pid,used_memory --format=csv,noheader,nounits"
    with fault(name):
        (held,) = node.check_output(apps).splitlines()
        pid, mib = held.split(", ")
        assert mib == "40960"
        assert guest.check_output(SMI).splitlines()[3].startswith("3, 40964, ")
        # It is nobody of the guest: no process of its own is there to end.
        assert guest.run("fuser /dev/nvidia3").stdout == ""
        cgroup = node.file(f"/proc/{pid}/cgroup").content_string
        assert ("lxc/199" in cgroup) == (name == "other_guest")
    assert node.check_output(apps) == ""


@pytest.mark.parametrize("name", SERVER)
def test_the_simulated_server_is_told(guest, fault, name):
    # Whether it then does what it is told is tests/unit/test_sim_faults.py's business.
    with fault(name):
        server = json.loads(guest.check_output("cat /opt/servelab-lab/faults.json"))["server"]
    assert server == ({"survivors": True} if name == "survivors" else {"faults": [name]})


def test_a_node_that_is_restarted_brings_its_guest_back(node):
    # When its first process was started tells one boot from the next.
    booted = "cut -d' ' -f22 /proc/1/stat"
    before = node.check_output(booted)
    node.run("systemctl reboot")
    for _ in range(100):
        now = node.run(booted)
        if now.rc == 0 and now.stdout.strip() != before:
            break
        time.sleep(0.2)
    assert settled(node) == "running"
    assert node.check_output("pct status 129") == "status: running"
    assert len(node.check_output("ls /dev/nvidia[0-7]").split()) == 8
