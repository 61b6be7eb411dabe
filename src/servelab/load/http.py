"""Strict HTTP/1.1 framing of one recorded response, keeping for every byte of the body the time when it arrived."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

# A chunk's size as RFC 9112 has it, with an extension that means nothing to us.
SIZE = re.compile(rb"([0-9A-Fa-f]{1,8})[ \t]*(?:;[^\r\n]*)?\r\n")
# A response head that `plain_stream` takes at its word.
PLAIN_HEAD = re.compile(rb"HTTP/1\.1 200(?: [^\r\n]*)?\r\n(?:[!#$%&'*+.^_`|~0-9A-Za-z-]+:[^\r\n]*\r\n)+\r\n")
LAST_CHUNK = b"\r\n0\r\n\r\n"


class BadResponse(Exception):
    """The bytes are not one complete HTTP/1.1 response. `kind` is `cut` or `protocol`."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(detail)
        self.kind = kind


@dataclass(frozen=True)
class Response:
    """`pieces`: for each piece of the body (where it ends in the body, where it ends in the recorded bytes)."""

    status: int
    headers: dict[str, str]
    body: bytes
    pieces: list[tuple[int, int]]
    problem: BadResponse | None

    def arrival(self, edges: Sequence[int], times: Sequence[int], ends: Iterable[int]) -> Iterator[int]:
        """The arrival time of the byte before each offset of `ends` (ascending offsets into the body, > 0).

        `edges` and `times`: where the reads ended and when their bytes had arrived, as recorded.
        """
        pieces = iter(self.pieces)
        body_end, raw_end = 0, 0
        for end in ends:
            while body_end < end:
                body_end, raw_end = next(pieces)
            yield times[bisect_right(edges, raw_end - (body_end - end) - 1)]


def parse_response(raw: bytes, *, closed: bool) -> Response:
    """Take the response apart. `closed`: the server closed the connection behind it, which may be what ends the body.

    A body that is cut short or badly framed is returned as far as it goes, with `problem` saying what is wrong.
    Raises BadResponse when there is not even a head.
    """
    status, headers, start = _head(raw)
    length = headers.get("content-length")
    encoding = headers.get("transfer-encoding")
    if encoding is not None:
        if encoding.lower() != "chunked" or length is not None:
            raise BadResponse("protocol", f"transfer-encoding {encoding!r} with content-length {length!r}")
        body, pieces, problem = _chunks(raw, start)
        return Response(status, headers, body, pieces, problem)
    body = raw[start:]
    problem = None
    if length is not None:
        if not (length.isascii() and length.isdigit()):
            raise BadResponse("protocol", f"bad content-length {length!r}")
        if len(body) < int(length):
            problem = BadResponse("cut", f"{len(body)} of {length} bytes of the body")
        elif len(body) > int(length):
            problem = BadResponse("protocol", "bytes behind the end of the response")
    elif not closed:
        problem = BadResponse("cut", "the body has no end")
    return Response(status, headers, body, [(len(body), len(raw))], problem)


def plain_stream(raw: bytes) -> int | None:
    """Where the body of a complete response begins that is an event stream in chunks, with a head beyond doubt. None
    for anything else, which `parse_response` must judge."""
    head = PLAIN_HEAD.match(raw)
    if head is None or not raw.endswith(LAST_CHUNK):
        return None
    _, headers, start = _head(head[0])
    plain = (
        headers.get("transfer-encoding", "").lower() == "chunked"
        and "content-length" not in headers
        and headers.get("content-type", "").startswith("text/event-stream")
    )
    return start if plain else None


def _head(raw: bytes) -> tuple[int, dict[str, str], int]:
    """(status, headers by lower-case name, where the body starts)."""
    end = raw.find(b"\r\n\r\n")
    if end < 0:
        raise BadResponse("cut", "no complete response head" if raw else "no response at all")
    lines = raw[:end].decode("latin-1").split("\r\n")
    status = _status(lines[0])
    headers: dict[str, str] = {}
    for line in lines[1:]:
        name, colon, value = line.partition(":")
        name = name.lower()
        if not colon or not name or name != name.strip():
            raise BadResponse("protocol", f"bad header line {line!r}")
        if name in headers and name in ("content-length", "transfer-encoding"):
            raise BadResponse("protocol", f"header {name} twice")
        headers[name] = value.strip()
    return status, headers, end + 4


def _status(line: str) -> int:
    version, _, rest = line.partition(" ")
    code = rest[:3]
    if version not in ("HTTP/1.1", "HTTP/1.0") or not (code.isascii() and code.isdigit()) or rest[3:4] not in ("", " "):
        raise BadResponse("protocol", f"not an HTTP/1.1 response: {line[:100]!r}")
    return int(code)


def _chunks(raw: bytes, at: int) -> tuple[bytes, list[tuple[int, int]], BadResponse | None]:
    found: list[bytes] = []
    pieces: list[tuple[int, int]] = []
    total = 0
    problem: BadResponse | None = None
    while True:
        end = raw.find(b"\r\n", at)
        if end < 0:
            problem = BadResponse("cut", "the stream stops within its chunks: no last chunk")
            break
        found_size = SIZE.match(raw, at)
        if found_size is None:
            problem = BadResponse("protocol", f"bad chunk size {raw[at:end][:40]!r}")
            break
        size = int(found_size[1], 16)
        at = end + 2
        if size == 0:
            if raw[at : at + 2] != b"\r\n":
                kind = "cut" if len(raw) < at + 2 else "protocol"
                problem = BadResponse(kind, "the last chunk is not ended by an empty line")
            elif len(raw) != at + 2:
                problem = BadResponse("protocol", "bytes behind the last chunk")
            break
        data = raw[at : at + size]
        if data:
            found.append(data)
            total += len(data)
            pieces.append((total, at + len(data)))
        at += size
        if raw[at : at + 2] != b"\r\n":
            kind = "cut" if len(raw) < at + 2 else "protocol"
            problem = BadResponse(kind, "a chunk is not as long as it says")
            break
        at += 2
    return b"".join(found), pieces, problem
