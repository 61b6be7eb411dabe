"""The closed loop: a constant number of requests in flight.

Launches are a heap of due times: the ramp fills it, and every end of a request adds one. (Open loops differ only in
what fills the heap.) The ramp spreads the first launches over about one request's duration; launched at once, requests
of equal length would march in step for the whole level and every figure would swing with their waves.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from servelab.load.capture import Writer
from servelab.load.metrics import STEADY
from servelab.load.wire import Exchange, Wire

SECOND = 1_000_000_000
TICK = SECOND // 4
AFTER_FAILURE = SECOND // 5  # a slot whose request failed waits, or a dead server would be hammered


@dataclass(frozen=True)
class Plan:
    """One level. Wall seconds."""

    concurrency: int
    min_seconds: float
    min_requests: int
    ramp_seconds: float
    timeout: float
    drain: bool  # let what is in flight at the end of the window end by itself, instead of cancelling it


@dataclass
class State:
    """Where the level stands; read by the progress display at every tick."""

    phase: str = "ramping"
    launched: int = 0
    ended: int = 0
    failed: int = 0
    ended_in_window: int = 0
    in_flight: int = 0
    bytes_read: int = 0
    started: int = 0
    window_start: int | None = None
    window_end: int | None = None
    bytes_of_ended: int = 0
    seconds_of_ended: float = 0.0


def run(
    wire: Wire,
    plan: Plan,
    payloads: Iterator[bytes],
    writer: Writer,
    intervals: list[tuple[int, int]],
    tick: Callable[[State], bool],
) -> State:
    """Run one level; every exchange goes to `writer` and its (sent, ended) to `intervals`.

    `payloads` gives the bytes of request 0, 1, 2, … `tick` is called about four times a second and returns True to end
    the level early: what is in flight is then cancelled.
    """
    clock = wire.clock
    # Requests are made ahead of time, while waiting: making one takes longer than sending it.
    ready = deque(islice(payloads, plan.concurrency))
    state = State(started=clock())
    step = int(plan.ramp_seconds * SECOND / plan.concurrency)
    due = [state.started + i * step for i in range(plan.concurrency)]  # ascending, so already a heap
    need = math.ceil(STEADY * plan.concurrency)
    most_failures = max(10, plan.concurrency)
    timeout = int(plan.timeout * SECOND)
    drain = plan.drain
    next_tick = state.started
    launching = True

    cycle = _Cycle(plan.concurrency)

    def launch() -> None:
        while due and due[0] <= clock():
            at = heapq.heappop(due)
            cycle.launched(state.launched, at)
            wire.send(state.launched, ready.popleft() if ready else next(payloads), at)
            state.launched += 1
        if state.window_start is None and wire.in_flight >= need:
            state.window_start = clock()
            state.phase = "measuring"
            cycle.open(state.launched - 1)

    while launching or wire.in_flight:
        if launching:
            launch()
        until = min(due[0], next_tick) if launching and due else next_tick
        behind = launching and len(ready) < plan.concurrency
        ended = wire.turn(0.0 if behind else max(0.0, (until - clock()) / SECOND))
        now = clock()
        for exchange in ended:
            _count(exchange, state)
            if launching:
                again = exchange.ended + (AFTER_FAILURE if _failed(exchange) else 0)
                heapq.heappush(due, again)
                if cycle.ended(exchange.index, again) and _enough(plan, state, now):
                    state.window_end = exchange.ended
                    launching = False
        if launching:
            launch()  # before anything is written down about those that ended
        _write(ended, writer, intervals)
        if behind and not ended:
            ready.append(next(payloads))

        if now >= next_tick:
            next_tick = now + TICK
            state.in_flight = wire.in_flight
            state.bytes_read = wire.bytes_read
            given_up = wire.overdue(now - timeout)
            for exchange in given_up:
                _count(exchange, state)
                if launching:
                    heapq.heappush(due, now)
                    cycle.ended(exchange.index, now)
            _write(given_up, writer, intervals)
            if tick(state) or (launching and state.failed >= most_failures):
                launching = drain = False
        if not launching:
            state.phase = "draining"
            if state.window_end is None:
                state.window_end = clock()
            if not drain:
                _write(wire.cancel(), writer, intervals)
    return state


class _Cycle:
    """When a window may close. Requests of equal length repeat with their duration as the period, so that a window of
    whole periods has no error from where it starts and ends. At a small level that error would show: there the window
    closes with a request of the slot that opened it. At a large one the slots' phases even it out."""

    SMALL = 8

    def __init__(self, concurrency: int) -> None:
        self._small = concurrency <= self.SMALL
        self._index = -1  # the opening slot's request in flight
        self._due = -1  # when the opening slot's next request is due

    def open(self, index: int) -> None:
        """The window opens with the launch of this request."""
        self._index = index

    def launched(self, index: int, due: int) -> None:
        """A request was launched that was due then."""
        if due == self._due:
            self._index = index

    def ended(self, index: int, due: int) -> bool:
        """A request ended and its slot's next one is due then; returns whether a window may close here."""
        if index != self._index:
            return not self._small
        self._due = due
        return True


def _enough(plan: Plan, state: State, now: int) -> bool:
    return (
        state.window_start is not None
        and now - state.window_start >= plan.min_seconds * SECOND
        and state.ended_in_window >= plan.min_requests
    )


def _failed(exchange: Exchange) -> bool:
    """Whether it failed at first sight. The verdict comes after the level; this only keeps us from hammering."""
    if exchange.error is not None:
        return True
    first, last = exchange.parts[0], exchange.parts[-1]
    return not first.startswith(b"HTTP/1.1 200") or (len(exchange.parts) < 4 and b'data: {"error"' in first + last)


def _count(exchange: Exchange, state: State) -> None:
    if _failed(exchange):
        state.failed += 1
        return
    state.ended += 1
    state.bytes_of_ended += sum(map(len, exchange.parts))
    state.seconds_of_ended += (exchange.ended - exchange.sent) / SECOND
    if state.window_start is not None and state.window_end is None:
        state.ended_in_window += 1


def _write(ended: list[Exchange], writer: Writer, intervals: list[tuple[int, int]]) -> None:
    for exchange in ended:
        writer.add(exchange)
        if exchange.sent:
            intervals.append((exchange.sent, exchange.ended))
