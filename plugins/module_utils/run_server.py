"""Run a server and let nothing of what it says out unredacted: its output goes to ours and to one file per start.

    python3 run_server.py [--logs DIR] [--keep N] [--secrets FILE] -- COMMAND …

SGLang prints all its settings at the start, its API key among them. The words of FILE (a JSON object) are taken out
wherever they stand, and whatever looks like a secret (redact.py) as well. Signals are passed on, and we end as the
server ends: with its exit status, or by its signal. A file of its own, standard library only: the role copies it and
redact.py to the guest.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import re
import resource
import select
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

if __package__:
    from .redact import MARK, redact
else:  # Run as a file: redact.py lies beside it.
    from redact import MARK, redact  # type: ignore[import-not-found,no-redef]

# What may stand in memory of a line that does not end.
LONGEST_LINE = 1 << 20
# Seconds between two states of a progress bar that are passed on; a bar moves ten times a second, for every rank.
BAR_SECONDS = 1.0
# Seconds to wait for the last words after the server has ended: its children may still hold the pipe.
LAST_WORDS = 3.0
_PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)
_SHORTEST_SECRET = 4
_PR_SET_PDEATHSIG = 1


class Filter:
    """Turns pieces of output into redacted lines. A progress bar's states become lines, at most one a second."""

    def __init__(self, secrets: Sequence[str] = ()) -> None:
        forms = {form for secret in secrets if len(secret) >= _SHORTEST_SECRET for form in _forms(secret)}
        # The longest first: one may begin another.
        self._known = re.compile("|".join(map(re.escape, sorted(forms, key=len, reverse=True)))) if forms else None
        self._rest = b""
        self._bar: str | None = None
        self._bar_said = float("-inf")

    def feed(self, piece: bytes, now: float) -> Iterator[str]:
        """Every line that `piece` ends, without its end; `now` in monotonic seconds."""
        # A line end that is cut in two (\\r | \\n) must not look like a bar.
        whole = self._rest + piece
        held = b"\r" if whole.endswith(b"\r") else b""
        parts = re.split(rb"(\r\n|\n|\r)", whole[: len(whole) - len(held)])
        self._rest = parts.pop() + held
        for content, end in zip(parts[::2], parts[1::2], strict=True):
            yield from self._line(content, end == b"\r", now)
        if len(self._rest) > LONGEST_LINE:
            content, self._rest = self._rest, b""
            yield from self._line(content, False, now)

    def close(self) -> Iterator[str]:
        """What was left without an end."""
        if self._rest.strip(b"\r"):
            yield from self._line(self._rest.rstrip(b"\r"), False, 0.0)
        elif self._bar is not None:
            yield self._bar
        self._rest, self._bar = b"", None

    def _line(self, content: bytes, bar: bool, now: float) -> Iterator[str]:
        if not content.strip():
            return
        line = self.clean(content.decode("utf-8", "replace"))
        if not bar:
            # It stands where the bar stood, so it is the bar's last state or what was written over it.
            self._bar = None
            yield line
        elif now - self._bar_said >= BAR_SECONDS:
            self._bar, self._bar_said = None, now
            yield line
        else:
            self._bar = line

    def clean(self, text: str) -> str:
        """`text` without its secrets."""
        if self._known is not None:
            text = self._known.sub(MARK, text)
        return redact(text)


def _forms(secret: str) -> set[str]:
    """How a secret may be printed: as it is, in Python's and in JSON's quotes."""
    return {secret, repr(secret)[1:-1], json.dumps(secret)[1:-1], json.dumps(secret, ensure_ascii=False)[1:-1]}


def secrets_of(path: Path) -> list[str]:
    """The texts of a JSON object. Raises OSError and ValueError."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict):
        raise ValueError(f"{path} must hold a JSON object.")
    return [value for value in document.values() if isinstance(value, str)]


def log_file(directory: Path, keep: int) -> Path:
    """Where this start's log goes; of the earlier ones in `directory` the newest `keep` - 1 stay."""
    earlier = sorted(directory.glob("*.log"), key=lambda path: path.stat().st_mtime)
    for old in earlier[: max(0, len(earlier) - keep + 1)]:
        old.unlink(missing_ok=True)
    return directory / f"{os.environ.get('INVOCATION_ID') or uuid.uuid4().hex}.log"


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def run(command: Sequence[str], clean: Filter, outputs: list[IO[bytes]]) -> int:
    """Run `command` and pass on what it says; returns its exit status, negative for a signal."""
    reading, writing = os.pipe()
    server = subprocess.Popen(command, stdout=writing, stderr=writing, preexec_fn=_die_with_parent)
    os.close(writing)
    for number in _PASSED_ON:
        signal.signal(number, lambda number, _frame: _pass_on(server, number))

    def say(lines: Iterator[str]) -> None:
        text = "".join(f"{line}\n" for line in lines).encode()
        for output in list(outputs) if text else []:
            try:
                output.write(text)
                output.flush()
            except OSError:  # Nobody reads it any more, or the disk is full: the server goes on.
                outputs.remove(output)

    ended: float | None = None
    while True:
        # Short enough to see the end of the server while children keep the pipe open.
        if select.select([reading], [], [], 0.2)[0]:
            piece = os.read(reading, 1 << 16)
            if not piece:
                break
            say(clean.feed(piece, time.monotonic()))
        if ended is None and server.poll() is not None:
            ended = time.monotonic()
        if ended is not None and time.monotonic() - ended > LAST_WORDS:
            break
    say(clean.close())
    os.close(reading)
    return server.wait()


def _pass_on(server: subprocess.Popen[Any], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        server.send_signal(number)


def end_as(status: int) -> None:
    """End this process as the server ended."""
    if status >= 0:
        sys.exit(status)
    # The core, where there is one, is the server's.
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit status where the server's end was no signal."""
    parser = argparse.ArgumentParser(description="Run a server with its secrets kept out of what it says.")
    parser.add_argument("--logs", type=Path, help="directory that gets one log per start, named by its InvocationID")
    parser.add_argument("--keep", type=int, default=20, help="how many logs stay there (default %(default)s)")
    parser.add_argument("--secrets", type=Path, help="JSON object whose texts are secrets")
    parser.add_argument("command", nargs="+", help="after --: the server's command line")
    args = parser.parse_args(argv)
    try:
        clean = Filter(secrets_of(args.secrets) if args.secrets else ())
        outputs: list[IO[bytes]] = [sys.stdout.buffer]
        if args.logs:
            outputs.append(log_file(args.logs, args.keep).open("ab"))
    except (OSError, ValueError) as error:
        # Without the secrets nothing can be redacted, so nothing is started. The text of a JSON error has no content.
        print(f"run_server: error: {error}; nothing was started.", file=sys.stderr)
        return 1
    try:
        status = run(args.command, clean, outputs)
    except OSError as error:
        print(f"run_server: error: {args.command[0]} cannot be started: {error.strerror}.", file=sys.stderr)
        return 127
    end_as(status)
    return 0


if __name__ == "__main__":
    sys.exit(main())
