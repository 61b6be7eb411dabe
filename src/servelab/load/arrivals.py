"""Load shapes: when requests are due, and when the window in which they count opens and closes. Times in ns of one
clock.

Closed: a constant number in flight; every end of a request makes the next one due. Open: due times that depend on
nothing that the server does, so that latencies counted from them hold what a user waits, however slow the server gets.
"""

from __future__ import annotations

import heapq
import itertools
import math
import random
from collections.abc import Iterable, Iterator
from typing import Protocol

SECOND = 1_000_000_000

# A closed level is in steady state while this share of its requests is in flight.
STEADY = 0.95


class Shape(Protocol):
    """What the loop asks. `exact`: requests must be sent to the millisecond. `finite`: it ends by itself, when `due`
    is None. `anytime`: its window may close at any time, not only with the end of certain requests."""

    exact: bool
    finite: bool
    anytime: bool
    ahead: int  # requests to have ready

    def begin(self, now: int) -> None: ...

    def due(self) -> int | None:
        """When the next request is due; None: not before one has ended, or never again."""

    def launched(self, index: int) -> int:
        """That request is launched now; returns when it was due."""

    def ended(self, index: int, again: int) -> bool:
        """A request ended, whose place is free from `again` on; returns whether the window may close with it."""

    def opens(self, in_flight: int) -> bool:
        """Whether the window may open now."""


class Closed:
    """`concurrency` requests in flight. The ramp spreads the first launches over about one request's duration;
    launched at once, requests of equal length would march in step for the whole level and every figure would swing
    with their waves.

    Requests of equal length repeat with their duration as the period, so that a window of whole periods has no error
    from where it starts and ends. At a small level that error would show: there the window closes with a request of
    the slot that opened it. At a large one the slots' phases even it out.
    """

    SMALL = 8
    exact = finite = anytime = False

    def __init__(self, concurrency: int, ramp_seconds: float) -> None:
        self.concurrency = self.ahead = concurrency
        self._step = int(ramp_seconds * SECOND / concurrency)
        self._need = math.ceil(STEADY * concurrency)
        self._due: list[int] = []
        self._small = concurrency <= self.SMALL
        self._last = -1  # the request launched last
        self._slot = -1  # the opening slot's request in flight
        self._slot_due = -1  # when that slot's next request is due

    def begin(self, now: int) -> None:
        self._due = [now + i * self._step for i in range(self.concurrency)]  # ascending, so already a heap

    def due(self) -> int | None:
        return self._due[0] if self._due else None

    def launched(self, index: int) -> int:
        due = heapq.heappop(self._due)
        if due == self._slot_due:
            self._slot = index
        self._last = index
        return due

    def ended(self, index: int, again: int) -> bool:
        heapq.heappush(self._due, again)
        if index != self._slot:
            return not self._small
        self._slot_due = again
        return True

    def opens(self, in_flight: int) -> bool:
        if in_flight < self._need:
            return False
        self._slot = self._last
        return True


class Open:
    """Requests at `times`, seconds from the start, ascending. Endless ones are in steady state once all requests that
    were launched before the first response was complete have themselves ended: then the number in flight, which
    starts from none, has stopped to rise. Finite ones have no steady state; their window is all of them."""

    exact = True

    def __init__(self, times: Iterable[float], *, finite: bool) -> None:
        self._times = iter(times)
        self.finite = finite
        self.anytime = not finite
        self.ahead = 64
        self._start = 0
        self._next: int | None = None
        self._launched = 0
        self._ended = 0
        self._generation: int | None = None

    def begin(self, now: int) -> None:
        self._start = now
        self._advance()

    def due(self) -> int | None:
        return self._next

    def launched(self, index: int) -> int:
        due = self._next
        assert due is not None
        self._launched += 1
        self._advance()
        return due

    def ended(self, index: int, again: int) -> bool:
        self._ended += 1
        if self._generation is None:
            self._generation = self._launched
        return False

    def opens(self, in_flight: int) -> bool:
        return self.finite or (self._generation is not None and self._ended >= self._generation)

    def _advance(self) -> None:
        seconds = next(self._times, None)
        self._next = None if seconds is None else self._start + round(seconds * SECOND)


def constant(rate: float) -> Iterator[float]:
    """One request every 1/rate seconds."""
    return (i / rate for i in itertools.count())


def poisson(rate: float, seed: int) -> Iterator[float]:
    """Independent users: exponential gaps. The same seed gives the same times, at another rate the same pattern
    stretched."""
    rng = random.Random(f"servelab/arrivals/{seed}")
    at = 0.0
    while True:
        at += rng.expovariate(1.0)
        yield at / rate


def burst(rate: float, size: int) -> Iterator[float]:
    """`size` requests at once, so often that there are `rate` per second on average."""
    return (i // size * size / rate for i in itertools.count())


def ramp(start: float, end: float, seconds: float) -> Iterator[float]:
    """A rate that rises (or falls) evenly from `start` to `end` requests per second within `seconds`."""
    slope = (end - start) / seconds
    for i in range(int((start + end) / 2 * seconds + 1e-9)):
        # i requests are due when start·t + slope·t²/2 reaches i; in this form it holds for a slope of 0 too.
        root = math.sqrt(max(0.0, start * start + 2 * slope * i))
        yield 2 * i / (start + root) if i else 0.0
