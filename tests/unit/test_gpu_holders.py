"""Who holds a GPU: a made-up /proc for what this machine cannot show, real processes on real nodes for the rest."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import time
from pathlib import Path

import pytest
import yaml
from conftest import CARDS, NODES

from servelab.shared import gpu_holders
from servelab.shared.gpu_holders import (
    PROTECT,
    ancestors,
    cgroup_of,
    find_nodes,
    guest_of,
    nvidia_majors,
    scan,
    start_time,
    unit_of,
    unit_owners,
)
from servelab.shared.gpu_policy import plan

HERE = Path(__file__).parent
CASE = HERE / "cases" / "03-host-pids-in-container"
PROC_DEVICES = """\
Character devices:
  1 mem
195 nvidia
195 nvidia-modeset
195 nvidiactl
234 nvidia-caps
235 nvidia-caps-imex-channels
240 nvidiafb-legacy9
511 nvidia-uvm

Block devices:
195 nvidia
"""


def make_proc(proc: Path, pid: int, status: str, cgroup: str, fds: list[Path | str], state: str = "S") -> None:
    """One process of a made-up /proc. Its descriptors are links, so a stat of them reaches the real node."""
    base = proc / str(pid)
    (base / "fd").mkdir(parents=True)
    extra = "" if "PPid" in status else f"State:\t{state} (sleeping)\nPPid:\t1\nUid:\t1000\t1000\t1000\t1000\n"
    (base / "status").write_text(status + extra)
    (base / "cgroup").write_text(cgroup)
    (base / "stat").write_text(f"{pid} (a) name) {state} 1 " + "0 " * 15 + f"1 0 {pid * 10} 0\n")
    (base / "cmdline").write_bytes(b"python3\0-m\0sglang.launch_server\0--api-key\0sesame street\0--tp-size\x008")
    (base / "maps").write_text("")
    for number, target in enumerate(fds, 3):
        (base / "fd" / str(number)).symlink_to(target)


@pytest.fixture
def real_numbers(tmp_path: Path) -> tuple[Path, Path]:
    """(device directory, /proc) of a node with a real driver: nodes 195:N can be made without it, only not opened."""
    device_dir, proc = tmp_path / "realdev", tmp_path / "proc"
    device_dir.mkdir()
    proc.mkdir()
    (proc / "devices").write_text(PROC_DEVICES)
    try:
        for name, major, minor in (("nvidia0", 195, 0), ("nvidia1", 195, 1), ("nvidiactl", 195, 255)):
            os.mknod(device_dir / name, stat.S_IFCHR | 0o666, os.makedev(major, minor))
        os.mknod(device_dir / "nvidia-uvm", stat.S_IFCHR | 0o666, os.makedev(511, 0))
        (device_dir / "nvidia-caps").mkdir()
        os.mknod(device_dir / "nvidia-caps" / "nvidia-cap1", stat.S_IFCHR, os.makedev(234, 1))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    return device_dir, proc


def test_majors_are_those_of_the_driver_only():
    assert nvidia_majors(PROC_DEVICES) == {
        195: "nvidia",
        234: "nvidia-caps",
        235: "nvidia-caps-imex-channels",
        511: "nvidia-uvm",
    }


@pytest.mark.parametrize(
    ("cgroup", "guest", "unit"),
    [
        ("/lxc/129/ns/user.slice", 129, None),
        ("/lxc/131/ns/system.slice/llama.service", 131, "llama.service"),
        ("/lxc/129", 129, None),
        ("/lxc.payload.129/system.slice/servelab-baseline.service", 129, "servelab-baseline.service"),
        ("/lxc.monitor.129", None, None),
        ("/lxc/129abc/ns", None, None),
        ("/lxc.payload.node/system.slice/x.service", None, "x.service"),
        ("/system.slice/servelab-eagle3.service", None, "servelab-eagle3.service"),
        # A user's unit cannot pass for one of the system's.
        (
            "/user.slice/user-1000.slice/user@1000.service/app.slice/servelab-baseline.service",
            None,
            "user@1000.service",
        ),
        ("/user.slice/user-0.slice/session-3.scope", None, "session-3.scope"),
    ],
)
def test_guest_and_unit_come_from_the_cgroup_path(cgroup, guest, unit):
    assert guest_of(cgroup) == guest
    assert unit_of(cgroup) == unit


def test_the_telling_cgroup_line_wins():
    assert cgroup_of("0::/lxc/129/ns\n") == "/lxc/129/ns"
    assert cgroup_of("12:devices:/x\n1:name=systemd:/system.slice/a.service\n0::/\n") == "/system.slice/a.service"
    assert cgroup_of("1:name=systemd:/old\n0::/system.slice/a.service\n") == "/system.slice/a.service"


def test_node_pids_are_mapped_to_guests_and_their_own_pids(real_numbers):
    device_dir, proc = real_numbers
    for pid in (4127, 4128, 4555):
        make_proc(
            proc,
            pid,
            (CASE / f"host_proc_{pid}_status.txt").read_text(),
            (CASE / f"host_proc_{pid}_cgroup.txt").read_text(),
            [device_dir / ("nvidia0" if pid == 4127 else "nvidia1")],
        )
    seen = scan(str(device_dir), str(proc), "node")
    expected = json.loads((CASE / "expected.json").read_text())["from_host"]
    ours = {str(h["pid"]): h["ns_pid"] for h in seen["holders"] if h["vmid"] == 129}
    assert ours == expected["ct129"]
    assert {str(h["pid"]): f"lxc/{h['vmid']}" for h in seen["holders"] if h["vmid"] != 129} == expected["foreign"]
    assert [h["gpus"] for h in seen["holders"]] == [[0], [1], [1]]
    assert seen["complete"] and seen["view"] == "node" and not seen["partial"]
    assert seen["gpus"] == [0, 1]


def test_a_node_pid_means_nothing_in_the_guest_and_the_neighbour_is_named(real_numbers, tmp_path):
    """Case 03 as a whole: 4127 is a holder on the node and the guest's own sshd inside."""
    device_dir, node_proc = real_numbers
    guest_proc = tmp_path / "guest-proc"
    guest_proc.mkdir()
    (guest_proc / "devices").write_text(PROC_DEVICES)
    held = {4127: "nvidia0", 4128: "nvidia1", 4555: "nvidia1"}
    for pid, node in held.items():
        status, cgroup = ((CASE / f"host_proc_{pid}_{what}.txt").read_text() for what in ("status", "cgroup"))
        make_proc(node_proc, pid, status, cgroup, [device_dir / node])
    # The same processes by their PIDs inside; a process started at one moment, whoever looks.
    for pid, node in ((1502, "nvidia0"), (1503, "nvidia1")):
        make_proc(guest_proc, pid, "Name:\tsglang::schedul\n", "0::/user.slice\n", [device_dir / node])
        twin = node_proc / str(pid + 2625) / "stat"
        twin.write_text((guest_proc / str(pid) / "stat").read_text())
    make_proc(guest_proc, 4127, "Name:\tsshd\n", "0::/system.slice/ssh.service\n", ["socket:[1]"])
    guest, node = scan(str(device_dir), str(guest_proc), "guest"), scan(str(device_dir), str(node_proc), "node")
    assert [holder["pid"] for holder in guest["holders"]] == [1502, 1503]
    decided = plan(guest, node, 129, force=True)
    assert [(holder["pid"], holder["node_pid"]) for holder in decided["release"]] == [(1502, 4127), (1503, 4128)]
    assert decided["release_on_node"] == []
    (neighbour,) = decided["refuse"]
    assert neighbour["node_pid"] == 4555 and neighbour["gpus"] == [1] and "guest 131" in neighbour["action"]


