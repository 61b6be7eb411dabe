"""One server over several nodes: they meet at --dist-init-addr, and each notices at once when another is gone.

Only the head listens there; the others are connected to it. The texts are what torch 2.11 was seen to say.
"""

from __future__ import annotations

import select
import socket
import time
from collections.abc import Callable

from .memory import StartFailure
from .serverargs import ServerArgs, local_ranks

# Simulated seconds that torch waits for the others, unless --dist-timeout says otherwise.
_TIMEOUT = 600
_POLL = 0.05
# What goes over the connections, a byte each.
GO, READY, BYE = b"g", b"r", b"b"


class Group:
    """This node's connections: the head has one to each node, every other node has one to the head."""

    def __init__(self, args: ServerArgs, time_scale: float, check: Callable[[], None]) -> None:
        self._args, self._check = args, check
        self._ranks = list(local_ranks(args))
        self._nodes, self.rank = int(args.nnodes), int(args.node_rank)
        host, _, port = str(args.dist_init_addr).rpartition(":")
        self._address = host.strip("[]"), int(port)
        self._timeout = int(args.dist_timeout or _TIMEOUT)
        self._wall = self._timeout / time_scale
        self.peers: list[socket.socket] = []

    def join(self) -> None:
        """Wait until every node is there. Raises StartFailure where one stays away."""
        if self.rank == 0:
            self._gather()
            self._tell(GO)
        else:
            self._call()
            self._hear(GO)

    def meet(self) -> None:
        """Wait until every node has come this far. Raises StartFailure when one is gone."""
        if self.rank == 0:
            self._hear(READY)
            self._tell(GO)
        else:
            self._tell(READY)
            self._hear(GO)

    def part(self) -> None:
        """Tell the others that this is an orderly end."""
        self._tell(BYE)

    def watch(self) -> None:
        """Raise StartFailure when another node is gone. Nothing else is said between the meetings."""
        readable, _, _ = select.select(self.peers, [], [], 0)
        for peer in readable:
            if not _peek(peer):
                raise self.lost(peer)

    def lost(self, peer: socket.socket) -> StartFailure:
        """What the ranks raise that wait for one of a node that is gone."""
        return StartFailure("RuntimeError", lost_text(*_name(peer)), self._ranks)

    def _gather(self) -> None:
        family = socket.AF_INET6 if ":" in self._address[0] else socket.AF_INET
        listener = socket.socket(family, socket.SOCK_STREAM)
        with listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                # Torch's store listens on every address of the machine.
                listener.bind(("", self._address[1]))
                listener.listen()
            except OSError as error:
                raise self._network(
                    "The server socket has failed to listen on any local network address. "
                    f"port: {self._address[1]}, useIpv6: false, code: -98, name: EADDRINUSE, "
                    "message: address already in use"
                ) from error
            until = time.monotonic() + self._wall
            while len(self.peers) < self._nodes - 1:
                if time.monotonic() > until:
                    joined, world = len(self._ranks) * (1 + len(self.peers)), len(self._ranks) * self._nodes
                    raise StartFailure(
                        "torch.distributed.DistStoreError",
                        f"Timed out after {self._timeout + 1} seconds waiting for clients. "
                        f"{joined}/{world} clients joined.",
                        self._ranks,
                    )
                self._check()
                self.peers = [peer for peer in self.peers if not _readable(peer) or _peek(peer)]
                if _readable(listener):
                    self.peers.append(listener.accept()[0])

    def _call(self) -> None:
        until = time.monotonic() + self._wall
        while not self.peers:
            self._check()
            try:
                self.peers.append(socket.create_connection(self._address, timeout=max(_POLL, self._wall)))
            except OSError as error:
                if time.monotonic() > until:
                    host, port = self._address
                    raise self._network(
                        f"The client socket has timed out after {self._timeout * 1000}ms while trying to connect to "
                        f"({host}, {port})."
                    ) from error
                time.sleep(_POLL)
        self.peers[0].settimeout(None)

    def _hear(self, word: bytes) -> None:
        """Wait for `word` from each peer."""
        for peer in self.peers:
            while not _readable(peer):
                self._check()
            heard = _receive(peer)
            if not heard and word == GO and self.rank:
                raise self._network(
                    "Failed to recv, got 0 bytes. Connection was likely closed. "
                    "Did the remote server shutdown or crash?"
                )
            if heard != word:
                raise self.lost(peer)

    def _tell(self, word: bytes) -> None:
        for peer in self.peers:
            try:
                peer.sendall(word)
            except OSError:
                # That it is gone is noticed by who reads.
                continue

    def _network(self, text: str) -> StartFailure:
        return StartFailure("torch.distributed.DistNetworkError", text, self._ranks)


def lost_text(host: str, port: int) -> str:
    """Gloo's words about a peer whose connection ended."""
    return f"[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [{host}]:{port}"


def _name(peer: socket.socket) -> tuple[str, int]:
    try:
        return str(peer.getpeername()[0]), int(peer.getpeername()[1])
    except OSError:
        return "0.0.0.0", 0


def _readable(peer: socket.socket) -> bool:
    return bool(select.select([peer], [], [], _POLL)[0])


def _peek(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1, socket.MSG_PEEK)
    except OSError:
        return b""


def _receive(peer: socket.socket) -> bytes:
    try:
        return peer.recv(1)
    except OSError:
        return b""
