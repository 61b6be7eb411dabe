"""The hot path: write requests, read bytes, stamp them. Nothing is parsed here but where a response ends.

One thread, one epoll, non-blocking sockets, one `recvmsg` per readable socket and turn. Where the kernel stamps
received packets (SO_TIMESTAMPNS, which TCP has too), its stamp travels with the bytes: the moment a chunk arrived is
then known however late this process gets to read it. Stamps are kept as the raw bytes that the kernel gave and decoded
after the level. All times are nanoseconds of one clock: CLOCK_REALTIME with kernel stamps, CLOCK_MONOTONIC without.

A read can bring several chunks; all get the stamp of its last packet. `metrics` counts how often that happened. Most
chunks lose a gap by that; the first would make a wrong TTFT. So whoever has had next to nothing yet is read before the
others, of whom only a few are read at a time: they have an epoll of their own, which is itself one of the things that
the big one waits for.

To wake up costs several times what a read does. With many requests in flight something comes all the time, so that this
process would wake up for each chunk; it rests for a moment between two turns instead and reads what came meanwhile.
A stamp does not change by that, and a rest is short against the time between two chunks of one response.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import socket
import struct
import time
from collections.abc import Callable
from typing import Any

READ_BYTES = 16384
SO_TIMESTAMPNS = 35  # asm-generic/socket.h; the socket module does not name it. SCM_TIMESTAMPNS is the same number.
TIMESPEC = struct.Struct("=qq")
ANCILLARY_BYTES = socket.CMSG_SPACE(TIMESPEC.size)

IN = select.EPOLLIN
OUT = select.EPOLLOUT

REST = 1_000_000  # ns, the longest between two turns
REST_SHARE = 8  # and not more than this part of the usual time between two reads of one connection
CROWD = 32  # requests in flight from which on it is worth it

EARLY = 3  # reads of a response in which its first text is: a head, a role, the text, apart or together
BATCH = 32  # most reads of others in a look: what they bring to an end takes milliseconds to send anew and to write

# How the end of a response is recognised.
HEAD, CHUNKED, LENGTH, CLOSE = range(4)
LAST_CHUNK = b"\r\n0\r\n\r\n"


class Exchange:
    """One request and the bytes that came back.

    `due`: when it should have been sent; `sent`: when its last byte was handed to the socket; `ended`: when its
    last byte arrived (or it failed). `stamps[i]` is the kernel's timespec of `parts[i]` (empty where it gave none),
    `reads[i]` when this process read it. `error` is None or (kind, detail).
    """

    __slots__ = (
        "due",
        "ended",
        "error",
        "framing",
        "index",
        "keep",
        "left",
        "parts",
        "reads",
        "sent",
        "stamps",
        "todo",
    )

    def __init__(self, index: int, payload: bytes, due: int) -> None:
        self.index = index
        self.todo = payload
        self.due = due
        self.sent = 0
        self.ended = 0
        self.parts: list[bytes] = []
        self.stamps: list[bytes] = []
        self.reads: list[int] = []
        self.framing = HEAD
        self.left = 0
        self.keep = False
        self.error: tuple[str, str] | None = None


class WantsRead(BlockingIOError):
    """Nothing can be sent before something was received; only what stands in a socket's place raises it."""


class NotConnected(OSError):
    """What stands in a socket's place could not make its connection."""


class Connection:
    """A socket and the exchange on it (None: idle, to be used again)."""

    __slots__ = ("epoll", "exchange", "fd", "recvmsg", "sock")

    def __init__(self, sock: Any, exchange: Exchange, epoll: select.epoll) -> None:
        self.sock = sock
        self.epoll = epoll  # that waits for it
        self.fd = sock.fileno()
        self.recvmsg = sock.recvmsg
        self.exchange: Exchange | None = exchange


