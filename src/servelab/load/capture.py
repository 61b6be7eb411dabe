"""What the wire recorded, on its way through a file: memory stays small at any level, and nothing that has arrived is
lost with the process. `marshal` because it is one C call per request; the file is written and read by one process
and deleted when its rows are written, so that the format need not outlive this Python. What a killed client left is
turned into rows by `servelab load --recover`."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from servelab.load.wire import TIMESPEC, Exchange


@dataclass(frozen=True)
class Record:
    """One exchange after the fact. Times in ns of the level's clock; `times[i]` is when `parts[i]` arrived."""

    index: int
    due: int
    sent: int
    ended: int
    parts: list[bytes]
    times: list[int]
    reads: list[int]
    unstamped: int  # reads for which the kernel gave no stamp, so that `times` has the time of the read
    closed: bool
    error: tuple[str, str] | None


@dataclass(frozen=True)
class About:
    """What must be known of a level to read its file. `epoch_offset`: ns to add to its clock for the time since 1970;
    `expected`: tokens of every response; None: of any length."""

    level: int | str
    epoch_offset: int
    expected: int | None


class Writer:
    """Append exchanges to a new file."""

    def __init__(self, path: Path, about: About) -> None:
        # Unbuffered: one write into the page cache per request, instead of a long one now and then.
        self._file = path.open("xb", buffering=0)
        self._file.write(marshal.dumps((about.level, about.epoch_offset, about.expected), 2))

    def add(self, exchange: Exchange) -> None:
        x = exchange
        fields = (x.index, x.due, x.sent, x.ended, x.parts, x.stamps, x.reads, not x.keep, x.error)
        self._file.write(marshal.dumps(fields, 2))  # format 2: without looking for shared objects

    def __enter__(self) -> Writer:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()


def about(path: Path) -> About:
    """What a file is about. Raises ValueError for one that is none of ours."""
    with path.open("rb") as file:
        try:
            level, epoch_offset, expected = marshal.load(file)
        except (EOFError, ValueError, TypeError) as problem:
            raise ValueError(f"{path} is not what a load client of this Python left: {problem}") from problem
    return About(level, epoch_offset, expected)


def read(path: Path) -> Iterator[Record]:
    """The records of a file in the order of their ends; a cut last one (the process was killed) is left out."""
    with path.open("rb") as file:
        try:
            marshal.load(file)
        except (EOFError, ValueError, TypeError):
            return
        while True:
            try:
                index, due, sent, ended, parts, stamps, reads, closed, error = marshal.load(file)
            except (EOFError, ValueError, TypeError):
                return
            times, unstamped = _times(stamps, reads)
            yield Record(index, due, sent, ended, parts, times, reads, unstamped, closed, error)


def _times(stamps: list[bytes], reads: list[int]) -> tuple[list[int], int]:
    joined = b"".join(stamps)
    if len(joined) == TIMESPEC.size * len(stamps):
        flat = struct.unpack(f"={2 * len(stamps)}q", joined)
        return [s * 1_000_000_000 + ns for s, ns in zip(flat[::2], flat[1::2], strict=True)], 0
    times = []
    unstamped = 0
    for stamp, read_at in zip(stamps, reads, strict=True):
        if len(stamp) == TIMESPEC.size:
            seconds, nanoseconds = TIMESPEC.unpack(stamp)
            times.append(seconds * 1_000_000_000 + nanoseconds)
        else:
            times.append(read_at)
            unstamped += 1
    return times, unstamped
