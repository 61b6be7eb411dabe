"""Two guests and their node on one machine: real processes in PID namespaces and cgroups of their own, on one card.

What makes a process a guest's is its cgroup's path and its PID namespace; both can be had without a container.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from conftest import CARDS, NODES

from servelab.shared.gpu_holders import scan
from servelab.shared.gpu_policy import plan, table
from servelab.shared.gpu_release import release

ROOT = Path(__file__).resolve().parents[2]
# Numbers that no guest of a real node has.
MINE, THEIRS = 900000000 + os.getpid(), 910000000 + os.getpid()

# The guest's first process: it starts the holders, and then does as it is told.
INIT = """
import json, os, subprocess, sys
sys.path.insert(0, "src")
from servelab.shared.gpu_holders import scan
from servelab.shared.gpu_release import release
directory, names = sys.argv[1], sys.argv[2:]
held = []
for name in names:
    node = os.open(f"{directory}/{name}", os.O_RDONLY)
    held.append(subprocess.Popen(["sleep", "60"], pass_fds=[node]))
    os.close(node)
print(json.dumps([one.pid for one in held]), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    if asked == "scan":
        print(json.dumps(scan(directory, view="guest")), flush=True)
    else:
        print(json.dumps(release(asked, grace=2)), flush=True)
        for one in held:
            one.poll()
"""


class Guest:
    """`pids`: its holders, as it numbers them itself."""

    def __init__(self, cgroups: Path, vmid: int, directory: Path, names: list[str]) -> None:
        self.cgroup = cgroups / "lxc" / str(vmid) / "ns"
        self.cgroup.mkdir(parents=True)

        def enter() -> None:
            (self.cgroup / "cgroup.procs").write_text(str(os.getpid()))

        unshare = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
        self.process = subprocess.Popen(
            [*unshare, sys.executable, "-c", INIT, str(directory), *names],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=enter,
        )
        self.pids: list[int] = self._answer()

    def _answer(self):
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            pytest.skip("PID namespaces cannot be had here")
        return json.loads(line)

    def ask(self, what):
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def end(self) -> None:
        self.process.kill()
        self.process.wait()


@pytest.fixture
def cgroups() -> Iterator[Path]:
    """A directory of the unified cgroups that is ours."""
    mounts = [line.split() for line in Path("/proc/mounts").read_text().splitlines()]
    places = [Path(words[1]) for words in mounts if words[2] == "cgroup2"]
    if not places:
        pytest.skip("there are no unified cgroups here")
    made = places[0] / f"servelab-test-{os.getpid()}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"no cgroup can be made here: {error}")
    yield made
    for directory in [*sorted((path for path in made.rglob("*") if path.is_dir()), reverse=True), made]:
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                directory.rmdir()
                break
            time.sleep(0.05)


@pytest.fixture
def guests(cgroups, gpu_dir) -> Iterator[tuple[Guest, Guest]]:
    made: list[Guest] = []
    try:
        for vmid, names in ((MINE, [NODES[0], NODES[1]]), (THEIRS, [NODES[0]])):
            made.append(Guest(cgroups, vmid, gpu_dir, names))
        yield made[0], made[1]
    finally:
        for guest in made:
            guest.end()


def from_node(gpu_dir: Path) -> dict:
    return scan(str(gpu_dir), view="node")


def node_pids(seen: dict, vmid: int) -> dict[int, int]:
    """PID in the guest → PID on the node."""
    return {holder["ns_pid"]: holder["pid"] for holder in seen["holders"] if holder["vmid"] == vmid}


def test_the_node_knows_whose_each_process_is_and_the_guest_sees_its_own(guests, gpu_dir, hold):
    mine, theirs = guests
    here = hold(0)
    seen = from_node(gpu_dir)
    assert sorted(node_pids(seen, MINE)) == sorted(mine.pids)
    assert sorted(node_pids(seen, THEIRS)) == sorted(theirs.pids)
    assert [holder["pid"] for holder in seen["holders"] if holder["vmid"] is None] == [here.pid]
    inside = mine.ask("scan")
    assert [holder["pid"] for holder in inside["holders"]] == sorted(mine.pids) and inside["partial"]


def test_force_empties_one_guest_and_names_the_other_and_the_node(guests, gpu_dir, hold):
    mine, theirs = guests
    here = hold(0)
    seen = from_node(gpu_dir)
    decided = plan(mine.ask("scan"), seen, MINE, force=True)
    # The same number is one process in the guest and another on the node.
    assert {one["pid"]: one["node_pid"] for one in decided["release"]} == node_pids(seen, MINE)
    assert decided["release_on_node"] == []
    refused = {one["node_pid"]: one["action"] for one in decided["refuse"]}
    (neighbour,) = node_pids(seen, THEIRS).values()
    assert refused == {
        neighbour: f"belongs to guest {THEIRS}: stop it there, or give the guests different GPUs",
        here.pid: "runs on the node itself: stop it there",
    }
    said = table(decided, MINE)
    assert f"guest {THEIRS}, root" in said and f"guest {MINE}, root" in said
    done = mine.ask(decided["release"])
    assert {row["pid"]: row["outcome"] for row in done["results"]} == dict.fromkeys(mine.pids, "exited")
    after = from_node(gpu_dir)
    assert node_pids(after, MINE) == {} and sorted(node_pids(after, THEIRS)) == sorted(theirs.pids)
    assert here.poll() is None
    # What is left is in the way, and nobody's but theirs.
    assert plan(mine.ask("scan"), after, MINE, force=True)["blocking"] == 2


def test_on_the_node_only_the_guest_that_was_named_is_signalled(guests, gpu_dir):
    mine, theirs = guests
    seen = from_node(gpu_dir)
    # A guest whose own scan shows nobody, as when a process hides in a namespace of its own.
    blind = mine.ask("scan") | {"holders": []}
    decided = plan(blind, seen, MINE, force=True)
    assert sorted(one["pid"] for one in decided["release_on_node"]) == sorted(node_pids(seen, MINE).values())
    # Even where the decision were wrong: the cgroup is looked at again before anybody is signalled.
    wrong = release(seen["holders"], grace=2, vmid=MINE)
    outcomes = {row["pid"]: row["outcome"] for row in wrong["results"]}
    assert {outcomes[pid] for pid in node_pids(seen, MINE).values()} == {"exited"}
    assert {outcomes[pid] for pid in node_pids(seen, THEIRS).values()} == {"refused"}
    assert sorted(node_pids(from_node(gpu_dir), THEIRS)) == sorted(theirs.pids)


def test_guests_on_different_cards_do_not_matter_to_each_other(cgroups, gpu_dir):
    mine = Guest(cgroups, MINE, gpu_dir, [NODES[0]])
    theirs = Guest(cgroups, THEIRS, gpu_dir, [NODES[1]])
    try:
        guest = mine.ask("scan") | {"gpus": CARDS[:1]}  # the guest was passed one card only
        decided = plan(guest, from_node(gpu_dir), MINE, force=True)
        assert [one["vmid"] for one in decided["tolerate"]] == [THEIRS] and decided["blocking"] == 1
    finally:
        mine.end()
        theirs.end()
