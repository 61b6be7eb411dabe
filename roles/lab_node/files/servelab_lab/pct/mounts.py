"""Mounts of the node, and into a guest that already runs."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Callable
from pathlib import Path

from .errors import PctError

_AT_FDCWD, _AT_EMPTY_PATH, _AT_RECURSIVE = -100, 0x1000, 0x8000
_OPEN_TREE, _MOVE_MOUNT = 428, 429
_OPEN_TREE_CLONE, _OPEN_TREE_CLOEXEC = 1, os.O_CLOEXEC
_MOVE_MOUNT_F_EMPTY_PATH = 4
_CLONE_NEWNS = 0x00020000


def _call(name: str, result: int) -> int:
    if result < 0:
        error = ctypes.get_errno()
        raise OSError(error, f"{name}: {os.strerror(error)}")
    return result


def mount_tmpfs(where: Path) -> None:
    """A small tmpfs at `where`, in which device nodes work."""
    where.mkdir(parents=True, exist_ok=True)
    unmount(where)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=8k,mode=755", "none", where], check=True)


def unmount(where: Path) -> None:
    """Take away what is mounted at `where`, if anything is."""
    while where.is_mount():
        subprocess.run(["umount", "-l", where], check=True)


def mounted_below(where: Path) -> list[str]:
    """Mount points at or below `where`."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    points = [line.split()[4].replace("\\040", " ") for line in lines]
    return [point for point in points if point == str(where) or point.startswith(f"{where}/")]


def bind_into(pid: int, source: Path, target: str, *, directory: bool, owner: int) -> None:
    """Show the node's `source` as `target` in the mount namespace of process `pid`."""
    libc = ctypes.CDLL(None, use_errno=True)
    namespace = os.open(f"/proc/{pid}/ns/mnt", os.O_RDONLY)

    def enter() -> None:
        flags = _OPEN_TREE_CLONE | _OPEN_TREE_CLOEXEC
        tree = _call("open_tree", libc.syscall(_OPEN_TREE, _AT_FDCWD, os.fsencode(source), flags))
        _call("setns", libc.setns(namespace, _CLONE_NEWNS))
        # The guest's own file systems know only its own users.
        os.setegid(owner)
        os.seteuid(owner)
        Path(target if directory else os.path.dirname(target)).mkdir(parents=True, exist_ok=True)  # noqa: PTH120
        if not directory:
            with contextlib.suppress(FileExistsError):
                os.close(os.open(target, os.O_CREAT | os.O_EXCL, 0o644))
        os.seteuid(0)
        os.setegid(0)
        moved = libc.syscall(_MOVE_MOUNT, tree, b"", _AT_FDCWD, os.fsencode(target), _MOVE_MOUNT_F_EMPTY_PATH)
        _call("move_mount", moved)

    try:
        _in_child(enter)
    finally:
        os.close(namespace)


def _in_child(work: Callable[[], None]) -> None:
    """A mount namespace is entered for good, so a child does it. Raises PctError with what went wrong there."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            work()
        except OSError as error:
            os.write(writing, str(error).encode())
        finally:
            os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as said:
        message = said.read().decode()
    os.waitpid(child, 0)
    if message:
        raise PctError(message)
