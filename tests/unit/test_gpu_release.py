"""Real processes on real nodes: the targets go, everybody else lives."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from conftest import NODES

from servelab.shared.gpu_holders import ancestors, scan
from servelab.shared.gpu_release import release
from servelab.shared.gpu_stuck import respawned

needs_fuser = pytest.mark.skipif(not shutil.which("fuser"), reason="psmisc is not installed")
# Ignores SIGTERM, as a scheduler that hangs in a kernel does. It says when it is deaf.
# One process that stays one: a shell that waits in `sleep` would have a new child, and so a new holder, every second.
DEAF = [
    sys.executable,
    "-c",
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)",
]


def holders(gpu_dir) -> list[dict]:
    # Only our own children, whatever the scan says: these tests kill.
    seen = scan(str(gpu_dir), view="guest")["holders"]
    return [holder for holder in seen if os.getpid() in ancestors(holder["pid"])]


def outcomes(result: dict) -> dict[int, str]:
    return {row["pid"]: row["outcome"] for row in result["results"]}


def nodes(gpu_dir) -> list[str]:
    return [str(gpu_dir / name) for name in NODES.values()]


def deaf(hold, *names):
    process = hold(*names, argv=DEAF, stdout=subprocess.PIPE)
    assert process.stdout.readline() == b"deaf\n"
    return process


def test_term_first_then_kill_and_the_bystander_lives(gpu_dir, hold):
    polite, stubborn, bystander = hold(0), deaf(hold, 1), hold("/dev/full")
    result = release(holders(gpu_dir), grace=0.5)
    assert outcomes(result)[polite.pid] == "exited"
    assert outcomes(result)[stubborn.pid] == "killed"
    assert polite.wait(1) == -15 and stubborn.wait(1) == -9
    assert bystander.poll() is None and bystander.pid not in outcomes(result)


@needs_fuser
@pytest.mark.parametrize("deaf_one", [False, True])
def test_where_everybody_may_go_fuser_sweeps(gpu_dir, hold, deaf_one):
    first = hold(0)
    second = deaf(hold, 1) if deaf_one else hold(1)
    bystander = hold("/dev/full")
    result = release(holders(gpu_dir), grace=0.5, nodes=nodes(gpu_dir))
    assert result["notes"][0].startswith("fuser -k -TERM: ") and str(first.pid) in result["notes"][0]
    assert first.wait(1) == -15 and second.wait(1) == (-9 if deaf_one else -15)
    assert bystander.poll() is None
    assert set(outcomes(result).values()) <= {"exited", "killed", "gone before"}


@needs_fuser
def test_one_stranger_on_the_nodes_and_fuser_is_not_used(gpu_dir, hold):
    target = hold(0)
    listed = holders(gpu_dir)
    stranger = hold(0)  # came after the scan: fuser would kill it as well
    result = release(listed, grace=2, nodes=nodes(gpu_dir))
    assert outcomes(result) == {target.pid: "exited"}
    assert f"fuser not used (PID {stranger.pid}" in result["notes"][0]
    assert stranger.poll() is None


def test_a_reused_pid_is_left_alone(gpu_dir, hold):
    process = hold(0)
    (listed,) = holders(gpu_dir)
    result = release([listed | {"start_time": listed["start_time"] - 1}], grace=0.2)
    assert outcomes(result) == {process.pid: "gone before"} and result["signalled"] == 0
    assert process.poll() is None


def test_one_that_exits_between_scan_and_signal_is_gone(gpu_dir, hold):
    process = hold(0)
    listed = holders(gpu_dir)
    process.kill()
    process.wait()
    assert outcomes(release(listed, grace=0.2)) == {process.pid: "gone before"}


@pytest.mark.parametrize(
    "limits", [{"vmid": 129}, {"cgroup_prefixes": ["/system.slice/servelab-"]}, {"cgroup_prefixes": ["/lxc/129"]}]
)
def test_outside_the_allowed_cgroups_nobody_is_signalled(gpu_dir, hold, limits):
    process = hold(0)
    result = release(holders(gpu_dir), grace=0.2, **limits)
    assert outcomes(result) == {process.pid: "refused"} and "its cgroup" in result["results"][0]["detail"]
    assert process.poll() is None


def test_the_protected_and_this_connection_are_refused(gpu_dir, hold):
    process = hold(0)
    with (gpu_dir / NODES[1]).open("rb"):
        own = next(holder for holder in holders(gpu_dir) if holder["pid"] == os.getpid())
        (listed,) = [holder for holder in holders(gpu_dir) if holder["pid"] == process.pid]
    result = release([own | {"protected": None}, listed | {"protected": "on the protect list: x"}], grace=0.2)
    assert set(outcomes(result).values()) == {"refused"} and process.poll() is None


# In a PID namespace of its own a PID can be had again: the kernel is told which one it gave last.
REUSE = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
from servelab.shared.gpu_holders import start_time
from servelab.shared.gpu_release import release
from servelab.shared.gpu_stuck import respawned
import subprocess, time
first = subprocess.Popen(["sleep", "60"])
listed = {"pid": first.pid, "start_time": start_time(first.pid), "protected": None, "command": "sleep"}
first.kill()
first.wait()
time.sleep(0.05)  # another clock tick
with open("/proc/sys/kernel/ns_last_pid", "w") as file:
    file.write(str(first.pid - 1))
second = subprocess.Popen(["sleep", "60"])
assert second.pid == first.pid, (second.pid, first.pid)
(row,) = release([listed], grace=0.2)["results"]
assert row["outcome"] == "gone before" and row["detail"] == "its PID belongs to another process now", row
assert second.poll() is None
second.kill()
print("left alone")
"""


def test_a_pid_that_really_was_reused_is_left_alone():
    command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable, "-c", REUSE, "src"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path(__file__).parents[2])
    if "unshare failed" in done.stderr or "ns_last_pid" in done.stderr:
        pytest.skip(f"no PID namespace can be had here: {done.stderr.strip().splitlines()[-1]}")
    assert done.stdout == "left alone\n", done.stderr


def sleeper(gpu_dir, other_than=0):
    """The holder that sleeps. Between fork and exec a shell's child is still called as the shell."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for holder in holders(gpu_dir):
            if holder["command"] == "sleep 60" and holder["pid"] != other_than:
                return holder
        time.sleep(0.02)
    raise AssertionError(holders(gpu_dir))


def test_one_that_starts_itself_again_is_not_chased(gpu_dir, hold):
    """Who was judged goes; who came after was not judged, and is found by the next look."""
    parent = hold(0, argv=["sh", "-c", "while :; do sleep 60 & wait $!; done"], start_new_session=True)
    try:
        child = sleeper(gpu_dir)
        result = release([child], grace=1)
        assert outcomes(result) == {child["pid"]: "exited"}
        new = sleeper(gpu_dir, other_than=child["pid"])
        assert new["parent"]["pid"] == parent.pid
    finally:
        os.killpg(parent.pid, 9)  # and whoever it started, who would outlive it
    assert respawned([new], result["results"]) == [
        f"PID {new['pid']} is PID {child['pid']}, which was released, started again: "
        f"stop its parent, PID {parent.pid} (sh) first"
    ]


def test_a_dry_run_signals_nobody(gpu_dir, hold):
    process = hold(0)
    result = release(holders(gpu_dir), grace=0.2, nodes=nodes(gpu_dir), dry_run=True)
    assert outcomes(result) == {process.pid: "would be released"}
    time.sleep(0.1)
    assert process.poll() is None
