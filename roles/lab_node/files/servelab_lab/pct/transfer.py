"""`pct push` and `pct pull`: one file, written or read with the rights of the guest's root, never following its links
out of the guest. Errors on the way are told on stderr and the status is 0 all the same: that is the real tool's way."""

from __future__ import annotations

import ctypes
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

from .errors import PctError
from .node import Node

_CLONE_NEWUSER = 0x10000000


class _Failed(Exception):
    pass


def _number(name: str, table: str, what: str) -> int:
    """A uid or gid, by name from the guest's own table."""
    if name.isdigit():
        return int(name)
    try:
        for line in Path(table).read_text().splitlines():
            fields = line.split(":")
            if fields[0] == name:
                return int(fields[2])
    except (OSError, IndexError, ValueError):
        pass
    raise _Failed(f"failed to get {what} for: {name}")


def _mode(perms: str) -> int:
    try:
        return int(f"0{perms}", 8)
    except ValueError:
        raise _Failed(f"invalid mode: '0{perms}'") from None


def _inside(node: Node, vmid: int, work: Callable[[], None]) -> None:
    """Run `work` in a child that has the guest's root as its own, and the rights of the guest's root user."""
    root, pid = node.backend.guest_root(vmid)
    where = os.open(root, os.O_DIRECTORY | os.O_PATH)
    child = os.fork()
    if child:
        os.close(where)
        os.waitpid(child, 0)
        return
    try:
        if pid is not None:
            _join_user_namespace(pid)
        os.fchdir(where)
        os.chroot(".")
        os.chdir("/")
        os.umask(0o077)
        work()
    except (_Failed, OSError) as error:
        sys.stderr.write(f"{error}\n")
        sys.stderr.flush()
    finally:
        os._exit(0)


def _join_user_namespace(pid: int) -> None:
    fd = os.open(f"/proc/{pid}/ns/user", os.O_RDONLY)
    # A file system of the guest does not know the node's root: without this, nothing can be created on it.
    if ctypes.CDLL(None, use_errno=True).setns(fd, _CLONE_NEWUSER) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"failed to enter the user namespace of {pid}: {os.strerror(error)}")
    os.setgroups([])
    os.setresgid(0, 0, 0)
    os.setresuid(0, 0, 0)


def push(node: Node, vmid: int, source: str, target: str, *, user: str, group: str, perms: str) -> None:
    """Copy the node's file `source` to `target` in the guest."""
    if not node.running(vmid):
        raise PctError("can only push files to a running CT")
    try:
        file = Path(source).open("rb")  # noqa: SIM115 - closed below, and by the child's end
    except OSError:
        node.warn(f"failed to open {source} for reading\n")
        return

    def write() -> None:
        uid, gid = _number(user, "/etc/passwd", "uid"), _number(group, "/etc/group", "gid")
        mode = _mode(perms)
        try:
            fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        except OSError as error:
            raise _Failed(f"failed to create file: {target}: {error.strerror}") from None
        with os.fdopen(fd, "wb") as out:
            shutil.copyfileobj(file, out)
            os.fchown(fd, uid, gid)
            os.fchmod(fd, mode)

    with file:
        _inside(node, vmid, write)


def pull(node: Node, vmid: int, source: str, target: str, *, user: str, group: str, perms: str) -> None:
    """Copy the guest's file `source` to `target` on the node. Nothing is made there without a source."""
    if not node.running(vmid):
        raise PctError("can only pull files from a running CT")
    reading, writing = os.pipe()
    os.set_inheritable(writing, True)

    def read() -> None:
        os.close(reading)
        try:
            file = Path(source).open("rb")  # noqa: SIM115
        except OSError as error:
            raise _Failed(f"failed to open {source}: {error.strerror}") from None
        with file, os.fdopen(writing, "wb") as out:
            out.write(b"+")  # the file is there, its content follows
            shutil.copyfileobj(file, out)

    # The child fills the pipe while this process empties it.
    reader = os.fork()
    if reader == 0:
        _inside(node, vmid, read)
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading, "rb") as content:
        if content.read(1) == b"+":
            try:
                _receive(content, target, user, group, perms)
            except (_Failed, OSError) as error:
                node.warn(f"{error}\n")
    os.waitpid(reader, 0)


def _receive(content: BinaryIO, target: str, user: str, group: str, perms: str) -> None:
    uid, gid = _number(user, "/etc/passwd", "uid"), _number(group, "/etc/group", "gid")
    mode = _mode(perms)
    try:
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    except OSError as error:
        raise _Failed(f"failed to create file: {target}: {error.strerror}") from None
    with os.fdopen(fd, "wb") as out:
        shutil.copyfileobj(content, out)
        os.fchown(fd, uid, gid)
        os.fchmod(fd, mode)
