#!/usr/bin/env python3
"""How long it takes to find who holds the GPUs, in a crowd of processes that hold none: beside fuser and lsof.

    python3 bench/holders.py [--processes 5000 10000] [--descriptors 100] [--repeat 3]

As root, with a C compiler. Makes device nodes of /dev/full's number in a directory of its own, and one holder among the
crowd. Each tool must find that one; so must a C program that only lists the descriptors and asks for the device behind
each (holders_floor.c), as no search through /proc can be faster. Times are wall seconds, the best of --repeat; with the
load of the machine beside them, as nothing else may run for a figure that means something.
"""

from __future__ import annotations

import argparse
import os
import resource
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "src"))

from servelab.shared import gpu_holders  # noqa: E402

GIVE_UP_S = 300
# A name that no lab on this machine has: its cards have the same number.
HELD = f"nvidia{os.getpid()}"


def ours(directory: Path) -> set[int]:
    return {holder["pid"] for holder in gpu_holders.scan(str(directory), view="node")["holders"]}


def alone(directory: Path) -> set[int]:
    """With one process, as on a machine with one core."""
    usual, gpu_holders.MAX_WORKERS = gpu_holders.MAX_WORKERS, 1
    try:
        return ours(directory)
    finally:
        gpu_holders.MAX_WORKERS = usual


def told(argv: list[str]) -> set[int]:
    done = subprocess.run(argv, capture_output=True, text=True, timeout=GIVE_UP_S, check=False)
    return {int(word) for word in done.stdout.split() if word.isdigit()}


def tools(directory: Path, floor: Path) -> dict[str, Callable[[], set[int]]]:
    nodes = [str(path) for path in sorted(directory.iterdir())]
    workers = min(len(os.sched_getaffinity(0)), gpu_holders.MAX_WORKERS)
    found: dict[str, Callable[[], set[int]]] = {
        "gpu_holders": lambda: ours(directory),
        "the kernel's part": lambda: told([str(floor), str(workers), str(directory / HELD)]),
        "gpu_holders, one worker": lambda: alone(directory),
        "the kernel's part, one": lambda: told([str(floor), "1", str(directory / HELD)]),
    }
    if shutil.which("fuser"):
        found["fuser -v"] = lambda: told(["fuser", "-v", *nodes])
    if shutil.which("lsof"):
        found["lsof -t"] = lambda: told(["lsof", "-w", "-t", *nodes])
    return found


def cpu() -> float:
    """CPU seconds of this process and of those that it waited for."""
    return sum(
        used.ru_utime + used.ru_stime
        for used in map(resource.getrusage, (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    )


def measure(find: Callable[[], set[int]], holder: int, repeat: int) -> str:
    """Wall and CPU seconds of the fastest of `repeat` searches, or what was wrong."""
    times = []
    for _ in range(repeat):
        began, used = time.perf_counter(), cpu()
        try:
            found = find()
        except subprocess.TimeoutExpired:
            return f"more than {GIVE_UP_S} s"
        times.append((time.perf_counter() - began, cpu() - used))
        if found != {holder}:
            return f"WRONG: found {sorted(found)}, not {holder}"
    wall, used = min(times)
    return f"{wall:8.2f} s {used:8.2f} s"


def crowd(programs: Path, processes: int, descriptors: int, directory: Path, repeat: int) -> bool:
    command = [str(programs / "holders_crowd"), str(processes), str(descriptors)]
    people = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert people.stdin is not None and people.stdout is not None
    right = True
    try:
        if people.stdout.readline() != b"ready\n":
            print(f"{processes} processes with {descriptors} descriptors each cannot be had here")
            return False
        with (directory / HELD).open("rb") as node:
            holder = subprocess.Popen(["sleep", "100000"], pass_fds=[node.fileno()])
        try:
            # The first look at a descriptor makes the kernel's entry for it, which the others then find.
            first = {"gpu_holders, first look": lambda: ours(directory)}
            for name, find in (first | tools(directory, programs / "holders_floor")).items():
                said = measure(find, holder.pid, 1 if name in first else repeat)
                right = right and not said.startswith("WRONG")
                print(
                    f"{processes:>9} {descriptors:>11}  {name:<24} {said}  load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )
        finally:
            holder.kill()
            holder.wait()
    finally:
        people.stdin.close()
        people.wait()
    return right


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, nargs="+", default=[5000, 10000])
    parser.add_argument("--descriptors", type=int, default=100)
    parser.add_argument("--repeat", type=int, default=3)
    asked = parser.parse_args()
    right = True
    with tempfile.TemporaryDirectory(prefix="servelab-holders-") as scratch:
        directory = Path(scratch, "dev")
        for name in ("holders_crowd", "holders_floor"):
            subprocess.run(["cc", "-O2", "-o", f"{scratch}/{name}", str(HERE / f"{name}.c")], check=True)
        directory.mkdir()
        for name in (HELD, "nvidiactl-bench"):
            os.mknod(directory / name, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        print(f"{len(os.sched_getaffinity(0))} cores, Python {sys.version.split()[0]}, kernel {os.uname().release}")
        print(f"{'processes':>9} {'descriptors':>11}  {'tool':<24} {'wall':>10} {'CPU':>10}")
        for processes in asked.processes:
            right = crowd(Path(scratch), processes, asked.descriptors, directory, asked.repeat) and right
    most = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    print(f"most memory of one process: {most // 1024} MiB")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