def test_by_real_numbers_another_inode_and_another_name_are_holders_too(real_numbers, tmp_path):
    device_dir, proc = real_numbers
    inside = tmp_path / "guest-dev"
    inside.mkdir()
    os.mknod(inside / "renamed", stat.S_IFCHR, os.makedev(195, 1))
    os.mknod(inside / "not-on-the-node", stat.S_IFCHR, os.makedev(195, 5))
    os.mknod(inside / "nvidia0", stat.S_IFCHR, os.makedev(1, 7))
    make_proc(proc, 10, "Name:\ta\n", "0::/\n", [inside / "renamed", "socket:[1]", "/memfd:x (deleted)"])
    make_proc(proc, 11, "Name:\tb\n", "0::/\n", [inside / "not-on-the-node", device_dir / "nvidia-caps/nvidia-cap1"])
    make_proc(proc, 12, "Name:\tfull\n", "0::/\n", [inside / "nvidia0", "/dev/full", tmp_path])
    holders = {holder["pid"]: holder for holder in scan(str(device_dir), str(proc), "node")["holders"]}
    assert holders.keys() == {10, 11}
    assert holders[10]["devices"] == ["nvidia1"]
    assert holders[11]["devices"] == ["nvidia-cap1", "nvidia5"] and holders[11]["gpus"] == [5]


