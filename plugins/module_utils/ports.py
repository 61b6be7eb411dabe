"""Who listens on a port, as far as this user may look."""

from __future__ import annotations

import pwd
from collections.abc import Collection, Iterable
from pathlib import Path

LISTEN = "0A"


def listening(ports: Collection[int], proc: str = "/proc") -> dict[str, tuple[int, int]]:
    """The sockets that listen on these TCP ports in this network namespace: inode → (port, uid of its owner)."""
    found = {}
    for table in ("tcp", "tcp6"):
        try:
            lines = Path(proc, "net", table).read_text(encoding="ascii", errors="replace").splitlines()[1:]
        except OSError:
            continue
        for line in lines:
            words = line.split()
            if len(words) > 9 and words[3] == LISTEN and (port := int(words[1].rpartition(":")[2], 16)) in ports:
                found[words[9]] = (port, int(words[7]))
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
    inodes = listening({port})
    if not inodes:
        return None
    if any(holds(pid, inodes) for pid in ours):
        return "ours"
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and holds(int(entry.name), inodes):
            words = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", "replace").strip()
            return f"pid {entry.name}: {words if len(words) <= 80 else words[:80] + '…'}"
    users = " or ".join(sorted({name_of(uid) for _, uid in inodes.values()}))
    return f"a process of user {users}, which cannot be looked at from here: another user's or a container's"


def name_of(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
