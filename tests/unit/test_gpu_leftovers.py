"""What dead servers leave goes, and nothing that anybody living has. Real files, real processes."""

from __future__ import annotations

import mmap
import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servelab.shared.gpu_leftovers import find, listeners, remove, survivors
from servelab.shared.supervision import Systemd

# A PID that no machine gives: above the largest pid_max.
DEAD = 4194305


@pytest.fixture
def places(tmp_path: Path) -> dict[str, Path]:
    made = {name: tmp_path / name for name in ("shm", "tmp", "cache")}
    for path in made.values():
        path.mkdir()
    return made


def look(places: dict[str, Path], min_age: float = 0.0, **options) -> dict[str, str | None]:
    """File name → why it is kept. Root of this machine may be kept from its init: such a view removes nothing."""
    found = find(str(places["shm"]), str(places["tmp"]), [f"{places['cache']}/*/lock"], min_age=min_age, **options)
    return {Path(one.path).name: one.kept for one in found}


@pytest.fixture
def proc(tmp_path: Path) -> str:
    """This machine's /proc without processes that even root may not look at, which some test machines have."""
    made = tmp_path / "proc"
    made.mkdir()
    for pid in (entry for entry in os.listdir("/proc") if entry.isdigit()):  # noqa: PTH208
        try:
            Path("/proc", pid, "maps").read_bytes()
        except OSError:
            continue
        (made / pid).symlink_to(f"/proc/{pid}")
    return str(made)


# Names as a killed server left them, the PIDs made dead.
LEFT = [
    f"sgl_shm_mq_{DEAD}_d1d489dd",
    "sglang_loads_4762270f2913_eec1eb1d.shm",
    f"sem.loky-{DEAD}-2dkb3prs",
    f"torch_{DEAD}_1234567_0",
    "nccl-AbC123",
]
# Of others: Python's generic names, other programs, and near misses.
NOT_OURS = ["psm_1a2b3c4d", "sem.mp-abcdefgh", "pulse-shm-1", "sgl_shm_mq_x_d1", "nccl-AbC123.keep", "PostgreSQL.123"]


def test_what_a_killed_server_left_goes_and_the_rest_stays(places, proc):
    for name in LEFT + NOT_OURS:
        (places["shm"] / name).write_bytes(b"x" * 32)
    (places["shm"] / "nccl-direct").mkdir()
    assert look(places, proc=proc) == dict.fromkeys(LEFT)
    gone = remove(find(str(places["shm"]), str(places["tmp"]), [], proc=proc, min_age=0))
    assert sorted(Path(one.path).name for one in gone) == sorted(LEFT)
    assert {one.kind for one in gone} == {"shared memory"} and {one.bytes for one in gone} == {32}
    assert sorted(path.name for path in places["shm"].iterdir()) == sorted([*NOT_OURS, "nccl-direct"])


def test_what_is_mapped_or_open_stays(places):
    mapped, opened, linked = (places["shm"] / f"nccl-00000{n}" for n in range(3))
    for path in (mapped, opened, linked):
        path.write_bytes(b"x" * mmap.PAGESIZE)
    # Another name of the same inode, as another mount namespace may have it.
    other = places["cache"] / "other-name"
    os.link(linked, other)
    with mapped.open("r+b") as file:
        region = mmap.mmap(file.fileno(), 0)  # stays when the descriptor is closed
    with opened.open("rb"), other.open("rb"):
        assert look(places) == dict.fromkeys(["nccl-000000", "nccl-000001", "nccl-000002"], f"PID {os.getpid()} has it")
    region.close()


def test_a_living_pid_in_the_name_keeps_it(places):
    process = subprocess.Popen(["sleep", "60"])
    (places["shm"] / f"sgl_shm_mq_{process.pid}_aa").touch()
    assert look(places) == {f"sgl_shm_mq_{process.pid}_aa": f"PID {process.pid} lives"}
    process.kill()
    process.wait()


def test_what_is_new_stays_a_while(places, proc):
    (places["shm"] / "nccl-AbC123").touch()
    assert look(places, min_age=60, proc=proc) == {"nccl-AbC123": "it is younger than 60 s"}


def test_where_one_may_not_be_looked_at_nothing_goes(places, tmp_path):
    (places["shm"] / "nccl-AbC123").touch()
    proc = tmp_path / "made-up"
    (proc / "77").mkdir(parents=True)
    (proc / "77" / "fd").symlink_to("fd")  # ELOOP: an error that is not "gone"
    assert look(places, proc=str(proc)) == {"nccl-AbC123": "PID 77 could not be looked at"}


def test_a_socket_goes_when_nobody_listens(places, proc):
    listening, dead, message = (socket.socket(socket.AF_UNIX) for _ in range(3))
    listening.bind(str(places["tmp"] / "tmp7d02050j"))
    listening.listen()
    dead.bind(str(places["tmp"] / "tmpqiblnkjj"))
    dead.close()
    message.bind(str(places["tmp"] / "agent.sock"))
    message.close()
    (places["tmp"] / "tmp53ewocal").touch()  # an empty temporary file may be anybody's
    assert look(places, proc=proc) == {"tmp7d02050j": "somebody listens on it", "tmpqiblnkjj": None}
    listening.close()