def test_secrets_on_the_command_line_are_not_shown(real_numbers):
    device_dir, proc = real_numbers
    make_proc(proc, 10, "Name:\ta\n", "0::/\n", [device_dir / "nvidia0"])
    (holder,) = scan(str(device_dir), str(proc), "node")["holders"]
    assert "sesame" not in str(holder) and "street" not in str(holder)
    assert holder["command"].startswith("python3 -m sglang.launch_server --api-key")
    assert holder["command"].endswith("--tp-size 8")


def test_a_process_whose_first_thread_died_still_holds(real_numbers):
    device_dir, proc = real_numbers
    make_proc(proc, 10, "Name:\ta\n", "0::/\n", [], state="Z")
    (proc / "10" / "stat").write_text("10 (a) Z 1 " + "0 " * 15 + "2 0 100 0\n")
    (proc / "10" / "task" / "11" / "fd").mkdir(parents=True)
    (proc / "10" / "task" / "11" / "fd" / "3").symlink_to(device_dir / "nvidia1")
    (holder,) = scan(str(device_dir), str(proc), "node")["holders"]
    assert holder["gpus"] == [1] and holder["state"] == "Z"


def test_a_mapping_counts_when_the_descriptor_is_closed(real_numbers):
    device_dir, proc = real_numbers
    make_proc(proc, 10, "Name:\ta\n", "0::/\n", [])
    make_proc(proc, 11, "Name:\tb\n", "0::/\n", [])
    (proc / "10" / "maps").write_text(
        "7f00-7f10 rw-s 00000000 00:05 99 /dev/nvidia1\n7f20-7f30 r-xp 00000000 08:01 7 /x\n"
    )
    (proc / "11" / "maps").write_text("7f00-7f10 r-xp 00000000 08:01 7 /usr/lib/libnvidia-ml.so.1\n")
    make_proc(proc, 12, "Name:\tc\n", "0::/\n", [])
    (proc / "12" / "maps").write_text("7f00-7f10 rw-s 00000000 00:05 98 /dev/nvidia0 (deleted)\n")
    holders = scan(str(device_dir), str(proc), "node")["holders"]
    assert [(holder["pid"], holder["gpus"]) for holder in holders] == [(10, [1]), (12, [0])]


def test_a_regular_file_under_a_nodes_name_is_no_device(gpu_dir):
    (gpu_dir / "nvidia-uvm-tools").touch()
    nodes = find_nodes(str(gpu_dir))
    assert nodes.not_devices == [str(gpu_dir / "nvidia-uvm-tools")]
    assert str(gpu_dir / "nvidia-uvm-tools") not in nodes.paths and nodes.gpus == CARDS


def holders_by_pid(gpu_dir: Path, **options) -> dict[int, dict]:
    return {holder["pid"]: holder for holder in scan(str(gpu_dir), view="guest", **options)["holders"]}


