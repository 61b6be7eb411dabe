"""The server's child processes: they look like SGLang's, hold the cards, and die (or not) like them."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from servelab_lab.gpu import Claim

_PR_SET_PDEATHSIG, _PR_SET_NAME = 1, 15


class ClaimFailed(Exception):
    """A scheduler could not open its card. The text is the system's."""


@dataclass
class Scheduler:
    """The launcher's end of one child."""

    rank: int
    card: int
    pid: int
    _line: socket.socket
    holds: bool = True
    """False once it was asked to go."""

    def hold(self, mib: int) -> None:
        """Make the child use `mib` MiB of its card. Raises ClaimFailed."""
        self._line.sendall(f"{mib}\n".encode())
        answer = self._line.recv(4096).decode()
        if answer != "held\n":
            raise ClaimFailed(answer.strip() or "the scheduler died")

    def let_go(self) -> None:
        """Ask the child to release its card and exit, as a graceful shutdown does."""
        self.holds = False
        self._line.close()


def spawn(rank: int, card: int, *, survivor: bool, holds_card: bool) -> Scheduler:
    """Fork a scheduler, before there are threads or a loop. A survivor ignores SIGTERM and its launcher's death."""
    ours, theirs = socket.socketpair()
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        theirs.close()
        return Scheduler(rank, card, pid, ours)
    status = 1
    try:
        ours.close()
        _become(f"sglang::scheduler_TP{rank}")
        if survivor:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        else:
            _die_with(launcher)
        _serve(theirs, card if holds_card else None, survivor)
        status = 0
    finally:
        os._exit(status)


def spawn_detokenizer() -> int:
    """Fork the detokenizer, which only is there; return its pid."""
    launcher = os.getpid()
    pid = os.fork()
    if pid:
        return pid
    _become("sglang::detokenizer")
    _die_with(launcher)
    while True:
        signal.pause()


def _serve(line: socket.socket, card: int | None, survivor: bool) -> None:
    """Hold as many MiB as the launcher says, until it goes away."""
    held: Claim | None = None
    for text in line.makefile("r"):
        if card is not None:
            try:
                if held is None:
                    held = Claim(card, int(text))
                else:
                    held.resize(int(text))
            except OSError as error:
                line.sendall(f"{error}\n".encode())
                continue
        line.sendall(b"held\n")
    while survivor:
        signal.pause()


def _die_with(parent: int) -> None:
    """Have the kernel kill this process when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)


def _become(title: str) -> None:
    """Take a new name, in `ps` too: comm by prctl, and the command line by overwriting it where the kernel reads it."""
    ctypes.CDLL(None).prctl(_PR_SET_NAME, title[:15].encode())
    fields = Path("/proc/self/stat").read_text(encoding="ascii").rpartition(")")[2].split()
    # Fields 48 and 49 of proc(5); the first after the name is number 3.
    start, end = int(fields[45]), int(fields[46])
    if end > start:
        ctypes.memmove(start, title.encode()[: end - start - 1].ljust(end - start, b"\0"), end - start)


def kill(pids: Iterable[int]) -> None:
    """SIGKILL these children and reap them."""
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        except (ProcessLookupError, ChildProcessError):
            continue
