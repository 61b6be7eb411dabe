"""Which processes and mounts of the host belong to a lab's container: what may be killed and unmounted."""

from __future__ import annotations

import re
from pathlib import PurePath

__all__ = ["belongs_to", "mounts_under"]


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
