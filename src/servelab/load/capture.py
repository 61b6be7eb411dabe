"""What the wire recorded, on its way through a file: memory stays small at any level, and nothing that has arrived is
lost with the process. `marshal` because it is one C call per request; the file is written and read by one process
and deleted when its rows are written, so that the format need not outlive this Python. What a killed client left is
turned into rows by `servelab load --recover`."""

from __future__ import annotations

import marshal
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import add
from pathlib import Path
from types import TracebackType

from servelab.load.wire import TIMESPEC, Exchange

SECOND = 1_000_000_000


@dataclass(frozen=True)
class Record:
    """One exchange after the fact. Times in ns of the level's clock. `raw`: all that was read; the i-th read ended
    before `raw[edges[i]]`, `times[i]` is when its last byte arrived, `reads[i]` when this process read it."""

    index: int
    due: int
    sent: int
    ended: int
    raw: bytes
    edges: Sequence[int]
    times: Sequence[int]
    reads: Sequence[int]
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
        # Few large objects instead of many small ones: it is written while others are read, and read back for each.
        sizes, reads = array("I", map(len, x.parts)).tobytes(), array("q", x.reads).tobytes()
        stamps = b"".join(x.stamps)
        bare = []
        if len(stamps) != TIMESPEC.size * len(x.stamps):
            bare = [len(stamp) != TIMESPEC.size for stamp in x.stamps]
            stamps = b"".join(stamp for stamp, missing in zip(x.stamps, bare, strict=True) if not missing)
        received = b"".join(x.parts), sizes, stamps, reads, bare
        fields = (x.index, x.due, x.sent, x.ended, *received, not x.keep, x.error)
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
                index, due, sent, ended, raw, sizes, stamps, reads, bare, closed, error = marshal.load(file)
            except (EOFError, ValueError, TypeError):
                return
            edges = list(accumulate(array("I", sizes)))
            read_at = array("q", reads)
            times = _times(stamps, read_at, bare)
            yield Record(index, due, sent, ended, raw, edges, times, read_at, sum(bare), closed, error)


def _times(stamps: bytes, reads: Sequence[int], bare: list[bool]) -> list[int]:
    """The kernel's times, and those of the reads where it gave none."""
    flat = array("q", stamps)
    times = list(map(add, map(SECOND.__mul__, flat[::2]), flat[1::2]))
    if not bare:
        return times
    stamped = iter(times)
    return [read if missing else next(stamped) for read, missing in zip(reads, bare, strict=True)]
