"""Drive an engine in wall time: a step of n simulated ms ends n / time_scale ms after the one before it was due.

Deadlines are absolute, so that a late wake-up does not slow the rate: the next step is shorter by as much. That goes
for lateness of up to a step or 30 ms. What is later moves the schedule: made up for, it would raise the rate of
whatever window a client measures next, and deliver bursts that no server sends.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable

from .engine import Engine, Request


class Alarm:
    """Call back at a monotonic time. A timerfd where Python has it: the event loop's own timers round up to 1 ms."""

    def __init__(self, loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
        self._loop, self._callback = loop, callback
        self._fd: int | None = None
        if hasattr(os, "timerfd_create"):  # Python 3.13
            self._fd = os.timerfd_create(time.CLOCK_MONOTONIC, flags=os.TFD_NONBLOCK | os.TFD_CLOEXEC)
            loop.add_reader(self._fd, self._ring)

    def set(self, when: float) -> None:
        """Ring once at `when` (time.monotonic()); at once if that is past."""
        if self._fd is None:
            self._loop.call_at(when, self._callback)
        else:
            # 0 would disarm it.
            os.timerfd_settime(self._fd, flags=os.TFD_TIMER_ABSTIME, initial=max(when, 1e-9))

    def _ring(self) -> None:
        assert self._fd is not None
        try:
            os.read(self._fd, 8)
        except BlockingIOError:
            return
        self._callback()


# Wall seconds that may always be made up for: a loaded machine wakes a process up late by many short steps, again and
# again. In a window of 4 s this much is 0.75 %.
_JITTER = 0.03


class Driver:
    """Owns the engine's time. `late` hears by how many wall seconds the schedule moved, once they reach `tell`."""

    def __init__(self, engine: Engine, time_scale: float, late: Callable[[float], None], tell: float = 0.25) -> None:
        self.engine = engine
        self._scale_ms = 1000 * time_scale
        self._due = self._length = 0.0
        self._late, self._tell, self._lost = late, tell, 0.0
        self._alarm = Alarm(asyncio.get_running_loop(), self._step_ended)
        # When the scheduler last gave a token, in monotonic seconds: what /health waits for.
        self.last_step = 0.0
        self._stopped = False

    def submit(self, request: Request) -> None:
        """Queue a request; it starts with the next step, now if the engine is idle."""
        self.engine.submit(request)
        if self.engine.idle:
            self._due = time.monotonic()
            self._next(self.engine.begin())

    def stop(self) -> None:
        """Do no more steps: whoever computed them is dead."""
        self._stopped = True

    def _next(self, length_ms: float | None) -> None:
        if length_ms is not None and not self._stopped:
            self._length = length_ms / self._scale_ms
            self._due += self._length
            self._alarm.set(self._due)

    def _step_ended(self) -> None:
        if self._stopped:
            return
        now = self.last_step = time.monotonic()
        behind = now - self._due
        if behind > _JITTER and behind > self._length:
            self._due = now
            self._lost += behind
            self.engine.late_seconds += behind
            if self._lost >= self._tell:
                self._late(self._lost)
                self._lost = 0.0
        self._next(self.engine.finish_step())