def test_real_holders_are_found_and_the_innocent_are_not(gpu_dir, hold, tmp_path):
    first = hold(0, "ctl")
    both = hold(0, 1)
    innocent = hold("/dev/full")  # the same number under a foreign name
    bystander = subprocess.Popen(["sleep", "60"])
    try:
        found = holders_by_pid(gpu_dir)
        assert found.keys() == {first.pid, both.pid}, (innocent.pid, bystander.pid)
        assert found[first.pid]["gpus"] == CARDS[:1] and found[first.pid]["devices"] == [NODES[0], NODES["ctl"]]
        assert found[both.pid]["gpus"] == CARDS
        assert found[both.pid]["ppid"] == os.getpid() and found[both.pid]["user"] == "root"
        assert found[both.pid]["start_time"] == start_time(both.pid)
        assert found[both.pid]["command"] == "sleep 60" and found[both.pid]["state"] == "S"
        since = time.strptime(found[both.pid]["since"], "%Y-%m-%dT%H:%M:%SZ")
        assert abs(time.mktime(since) - time.timezone - time.time()) < 60
    finally:
        bystander.kill()
        bystander.wait()


def test_a_deleted_node_and_a_bind_like_second_name_are_still_held(gpu_dir, hold):
    hidden = gpu_dir.parent / "elsewhere"
    os.link(gpu_dir / NODES[1], hidden)  # the same inode under another name, as a bind mount has it
    linked, deleted = hold(str(hidden)), hold(0)
    (gpu_dir / NODES[0]).unlink()
    os.mknod(gpu_dir / NODES[0], stat.S_IFCHR | 0o666, os.makedev(1, 7))
    found = holders_by_pid(gpu_dir)
    assert found[linked.pid]["devices"] == [NODES[1]]
    assert found[deleted.pid]["devices"] == [NODES[0]]


def test_a_grandchild_of_a_double_fork_is_a_holder(gpu_dir, hold):
    parent = hold(0, argv=["sh", "-c", "sleep 60 & echo $!"], stdout=subprocess.PIPE)
    orphan = int(parent.stdout.readline())
    parent.wait(5)
    try:
        assert holders_by_pid(gpu_dir).keys() == {orphan}
    finally:
        os.kill(orphan, 9)


def test_names_on_the_list_and_this_connection_are_protected(gpu_dir, hold, tmp_path):
    exporter = tmp_path / "dcgm-exporter"
    exporter.write_text("#!/bin/sh\nwhile :; do sleep 1; done\n")
    exporter.chmod(0o755)
    listed, ordinary = hold(0, argv=[str(exporter)]), hold(0)
    time.sleep(0.2)  # until it has become the exporter
    with (gpu_dir / NODES[1]).open("rb"):
        found = holders_by_pid(gpu_dir)
        assert found[os.getpid()]["protected"] == "part of this connection"
    assert found[listed.pid]["protected"] == "on the protect list: dcgm-exporter"
    assert found[ordinary.pid]["protected"] is None
    assert holders_by_pid(gpu_dir, unprotect=["dcgm-*"])[listed.pid]["protected"] is None
    assert holders_by_pid(gpu_dir, protect=["sleep"])[ordinary.pid]["protected"] == "on the protect list: sleep"


def test_what_may_not_be_looked_at_makes_the_view_incomplete(gpu_dir, hold):
    process = hold(0)
    gpu_dir.parent.chmod(0o755)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        # As another user: root's processes cannot be read, so nobody can say that they hold nothing.
        os.setgid(65534)
        os.setuid(65534)
        seen = scan(str(gpu_dir))
        os.write(
            writing,
            json.dumps([seen["complete"], {"pid": process.pid, "name": "sleep"} in seen["unreadable"]]).encode(),
        )
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(reading, 1000)) == [False, True]
    os.close(reading)
    os.close(writing)


