"""Why something stays, in words that a person can act on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servelab.shared.gpu_stuck import memory_errors, respawned, stuck, xids, zombies

STAT = "{pid} (a) b) {state} {ppid} " + "0 " * 15 + "{threads} 0 100 0\n"


def make(proc: Path, pid: int, states: dict[int, tuple[str, str]], ppid: int = 1, name: str = "python3") -> None:
    """A process whose threads are {tid: (state, wchan)}; the first is the process's own state."""
    first = next(iter(states.values()))[0]
    base = proc / str(pid)
    for tid, (state, wchan) in states.items():
        task = base / "task" / str(tid)
        task.mkdir(parents=True)
        (task / "stat").write_text(STAT.format(pid=tid, state=state, ppid=ppid, threads=len(states)))
        (task / "wchan").write_text(wchan)
    (base / "stat").write_text(STAT.format(pid=pid, state=first, ppid=ppid, threads=len(states)))
    (base / "comm").write_text(f"{name}\n")


def test_a_thread_that_waits_in_the_driver_is_named_with_the_place(tmp_path):
    make(tmp_path, 10, {10: ("S", "futex_wait"), 11: ("D", "uvm_va_space_destroy"), 12: ("D", "0")})
    said = stuck(10, str(tmp_path))
    assert said.startswith(
        "state D: 2 of its 3 thread(s) wait in the kernel (uvm_va_space_destroy) and cannot be killed"
    )
    assert "Xid" in said and "reboot of the node" in said


def test_a_dead_one_that_nobody_collects_names_the_parent(tmp_path):
    make(tmp_path, 10, {10: ("Z", "0")}, ppid=7)
    make(tmp_path, 7, {7: ("S", "do_wait")}, name="bash")
    assert stuck(10, str(tmp_path)) == (
        "it is dead and holds nothing, but its parent PID 7 (bash) does not collect it: stop the parent"
    )
    assert zombies(str(tmp_path)) == [{"pid": 10, "name": "python3", "ppid": 7, "parent": "bash"}]


def test_a_first_thread_that_is_dead_is_not_the_whole_process(tmp_path):
    make(tmp_path, 10, {10: ("Z", "0"), 11: ("R", "0")})
    assert stuck(10, str(tmp_path)) == "its first thread is dead and 1 other(s) still end"
    assert zombies(str(tmp_path)) == []


@pytest.mark.parametrize("state", ["T", "t"])
def test_one_under_a_debugger(tmp_path, state):
    make(tmp_path, 10, {10: (state, "0")})
    assert "debugger" in stuck(10, str(tmp_path))


def test_a_real_zombie_is_found_with_its_real_parent():
    parent = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import os, time\nif os.fork() == 0: os._exit(0)\nprint('made', flush=True)\ntime.sleep(60)",
        ],
        stdout=subprocess.PIPE,
    )
    try:
        assert parent.stdout is not None and parent.stdout.readline() == b"made\n"
        deadline = time.monotonic() + 10
        while not (mine := [one for one in zombies(limit=10000) if one["ppid"] == parent.pid]):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert f"its parent PID {parent.pid} (" in stuck(mine[0]["pid"])
    finally:
        os.kill(parent.pid, signal.SIGKILL)
        parent.wait()


LOG = """\
[    4.1] NVRM: loading NVIDIA UNIX Open Kernel Module for x86_64  580.95.05
[ 1042.5] NVRM: Xid (PCI:0000:c1:00): 31, pid=4127, name=python3, Ch 00000010, intr 00000000. MMU Fault
[ 2042.5] NVRM: Xid (PCI:0000:C1:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.
[ 2043.0] NVRM: GPU 0000:c1:00.0: GPU has fallen off the bus.
[ 2050.0] NVRM: Xid (PCI:0000:41:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)
"""


def test_xids_are_read_from_the_kernels_log():
    found = xids(LOG)
    assert [(one["bus_id"], one["code"]) for one in found] == [
        ("0000:c1:00", 31),
        ("0000:c1:00", 79),
        ("0000:41:00", 154),
    ]
    assert found[1]["cause"] == "Xid 79: the GPU has fallen off the bus" and "reboot of the node" in found[1]["remedy"]
    assert found[2]["text"].startswith("GPU recovery action changed")
    assert xids("") == [] and len(xids(LOG * 10)) == 10


def test_memory_errors_are_those_that_a_card_can_tell():
    table = """\
00000000:01:00.0, 0, No, No
00000000:41:00.0, [N/A], [N/A], [N/A]
00000000:81:00.0, 3, No, No
00000000:C1:00.0, 0, Yes, No
00000000:E1:00.0, 0, Yes, Yes
Field "remapped_rows.pending" is not a valid field to query.
"""
    found = [(one["bus_id"][9:11], one["cause"]) for one in memory_errors(table)]
    assert found == [
        ("81", "3 uncorrected memory (ECC) error(s) since the driver was loaded"),
        ("c1", "a memory row waits to be remapped"),
        ("e1", "a memory row could not be remapped"),
    ]


def holder(pid: int, command: str, unit: str | None = None, parent: tuple[int, str] = (1, "systemd")) -> dict:
    return {"pid": pid, "command": command, "unit": unit, "parent": {"pid": parent[0], "name": parent[1]}}


def test_what_is_started_again_names_who_does_it():
    released = [
        {"pid": 10, "command": "ollama runner", "outcome": "killed"},
        {"pid": 11, "command": "python3 train.py", "outcome": "exited"},
        {"pid": 12, "command": "python3 other.py", "outcome": "refused"},
    ]
    there = [
        holder(20, "ollama runner", "ollama.service"),
        holder(21, "python3 train.py", "session-3.scope", (7, "supervisord")),
        holder(22, "python3 other.py"),
        holder(23, "python3 new.py"),
    ]
    assert respawned(there, released) == [
        "PID 20 is PID 10, which was released, started again: `systemctl stop ollama.service` first",
        "PID 21 is PID 11, which was released, started again: stop its parent, PID 7 (supervisord) first",
    ]
    assert respawned([holder(10, "ollama runner")], released) == []