class Wire:
    """Exchanges in flight to one server. `address` is what `socket.getaddrinfo` gave: (family, sockaddr).

    `wrap` makes something else of a new socket (TLS); it then sends and receives in the socket's place.
    """

    def __init__(
        self,
        address: tuple[int, tuple[str, int]],
        kernel_stamps: bool,
        wrap: Callable[[socket.socket], Any] | None = None,
    ) -> None:
        self._family, self._address = address
        self._kernel_stamps = kernel_stamps
        self._wrap = wrap
        self.clock: Callable[[], int] = time.time_ns if kernel_stamps else time.monotonic_ns
        self._epoll = select.epoll()
        self._early = select.epoll()
        self._epoll.register(self._early.fileno(), IN)
        self._connections: dict[int, Connection] = {}
        self._idle: list[Connection] = []
        self._failed: list[Exchange] = []  # before a byte was read; handed out by the next turn
        self._rest = 0
        self._read_again = 0  # when the rest is over, ns of CLOCK_MONOTONIC
        self._reads, self._reads_before, self._counted_at = 0, 0, time.monotonic_ns()
        self.in_flight = 0
        self.bytes_read = 0
        self.opened = 0

    def send(self, index: int, payload: bytes, due: int) -> None:
        """Send a request now, on an idle connection or a new one. A failure comes out of the next `turn`."""
        exchange = Exchange(index, payload, due)
        self.in_flight += 1
        if self._idle:
            connection = self._idle.pop()
            connection.exchange = exchange
            if connection.epoll is not self._early:
                self._move(connection, self._early)
            self._write(connection, exchange)
            return
        try:
            sock = socket.socket(self._family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        except OSError as problem:
            self._fail(None, exchange, "socket", problem)
            return
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._kernel_stamps:
            sock.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        connection = Connection(self._wrap(sock) if self._wrap is not None else sock, exchange, self._early)
        code = sock.connect_ex(self._address)
        self.opened += 1
        if code in (0, errno.EINPROGRESS):
            self._connections[connection.fd] = connection
            self._early.register(connection.fd, IN if code == 0 else OUT)
            if code == 0:
                self._write(connection, exchange)
        else:
            self._fail(connection, exchange, "connect", OSError(code, os.strerror(code)))

    def wait(self, seconds: float) -> None:
        """Wait for bytes, up to so many seconds: exactly, where `turn` rounds up to the next millisecond."""
        select.select([self._epoll], (), (), self._rested(seconds))

    def set_rest(self) -> None:
        """To be called a few times a second: how long to rest follows from what came since the last time."""
        now, reads = time.monotonic_ns(), self._reads - self._reads_before
        gap = (now - self._counted_at) * self.in_flight // max(1, reads)
        crowded = self._kernel_stamps and self.in_flight >= CROWD and reads
        self._rest = min(REST, gap // REST_SHARE) if crowded else 0
        self._reads_before, self._counted_at = self._reads, now

    def _rested(self, seconds: float) -> float:
        """Rest, up to so many seconds; what is left of them."""
        left = self._read_again - time.monotonic_ns() if self._rest else 0
        if left <= 0 or seconds <= 0:
            return seconds
        rest = min(left / 1e9, seconds)
        time.sleep(rest)
        return seconds - rest

    def turn(self, timeout: float) -> list[Exchange]:
        """Read what comes, once per socket and look, until something has ended or `timeout` seconds are over; returns
        what ended."""
        done, self._failed = self._failed, []
        if done:
            timeout = 0.0
        until = time.monotonic_ns() + int(timeout * 1e9)
        while True:
            self._look(timeout, done)
            timeout = (until - time.monotonic_ns()) / 1e9
            if done or self._failed or timeout <= 0:
                break
        self.in_flight -= len(done)
        return done

    def _look(self, timeout: float, done: list[Exchange]) -> None:
        """One look, after waiting up to `timeout` seconds for bytes. What ended is added to `done`."""
        ready = self._epoll.poll(self._rested(timeout), BATCH)
        if self._rest and 0 < len(ready) < BATCH:
            self._read_again = time.monotonic_ns() + self._rest
        if ready:
            self._read(self._early.poll(0), done)
            self._read(ready, done)

    def _read(self, ready: list[tuple[int, int]], done: list[Exchange]) -> None:
        """Read once from each that is ready. What ended is added to `done`."""
        connections = self._connections
        clock = self.clock
        self._reads += len(ready)
        for fd, mask in ready:
            connection = connections.get(fd)
            if connection is None:  # the epoll of the early ones
                continue
            exchange = connection.exchange
            if mask & OUT and exchange is not None:
                self._writable(connection, exchange)
                continue
            try:
                data, ancillary, _, _ = connection.recvmsg(READ_BYTES, ANCILLARY_BYTES)
            except BlockingIOError:
                if exchange is not None and exchange.todo:  # what came was for the connection: a step of its handshake
                    self._write(connection, exchange)
                continue
            except OSError as problem:
                if exchange is not None:
                    self._fail(connection, exchange, "reset", problem)
                else:
                    self._drop(connection)
                continue
            now = clock()
            if exchange is None:  # bytes or an end where none were asked for: never reuse that connection
                self._drop(connection)
                continue
            if data:
                exchange.parts.append(data)
                exchange.stamps.append(ancillary[0][2] if ancillary else b"")
                exchange.reads.append(now)
                if len(exchange.reads) == EARLY:
                    self._move(connection, self._epoll)
                self.bytes_read += len(data)
                framing = exchange.framing
                if framing == HEAD:
                    framing = self._head(exchange)
                elif framing == LENGTH:
                    exchange.left -= len(data)
                if framing == CHUNKED:
                    if not data.endswith(LAST_CHUNK) and (len(data) >= 7 or not _tail(exchange).endswith(LAST_CHUNK)):
                        continue
                elif framing != LENGTH or exchange.left > 0:
                    continue
            else:
                exchange.keep = False
                if exchange.framing != CLOSE:
                    exchange.error = ("cut", "the server closed the connection before the response was complete")
            self._finish(connection, exchange, now)
            done.append(exchange)

    def overdue(self, sent_before: int) -> list[Exchange]:
        """End every exchange that is due or was sent before that time and has not ended; for time-outs."""
        return self._abandon("timeout", "no complete response within the time allowed", sent_before)

    def cancel(self) -> list[Exchange]:
        """End everything in flight."""
        return self._abandon("cancelled", "ended by the client after the window", None)

    def close(self) -> None:
        """Close every connection; what is in flight is lost, so `cancel` first."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._early.close()
        self._epoll.close()

    # Below: once or twice per request, not per chunk.

    def _move(self, connection: Connection, to: select.epoll) -> None:
        connection.epoll.unregister(connection.fd)
        connection.epoll = to
        to.register(connection.fd, IN)

    def _writable(self, connection: Connection, exchange: Exchange) -> None:
        if not exchange.sent:
            code = connection.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if code:
                self._fail(connection, exchange, "connect", OSError(code, os.strerror(code)))
                return
        connection.epoll.modify(connection.fd, IN)
        self._write(connection, exchange)

    def _write(self, connection: Connection, exchange: Exchange) -> None:
        # Stamped before the call: over loopback the server may answer before `send` returns.
        exchange.sent = self.clock()
        try:
            written = connection.sock.send(exchange.todo)
        except WantsRead:
            connection.epoll.modify(connection.fd, IN)
            return
        except BlockingIOError:
            written = 0
        except NotConnected as problem:
            self._fail(connection, exchange, "connect", problem)
            return
        except OSError as problem:
            self._fail(connection, exchange, "reset", problem)
            return
        if written < len(exchange.todo):
            exchange.todo = exchange.todo[written:]
            connection.epoll.modify(connection.fd, OUT)
        else:
            exchange.todo = b""

    def _head(self, exchange: Exchange) -> int:
        """Find out how the response ends; `http` checks the details afterwards, from the same bytes."""
        data = b"".join(exchange.parts)
        end = data.find(b"\r\n\r\n")
        if end < 0:
            return HEAD
        head = data[:end].lower()
        exchange.keep = head.startswith(b"http/1.1") and b"\r\nconnection: close" not in head
        at = head.find(b"\r\ncontent-length:")
        if b"\r\ntransfer-encoding: chunked" in head:
            exchange.framing = CHUNKED
        elif at >= 0:
            value = head[at + 17 :].split(b"\r\n", 1)[0].strip()
            exchange.framing = LENGTH if value.isdigit() else CLOSE
            exchange.left = int(value) - (len(data) - end - 4) if value.isdigit() else 0
        else:
            exchange.framing = CLOSE
        return exchange.framing

    def _finish(self, connection: Connection, exchange: Exchange, now: int) -> None:
        stamp = exchange.stamps[-1] if exchange.stamps else b""
        exchange.ended = stamp_ns(stamp) if stamp and exchange.error is None else now
        connection.exchange = None
        if exchange.keep and exchange.left == 0:
            self._idle.append(connection)
        else:
            self._drop(connection)

    def _fail(self, connection: Connection | None, exchange: Exchange, where: str, problem: OSError) -> None:
        kind = "refused" if problem.errno == errno.ECONNREFUSED else where
        exchange.error = (kind, problem.strerror or str(problem))
        exchange.ended = self.clock()
        if connection is not None:
            connection.exchange = None
            self._drop(connection)
        self._failed.append(exchange)

    def _abandon(self, kind: str, detail: str, before: int | None) -> list[Exchange]:
        now = self.clock()
        ended = []
        for connection in list(self._connections.values()):
            exchange = connection.exchange
            if exchange is None or (before is not None and (exchange.sent or exchange.due) >= before):
                continue
            exchange.error = (kind, detail)
            exchange.ended = now
            connection.exchange = None
            self._drop(connection)
            ended.append(exchange)
        self.in_flight -= len(ended)
        return ended

    def _drop(self, connection: Connection) -> None:
        if self._connections.pop(connection.fd, None) is not None:
            connection.epoll.unregister(connection.fd)
        if connection in self._idle:
            self._idle.remove(connection)
        connection.sock.close()


def stamp_ns(stamp: bytes) -> int:
    """The kernel's timespec as nanoseconds."""
    seconds, nanoseconds = TIMESPEC.unpack(stamp)
    return int(seconds * 1_000_000_000 + nanoseconds)


def _tail(exchange: Exchange) -> bytes:
    """The last bytes received, at least seven where there are as many: a terminator may arrive in pieces."""
    tail = b""
    for part in reversed(exchange.parts):
        tail = part + tail
        if len(tail) >= len(LAST_CHUNK):
            break
    return tail


def kernel_stamps_work() -> bool:
    """Try it over loopback. The kernel switches stamping on shortly after the first socket asks, hence the patience;
    some sandboxes accept the option and never deliver."""
    with contextlib.suppress(OSError), contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.create_server(("127.0.0.1", 0)))
        sender = opened.enter_context(socket.create_connection(listener.getsockname(), timeout=10))
        receiver = opened.enter_context(listener.accept()[0])
        receiver.settimeout(10)
        receiver.setsockopt(socket.SOL_SOCKET, SO_TIMESTAMPNS, 1)
        for _ in range(50):
            before = time.time_ns()
            sender.sendall(b"x")
            _, ancillary, _, _ = receiver.recvmsg(1, ANCILLARY_BYTES)
            if ancillary and len(ancillary[0][2]) == TIMESPEC.size:
                return before <= stamp_ns(ancillary[0][2]) <= time.time_ns()
            time.sleep(0.002)
    return False
