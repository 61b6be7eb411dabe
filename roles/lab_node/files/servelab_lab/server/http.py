"""A small HTTP/1.1 server on asyncio with uvicorn's headers: keep-alive, chunked bodies, one write per answer."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from email.utils import formatdate
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from . import log
from .wire import SSE_HEAD, dumps

_LONGEST_HEAD = 65536

Handler = Callable[["Exchange"], None]


class _Malformed(Exception):
    """What arrived is not HTTP."""


@dataclass(frozen=True)
class Request:
    """One request. Header names are lower case; `query` keeps the last of repeated names."""

    method: str
    target: str
    version: str
    headers: dict[str, str]
    body: bytes

    @property
    def path(self) -> str:
        return unquote(urlsplit(self.target).path)

    @property
    def query(self) -> dict[str, str]:
        return {key: values[-1] for key, values in parse_qs(urlsplit(self.target).query).items()}

    @property
    def keep_alive(self) -> bool:
        wish = self.headers.get("connection", "").lower()
        return wish == "keep-alive" if self.version == "HTTP/1.0" else wish != "close"


class Exchange:
    """A request and its one answer: `reply()`, or `open_stream()` and writes until `end()`.

    `on_gone` is called when the client closes before that.
    """

    def __init__(self, request: Request, connection: Connection) -> None:
        self.request = request
        self._connection = connection
        self.on_gone: Callable[[], None] | None = None
        self.on_status: Callable[[int], None] | None = None
        self.open = True

    def reply(self, status: int, body: bytes = b"", kind: str | None = None, extra: bytes = b"") -> None:
        """Send a whole answer; `kind` is its content type."""
        typed = b"content-type: %b\r\n" % kind.encode() if kind else b""
        self._send(self._head(status, extra + b"content-length: %d\r\n" % len(body) + typed) + body)
        self.end()

    def reply_json(self, status: int, value: Any, extra: bytes = b"") -> None:
        """Send a JSON document."""
        self.reply(status, dumps(value), "application/json", extra)

    def reply_chunked(self, body: bytes, kind: str) -> None:
        """Send a whole answer as one chunk, as what is mounted beside the routes does."""
        head = self._head(200, b"Content-Type: %b\r\nTransfer-Encoding: chunked\r\n" % kind.encode())
        self._send(head + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body))
        self.end()

    def stream_head(self) -> bytes:
        """Return the head of an event stream, to be sent together with the first event."""
        return self._head(200, SSE_HEAD)

    def send(self, data: bytes) -> None:
        """Write bytes of a stream."""
        if self.open:
            self._connection.transport.write(data)

    def end(self) -> None:
        """Finish the exchange, after which the connection takes the next request or closes."""
        if self.open:
            self.open = False
            self._connection.exchange_ended(self.request.keep_alive)

    def _send(self, data: bytes) -> None:
        if self.open:
            self._connection.transport.write(data)

    def _head(self, status: int, fields: bytes) -> bytes:
        request = self.request
        if self.on_status is not None:
            self.on_status(status)
        if not self._connection.quiet:
            log.access(self._connection.client, f"{request.method} {request.target} {request.version}", status)
        closing = b"" if request.keep_alive else b"Connection: close\r\n"
        return b"HTTP/1.1 %d %b\r\n%bserver: uvicorn\r\n%b%b\r\n" % (
            status,
            log.PHRASES[status].encode(),
            _date(),
            fields,
            closing,
        )


_dated = (0, b"")


def _date() -> bytes:
    """Return the Date header, made once a second."""
    global _dated
    now = int(time.time())
    if _dated[0] != now:
        _dated = (now, f"date: {formatdate(now, usegmt=True)}\r\n".encode())
    return _dated[1]


class Connection(asyncio.Protocol):
    """One client connection. Requests that arrive while one is being answered wait."""

    transport: asyncio.Transport

    def __init__(self, handler: Handler, connections: set[Connection], *, quiet: bool = False) -> None:
        self._handler, self._connections, self.quiet = handler, connections, quiet
        self._buffer = bytearray()
        self._exchange: Exchange | None = None
        self.client = "-"

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self._connections.add(self)
        peer = transport.get_extra_info("peername")
        self.client = f"{peer[0]}:{peer[1]}" if peer else "-"

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._next()

    def connection_lost(self, exc: Exception | None) -> None:
        self._connections.discard(self)
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.open = False
            if exchange.on_gone is not None:
                exchange.on_gone()

    def exchange_ended(self, keep_alive: bool) -> None:
        """Close, or go on with what is already there."""
        self._exchange = None
        if not keep_alive:
            self.transport.close()
        elif self._buffer:
            asyncio.get_running_loop().call_soon(self._next)

    def _next(self) -> None:
        if self._exchange is not None or self.transport.is_closing():
            return
        try:
            request = self._take()
        except _Malformed:
            log.launcher("WARNING:  Invalid HTTP request received.")
            self.transport.write(
                b"HTTP/1.1 400 Bad Request\r\ncontent-type: text/plain; charset=utf-8\r\nConnection: close\r\n\r\n"
                b"Invalid HTTP request received."
            )
            self.transport.close()
            return
        if request is not None:
            self._exchange = exchange = Exchange(request, self)
            self._handler(exchange)

    def _take(self) -> Request | None:
        """Cut one whole request off the buffer; None while it is incomplete."""
        end = self._buffer.find(b"\r\n\r\n")
        if end < 0:
            if len(self._buffer) > _LONGEST_HEAD:
                raise _Malformed
            return None
        first, *lines = self._buffer[:end].decode("latin-1").split("\r\n")
        words = first.split(" ")
        if len(words) != 3 or words[2] not in ("HTTP/1.1", "HTTP/1.0"):
            raise _Malformed
        headers = {}
        for line in lines:
            name, colon, value = line.partition(":")
            if not colon:
                raise _Malformed
            headers[name.strip().lower()] = value.strip()
        taken = self._body(headers, end + 4)
        if taken is None:
            if headers.pop("expect", "").lower() == "100-continue":
                self.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
                self._forget_expectation(end)
            return None
        body, after = taken
        del self._buffer[:after]
        return Request(words[0], words[1], words[2], headers, body)

    def _forget_expectation(self, end: int) -> None:
        """Take the Expect header out of the buffered head, so that it is answered once."""
        kept = [line for line in self._buffer[:end].split(b"\r\n") if not line.lower().startswith(b"expect:")]
        self._buffer[:end] = b"\r\n".join(kept)

    def _body(self, headers: dict[str, str], start: int) -> tuple[bytes, int] | None:
        """Return the body and where it ends in the buffer; None while it is incomplete."""
        if headers.get("transfer-encoding", "").lower() == "chunked":
            return self._chunked(start)
        try:
            length = int(headers.get("content-length", "0"))
        except ValueError:
            raise _Malformed from None
        if len(self._buffer) < start + length:
            return None
        return bytes(self._buffer[start : start + length]), start + length

    def _chunked(self, at: int) -> tuple[bytes, int] | None:
        body = b""
        while True:
            line = self._buffer.find(b"\r\n", at)
            if line < 0:
                return None
            try:
                size = int(self._buffer[at:line].split(b";")[0], 16)
            except ValueError:
                raise _Malformed from None
            at = line + 2 + size + 2
            if len(self._buffer) < at:
                return None
            if size == 0:
                return body, at
            body += self._buffer[line + 2 : at - 2]


def json_body(request: Request) -> Any:
    """Return the request's JSON document. Raises json.JSONDecodeError."""
    return json.loads(request.body)
