"""Each failure that the lab can play is seen where a person would see it, and is gone when it is switched off."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
from pathlib import Path

import pytest
from conftest import LAB, reboot, told

ROOT = Path(__file__).resolve().parents[3]
UP, FAULT = ROOT / "playbooks/lab.yml", ROOT / "playbooks/lab_fault.yml"
OTHER = ROOT / "molecule/lab_node/vars/other.yml"
# When its first process was started tells one boot from the next.
BOOTED = "cut -d' ' -f22 /proc/1/stat"
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


def uvm(host) -> str:
    return host.check_output("stat -c %t:%T /dev/nvidia-uvm")


def test_a_node_that_is_restarted_brings_its_guest_back(node, guest):
    before = node.check_output(BOOTED)
    assert reboot(node) == "running"
    assert node.check_output(BOOTED) != before
    assert node.check_output("pct status 129") == "status: running"
    assert len(node.check_output("ls /dev/nvidia[0-7]").split()) == 8
    assert len(guest.check_output(SMI).splitlines()) == 8


def test_a_guest_that_is_restarted_has_its_cards_again(node, guest):
    before = guest.check_output(BOOTED)
    subprocess.run([LAB, "reboot", "129"], cwd=ROOT, check=True, timeout=120)
    assert guest.check_output(BOOTED) != before
    assert len(guest.check_output(SMI).splitlines()) == 8


def test_a_boot_without_uvm_leaves_the_guest_down_and_says_why(node, fault):
    with fault("uvm_missing"):
        assert reboot(node) == "degraded"
        assert node.run("test -e /dev/nvidia-uvm").rc == 1
        assert node.check_output("pct status 129") == "status: stopped"
        assert re.search(
            r"CT 129: Device /dev/nvidia-uvm\S* does not exist", node.check_output("journalctl -b -u pve-guests")
        )
    # What a person does then: the nodes are there again, and the guests can start.
    node.check_output("systemctl restart pve-guests")
    assert node.check_output("pct status 129") == "status: running"
    assert settled(node) == "running"


def test_a_boot_with_other_majors_takes_nothing_from_a_guest_with_dev_entries(node, guest, fault):
    before = uvm(node)
    assert uvm(guest) == before
    with fault("uvm_moved"):
        assert reboot(node) == "running"
        assert uvm(node) == uvm(guest) != before
        guest.check_output("head -c0 /dev/nvidia-uvm")
    assert reboot(node) == "running"
    assert uvm(node) == uvm(guest) == before


def test_a_failure_stays_over_a_boot_and_hinders_none(node, guest, fault):
    with fault("off_the_bus"):
        assert reboot(node) == "running"
        assert node.check_output("pct status 129") == "status: running"
        assert guest.run(SMI).rc == 15
    assert len(guest.check_output(SMI).splitlines()) == 8


# -- the switchboard from the controller ---------------------------------------------------------------------------


def test_a_switch_is_thrown_by_a_playbook(play, node):
    thrown = play(playbook=FAULT, fault="no_devices", state="on")
    try:
        assert thrown.ok
        assert [name for name, _host in thrown.changed] == ["Throw the switch"]
        assert node.run(SMI).rc == 6
        again = play(playbook=FAULT, fault="no_devices", state="on")
        assert again.ok and again.changed == []
    finally:
        assert play(playbook=FAULT, fault="no_devices", state="off").ok
    assert node.run(SMI).rc == 0


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({}, "Say which failure and what to do with it: -e fault=NAME -e state=on (or off)."),
        ({"fault": "smi_hang", "state": "perhaps"}, "Say which failure and what to do with it"),
        ({"fault": "smi_hangs", "state": "on"}, "There is no fault smi_hangs; there are: smi_hang, no_devices, "),
    ],
)
def test_a_wrong_switch_is_answered_with_the_right_ones(play, node, variables, sentence):
    played = play(playbook=FAULT, **variables)
    assert not played.ok
    assert sentence in played.said
    assert node.check_output(f"{SWITCH} all off") == "already off: all"


def test_a_node_that_no_lab_made_is_refused():
    command = ["ansible-playbook", "-i", "inventory/example-8x-rtx-pro-6000", str(FAULT)]
    done = subprocess.run(
        [*command, "-e", "fault=no_devices", "-e", "state=on"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode != 0
    assert "is no node of a lab: this inventory has no lab_hosts." in " ".join(done.stdout.split())


# -- what people change by hand ------------------------------------------------------------------------------------


def written(played) -> list[tuple[str, str]]:
    """What changed, but for the handler that has it read by what runs."""
    return [one for one in played.changed if not one[0].startswith("Reload")]


def test_what_is_edited_by_hand_is_found_and_alone_repaired(play, node, lab):
    """A double, a unit of the node and a rule of the firewall, and nothing else."""
    double = Path(lab["dir"]) / "doubles/bin/simserver"
    unit = "/etc/systemd/system/pve-guests.service"

    def present() -> tuple[str, str, list[str]]:
        saved = subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
        rules = sorted(line for line in saved.splitlines() if f"servelab-{lab['id']}" in line)
        return double.read_text(), node.check_output(f"sha256sum {unit}"), rules

    right = present()
    double.write_text(right[0] + "# by hand\n")
    node.check_output(f"sed -i 's/^TimeoutStartSec=.*/TimeoutStartSec=1/' {unit}")
    lost = next(rule for rule in right[2] if "MASQUERADE" in rule)
    subprocess.run(["iptables", "-t", "nat", "-D", *shlex.split(lost)[1:]], check=True)
    edited = present()
    assert all(old != new for old, new in zip(right, edited, strict=True))

    repairs = [
        ("Give the lab its bridge and its way out", "localhost"),
        ("Lay out the doubles, and set what the simulated server plays", "localhost"),
        ("Write the node's name, network and units, and let the controller's key in", "localhost"),
    ]
    checked = play("--check", "--diff", playbook=UP)
    assert written(checked) == repairs
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert "TimeoutStartSec=1" in old - new and "TimeoutStartSec=infinity" in new - old
    assert present() == edited
    assert written(play(playbook=UP)) == repairs
    assert present() == right
    assert play(playbook=UP).changed == []


# -- another lab, in which most is different -----------------------------------------------------------------------


@pytest.fixture(scope="module")
def other() -> Path:
    """The directory of the other lab."""
    return Path(told("localhost", "lab_node_state_dir ~ '/' ~ lab_node_id", "-e", f"@{OTHER}")["localhost"])


def inside(directory: Path, command: str) -> str:
    """Run it on the other lab's node."""
    name = f"servelab-{directory.name}-other1"
    words = ["lxc-attach", "-P", str(directory), "-n", name, "--clear-env", "--", "sh", "-c", command]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def test_the_other_node_is_as_described(other):
    assert inside(other, "hostname; . /etc/os-release; echo $VERSION_CODENAME").split() == ["other1", "bookworm"]
    assert inside(other, "ip -br -4 addr show vmbr0").split()[-1].split("/")[0].endswith(".21")
    assert inside(other, "ls /var/lib/vz/template/cache").split() == ["other-12.tar.zst"]
    assert inside(other, "command -v tree") == "/usr/bin/tree"
    assert inside(other, "systemctl is-system-running --wait") == "running"
    # No other node's cards.
    assert inside(other, "nvidia-smi -L").count("UUID: GPU-") == 8


