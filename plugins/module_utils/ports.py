"""Who listens on a port, as far as this user may look."""

from __future__ import annotations

import pwd
from collections.abc import Iterable
from pathlib import Path

LISTEN = "0A"


def listeners(port: int) -> dict[str, int]:
    """The sockets that listen on `port` in this network namespace: inode → uid of whoever opened it."""
    found = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            fields = line.split()
            if fields[3] == LISTEN and int(fields[1].rsplit(":", 1)[1], 16) == port:
                found[fields[9]] = int(fields[7])
    return found


def holds(pid: int, inodes: Iterable[str]) -> bool:
    """Whether the process has one of the sockets open."""
    wanted = {f"socket:[{inode}]" for inode in inodes}
    try:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            try:
                if str(entry.readlink()) in wanted:
                    return True
            except OSError:
                continue
    except OSError:
        return False
    return False


def port_owner(port: int, ours: set[int]) -> str | None:
    """None, "ours", or a description of the process that listens instead of us."""
    inodes = listeners(port)
    if not inodes:
        return None
    if any(holds(pid, inodes) for pid in ours):
        return "ours"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and holds(int(entry.name), inodes):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f"pid {entry.name}: {words if len(words) <= 80 else words[:80] + '…'}"
    users = " or ".join(sorted({name_of(uid) for uid in inodes.values()}))
    return f"a process of user {users}, which cannot be looked at from here: another user's or a container's"


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
