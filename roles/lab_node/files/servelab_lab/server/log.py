"""SGLang's log lines: the engine's on stderr, the access log on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

Say = Callable[[str], None]

PHRASES = {
    200: "OK",
    400: "Bad Request",
    401: "Unauthorized",
    403: "Forbidden",
    404: "Not Found",
    405: "Method Not Allowed",
    503: "Service Unavailable",
}


def _now() -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S")


def plain(text: str) -> None:
    """Write to stderr what carries no time stamp."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


def launcher(text: str) -> None:
    """Write a line of the launcher."""
    plain(f"[{_now()}] {text}")


def uvicorn(text: str, level: str = "INFO") -> None:
    """Write a line of the HTTP server's own log; its level is padded to a column."""
    launcher(f"{level + ':':<9} {text}")


def rank(number: int) -> Say:
    """Return the writer of tensor-parallel rank `number`."""
    return lambda text: plain(f"[{_now()} TP{number}] {text}")


def access(client: str, line: str, status: int) -> None:
    """Write one access log line."""
    sys.stdout.write(f'[{_now()}] INFO:     {client} - "{line}" {status} {PHRASES[status]}\n')
    sys.stdout.flush()
