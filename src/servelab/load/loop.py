"""One level: launch requests when its shape says so, hand what ended to the file, know where it stands."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice

from servelab.load.arrivals import SECOND, Shape
from servelab.load.capture import Writer
from servelab.load.wire import Exchange, Wire

TICK = SECOND // 4
AFTER_FAILURE = SECOND // 5  # a slot whose request failed waits, or a dead server would be hammered
FEW_FAILURES = 10
SPIN = 150e-6  # seconds
QUIET = SECOND // 500  # nothing is due for so long: a request may be made meanwhile


@dataclass(frozen=True)
class Plan:
    """One level. Wall seconds.

    `name`: as people read it. `at_once`: requests in flight that are meant (closed), or most that are allowed before
    the server counts as overrun (open). `failures`: share of requests that may fail.
    """

    name: int | str
    at_once: int
    min_seconds: float
    min_requests: int
    timeout: float
    drain: bool  # let what is in flight at the end of the window end by itself, instead of cancelling it
    failures: float = 0.0


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
    gave_up: str | None = None  # why the level was ended early


def run(
    wire: Wire,
    shape: Shape,
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
    ready = deque(islice(payloads, shape.ahead))
    state = State(started=clock())
    shape.begin(state.started)
    most_failures = max(FEW_FAILURES, plan.at_once) if not shape.exact else FEW_FAILURES
    timeout = int(plan.timeout * SECOND)
    drain = plan.drain
    next_tick = state.started
    launching = True
    # An open level goes on after its window until what was launched in it has ended, under the same load; otherwise the
    # last requests of the window would meet an emptying server.
    counted, waiting = 0, 0

    def launch() -> None:
        while (due := shape.due()) is not None and due <= clock():
            wire.send(state.launched, ready.popleft() if ready else next(payloads), shape.launched(state.launched))
            state.launched += 1
        if state.window_start is None and shape.opens(wire.in_flight):
            state.window_start = clock()
            state.phase = "measuring"

    while launching or wire.in_flight:
        due = None
        if launching:
            launch()
            due = shape.due()
        now = clock()
        until = next_tick if due is None else min(due, next_tick)
        behind = launching and len(ready) < shape.ahead and (not shape.exact or due is None or due - now > QUIET)
        left = 0.0 if behind else max(0, until - now) / SECOND
        if shape.exact and left:
            if left > SPIN:  # a timer wakes up late; the last moment is spent looking instead
                wire.wait(left - SPIN)
            left = 0.0
        ended = wire.turn(left)
        now = clock()
        for exchange in ended:
            _count(exchange, state)
            waiting -= exchange.index < counted
            if launching:
                again = exchange.ended + (AFTER_FAILURE if _failed(exchange) else 0)
                if shape.ended(exchange.index, again) and _enough(plan, state, now):
                    state.window_end = exchange.ended
                    launching = False
        if launching:
            launch()  # before anything is written down about those that ended
        _write(ended, writer, intervals)
        if behind and not ended:
            ready.extend(islice(payloads, 1))
        if launching and shape.finite and shape.due() is None:
            launching = False
        elif launching and shape.anytime and state.window_end is None and _enough(plan, state, now):
            state.window_end = now
            state.phase = "draining"
            counted, waiting = state.launched, wire.in_flight

        if now >= next_tick:
            next_tick = now + TICK
            state.in_flight = wire.in_flight
            state.bytes_read = wire.bytes_read
            wire.set_rest()
            given_up = wire.overdue(now - timeout)
            for exchange in given_up:
                _count(exchange, state)
                waiting -= exchange.index < counted
                if launching:
                    shape.ended(exchange.index, now)
            _write(given_up, writer, intervals)
            if launching and state.failed >= max(most_failures, plan.failures * (state.failed + state.ended)):
                state.gave_up = f"ended early after {state.failed} failed requests"
            elif launching and shape.exact and wire.in_flight > plan.at_once:
                state.gave_up = f"ended early: {wire.in_flight} requests were waiting for the server"
            if tick(state) or (launching and state.gave_up is not None):
                launching = drain = False
        if counted and waiting <= 0:
            launching = drain = False
        if not launching:
            state.phase = "draining"
            if state.window_end is None:
                state.window_end = clock()
            if not drain:
                _write(wire.cancel(), writer, intervals)
    return state


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