def test_a_build_lock_goes_when_nobody_builds(places, proc):
    for name in ("stale", "building"):
        (places["cache"] / name).mkdir()
        (places["cache"] / name / "lock").touch()
    with (places["cache"] / "building" / "lock").open("rb"):
        found = find(str(places["shm"]), str(places["tmp"]), [f"{places['cache']}/*/lock"], proc=proc, min_age=0)
        kept = {Path(one.path).parent.name: one.kept for one in found}
    assert kept == {"building": f"PID {os.getpid()} has it", "stale": None}


def test_one_that_was_made_anew_since_is_left(places, proc):
    path = places["shm"] / "nccl-AbC123"
    path.touch()
    found = find(str(places["shm"]), str(places["tmp"]), [], proc=proc, min_age=0)
    new = places["shm"] / "new"
    new.touch()
    new.rename(path)
    assert remove(found) == [] and path.exists()


def test_who_listens_on_a_port_is_named():
    server = socket.socket()
    server.bind(("127.0.0.1", 0))
    port = server.getsockname()[1]
    assert listeners([port]) == []
    server.listen()
    (found,) = listeners([port, 1])
    assert found["pid"] == os.getpid() and found["port"] == port and "python" in found["command"]
    six = socket.socket(socket.AF_INET6)
    six.bind(("::1", 0))
    six.listen()
    assert [one["port"] for one in listeners([six.getsockname()[1]])] == [six.getsockname()[1]]
    six.close()
    server.close()


def make_process(proc: Path, pid: int, cgroup: str, state: str = "S", name: str = "python3") -> None:
    base = proc / str(pid)
    (base / "fd").mkdir(parents=True)
    (base / "status").write_text(f"Name:\t{name}\nState:\t{state} (x)\nPPid:\t1\nUid:\t0\t0\t0\t0\n")
    (base / "cgroup").write_text(f"0::{cgroup}\n")
    (base / "stat").write_text(f"{pid} (a) {state} 1 " + "0 " * 15 + f"1 0 {pid * 10} 0\n")
    (base / "cmdline").write_bytes(name.encode())


class Keeper(Systemd):
    """A supervisor by whom everything runs but these units."""

    def __init__(self, *stopped: str) -> None:
        super().__init__()
        self.stopped = stopped

    def show(self, unit: str) -> dict[str, str]:
        return {"ActiveState": "inactive" if unit in self.stopped else "active"}


def test_survivors_are_those_of_units_that_nobody_uses(tmp_path):
    ours, used = "/servelab.slice/servelab-left.service", "/servelab.slice/servelab-eagle3.service"
    make_process(tmp_path, 10, ours)
    make_process(tmp_path, 11, ours, state="Z")  # dead already
    make_process(tmp_path, 12, ours, name="nvidia-smi")  # on the list
    make_process(tmp_path, 13, used)
    make_process(tmp_path, 14, "/system.slice/ssh.service")
    make_process(tmp_path, 15, "/user.slice/user-0.slice/servelab.slice/servelab-left.service")
    owners = {"servelab-left.service": "stopped", "servelab-eagle3.service": "serve"}
    assert [one["pid"] for one in survivors(owners, str(tmp_path))] == [10]
    # Without a note the supervisor is asked.
    assert [one["pid"] for one in survivors({}, str(tmp_path), keeper=Keeper("servelab-left.service"))] == [10]
    assert survivors({}, str(tmp_path), keeper=Keeper()) == []
    assert [one["pid"] for one in survivors(owners, str(tmp_path), unprotect=["nvidia-smi"])] == [10, 12]


def test_a_process_that_dies_while_we_look_is_no_owner(places, proc):
    (places["shm"] / "nccl-AbC123").touch()
    short = [subprocess.Popen([sys.executable, "-c", "pass"]) for _ in range(5)]
    while any(process.poll() is None for process in short):
        assert look(places, proc=proc) == {"nccl-AbC123": None}
        time.sleep(0.01)


def test_a_guests_servers_are_no_survivors_of_the_node(tmp_path):
    """A run over a local connection on a machine that has containers: there the unit runs, here nobody knows it."""
    unit = "servelab.slice/servelab-eagle3.service"
    make_process(tmp_path, 10, f"/lxc.payload.129/{unit}")
    make_process(tmp_path, 11, f"/lxc.payload.lab-node/lxc.payload.129/ns/{unit}")
    make_process(tmp_path, 12, f"/lxc/130/ns/{unit}")
    make_process(tmp_path, 13, f"/{unit}")
    owners = {"servelab-eagle3.service": "bench"}
    assert [one["pid"] for one in survivors(owners, str(tmp_path))] == [13]
    assert [one["pid"] for one in survivors({}, str(tmp_path), keeper=Keeper("servelab-eagle3.service"))] == [13]
    # In a guest that has no control groups of its own, its own processes have its number, and a guest's within another.
    make_process(tmp_path, 14, f"/lxc/130/ns/lxc.payload.7/{unit}")
    (tmp_path / "self").symlink_to("12")
    assert [one["pid"] for one in survivors(owners, str(tmp_path))] == [12]