def test_the_other_machines_reach_the_world_as_described(other):
    assert "nameserver 192.0.2.53" in inside(other, "cat /etc/resolv.conf").splitlines()
    assert "timeout = 33" in inside(other, "cat /etc/pip.conf").splitlines()
    assert "no_proxy=192.0.2.7" in inside(other, "cat /etc/environment").splitlines()
    ours = "openssl crl2pkcs7 -nocrl -certfile /etc/ssl/certs/ca-certificates.crt | openssl pkcs7 -print_certs -noout"
    assert "Servelab test authority" in inside(other, ours)
    guest = inside(other, "tar --zstd -tf /var/lib/vz/template/cache/other-12.tar.zst").splitlines()
    assert "./usr/bin/jq" in guest and "./usr/local/share/ca-certificates/servelab-lab-1.crt" in guest


def test_the_other_simulated_server_is_as_described(other):
    assert json.loads((other / "doubles/server.json").read_text()) == {
        "profile": "crossing",
        "time_scale": 2.5,
        "sglang_package": "/srv/other/sglang",
        "load_seconds": 7,
        "survivors": True,
        "faults": ["garbage_output"],
        "answers": {"What is the answer": "42"},
    }


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"lab_node_needed_gib": 999999}, "999999"),
        ({"lab_node_profile": "tale"}, "value of lab_node_profile must be one of: story, crossing, got: tale"),
        ({"lab_node_server_extra": {"fault": ["x"]}}, "fault"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_changes(play, variables, sentence):
    played = play(playbook=UP, **variables)
    assert not played.ok
    assert sentence in played.said
    assert played.changed == []