def test_not_seeing_one_that_may_hold_loses_nothing(gpu_dir, hold):
    """As an init with more rights than root, which root may not look at."""
    process = hold(0)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.setgid(65534)
        os.setuid(65534)
        for options in ({"protect": ["sleep"]}, {"protect": ["sleep"], "unprotect": ["sl*"]}):
            unseen = {one["pid"] for one in scan(str(gpu_dir), **options)["unreadable"]}
            os.write(writing, b"1" if process.pid in unseen else b"0")
        os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reading, 10) == b"01"
    os.close(reading)
    os.close(writing)


def test_ancestors_are_our_own_line():
    line = ancestors(os.getpid())
    assert os.getpid() in line and os.getppid() in line and 1 not in line


def test_owners_of_units(tmp_path):
    (tmp_path / "baseline.owner").write_text("bench\n")
    (tmp_path / "eagle3_pcie_ipc.owner").write_text("serve")
    assert unit_owners(str(tmp_path)) == {
        "servelab-baseline.service": "bench",
        "servelab-eagle3_pcie_ipc.service": "serve",
    }
    assert unit_owners(str(tmp_path / "nowhere")) == {}


@pytest.mark.parametrize(
    ("systemd_says", "owner"),
    [("inactive", "stopped"), ("failed", "stopped"), ("active", None), ("activating", None)],
)
def test_what_survives_a_unit_that_is_not_running_is_told(tmp_path, monkeypatch, systemd_says, owner):
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho LoadState=loaded\necho ActiveState={systemd_says}\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    (tmp_path / "eagle3.owner").write_text("serve\n")
    units = ["servelab-baseline.service", "servelab-eagle3.service", "ollama.service", None]
    owners = unit_owners(str(tmp_path), [{"unit": unit} for unit in units])
    assert owners.pop("servelab-eagle3.service") == "serve"
    assert owners == ({"servelab-baseline.service": owner} if owner else {})


def test_where_systemd_cannot_be_asked_a_unit_counts_as_running(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert unit_owners(str(tmp_path), [{"unit": "servelab-baseline.service"}]) == {}


def test_the_role_lists_the_same_names_as_the_module():
    defaults = yaml.safe_load((HERE.parents[1] / "roles/gpu_clean/defaults/main.yml").read_text())
    assert tuple(defaults["gpu_clean_protect"]) == PROTECT


def test_a_scan_of_thousands_of_descriptors_takes_no_time(real_numbers):
    # 0.03 s where this was written; the limit leaves room for a busy machine and still catches a quadratic scan.
    device_dir, proc = real_numbers
    for pid in range(100, 170):
        make_proc(proc, pid, "Name:\tx\n", "0::/\n", ["socket:[1]"] * 90 + ["/usr/bin/env"] * 10)
    started = time.perf_counter()
    assert scan(str(device_dir), str(proc), "node")["holders"] == []
    assert time.perf_counter() - started < 0.5


def test_many_processes_are_shared_out_and_nobody_is_lost(real_numbers, monkeypatch):
    device_dir, proc = real_numbers
    for pid in range(100, 140):
        make_proc(proc, pid, "Name:\tx\n", "0::/\n", [device_dir / "nvidia1"] if pid % 7 == 0 else ["socket:[1]"])
    (proc / "120" / "fd").rename(proc / "120" / "was")
    (proc / "120" / "fd").symlink_to("fd")  # ELOOP: may not be looked at
    monkeypatch.setattr(gpu_holders, "SHARE", 4)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(5)))
    here, look = os.getpid(), gpu_holders._look_at
    # A worker that cannot answer: whoever started it looks itself.
    broken = lambda *given: look(*given) if os.getpid() == here else os._exit(9)  # noqa: E731
    for how in (look, broken):
        monkeypatch.setattr(gpu_holders, "_look_at", how)
        seen = scan(str(device_dir), str(proc), "node")
        assert [holder["pid"] for holder in seen["holders"]] == [105, 112, 119, 126, 133]
        assert [one["pid"] for one in seen["unreadable"]] == [120]
