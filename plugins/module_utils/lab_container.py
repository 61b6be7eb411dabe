"""Which processes, mounts and cgroups of the host belong to a lab's container: what may be killed and taken away."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from pathlib import Path, PurePath

__all__ = ["belongs_to", "kill_processes_of", "mounts_under", "processes_of", "remove_cgroups_of"]


def belongs_to(cgroup: str, container: str) -> bool:
    """Whether a process with this /proc/PID/cgroup runs in the LXC container, or is its supervisor.

    LXC names the two cgroups after the container, and adds a number where a former one of that name is left.
    """
    name = re.escape(container)
    return re.search(rf":/(.*/)?lxc\.(payload|monitor)\.{name}(-\d+)?(/|$)", cgroup, re.MULTILINE) is not None


def mounts_under(mountinfo: str, directory: PurePath) -> list[str]:
    """Mount points at or below the directory by /proc/self/mountinfo, in the order in which they can be unmounted."""
    points = []
    for line in mountinfo.splitlines():
        point = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), line.split()[4])
        if PurePath(point).is_relative_to(directory):
            points.append(point)
    return points[::-1]


def processes_of(name: str) -> list[int]:
    """Processes of a container by their cgroup; finds them where its supervisor is gone too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if belongs_to((entry / "cgroup").read_text(), name):
                    found.append(int(entry.name))
    return found


def kill_processes_of(name: str, seconds: float = 30) -> list[int]:
    """End every process of the container; with its init all of its pid namespace ends, guests included.

    Returns those that are still there after `seconds`.
    """
    deadline = time.monotonic() + seconds
    while (found := processes_of(name)) and time.monotonic() < deadline:
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)
    return found


def remove_cgroups_of(name: str) -> None:
    """Remove the empty cgroups that a container leaves when its supervisor is killed."""
    for top, directories, _ in os.walk("/sys/fs/cgroup"):
        for directory in [each for each in directories if belongs_to(f"0::/{each}", name)]:
            directories.remove(directory)
            for below, _, _ in os.walk(Path(top, directory), topdown=False):
                with contextlib.suppress(OSError):
                    Path(below).rmdir()
