"""A node other than the head once it has loaded: no completions there, only an empty answer about its health."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
from contextlib import suppress
from functools import partial

from . import log
from .group import BYE, Group
from .http import Connection, Exchange
from .serverargs import ServerArgs
from .startup import Start, Started

_ROUTES = ("/ping", "/health", "/health_generate")


class Follower:
    """Holds its cards until one of its schedulers, the head or a signal ends it."""

    def __init__(self, start: Start, started: Started, group: Group, args: ServerArgs) -> None:
        self._start, self._started, self._group, self._args = start, started, group, args
        self._connections: set[Connection] = set()
        self._ended: asyncio.Event

    async def serve(self) -> None:
        """Return when the schedulers have ended, as SGLang does, whose exit status is then 0."""
        self._ended = asyncio.Event()
        loop = asyncio.get_running_loop()
        if self._args.dialect.since("0.5.21"):
            loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        for peer in self._group.peers:
            peer.setblocking(False)
            loop.add_reader(peer, partial(self._heard, peer))
        host, port = str(self._args.host), int(self._args.port)
        await loop.create_server(lambda: Connection(_answer, self._connections, quiet=True), host, port)
        log.launcher(f"Dummy health check server started in background thread at {host}:{port}")
        # One that died before it was waited for.
        self._child_changed()
        await self._ended.wait()

    def _terminate(self) -> None:
        log.launcher(
            f"SIGTERM received on node_rank {self._group.rank}; waiting for the rank-0 ShutdownReq broadcast to stop "
            "the schedulers."
        )

    def _heard(self, peer: socket.socket) -> None:
        try:
            word = peer.recv(1)
        except OSError:
            word = b""
        if word == BYE:
            for scheduler in self._started.schedulers:
                scheduler.let_go()
        elif not self._gone(word):
            self._start.fall(self._group.lost(peer))

    def _gone(self, word: bytes) -> bool:
        """Say whether what was heard is the silence after a farewell: the schedulers are on their way out."""
        return not word and all(not scheduler.holds for scheduler in self._started.schedulers)

    def _child_changed(self) -> None:
        with suppress(ChildProcessError):
            while True:
                gone, status = os.waitpid(-1, os.WNOHANG)
                if not gone:
                    break
                self._lose(gone, os.waitstatus_to_exitcode(status))

    def _lose(self, pid: int, code: int) -> None:
        """A scheduler ended: the launcher waits for all, and those that lose a killed one fail by themselves."""
        self._started.schedulers = [one for one in self._started.schedulers if one.pid != pid]
        if code and self._started.schedulers:
            self._start.fall(self._group.lost(self._group.peers[0]), self._started.schedulers)
        log.launcher(f"Scheduler or DataParallelController {pid} terminated with {code}")
        if not self._started.schedulers:
            self._ended.set()


def _answer(exchange: Exchange) -> None:
    if exchange.request.path in _ROUTES:
        exchange.reply(200)
    else:
        exchange.reply_json(404, {"detail": "Not Found"})
