"""The engine's steps in wall time: what is late is made up for within a step, and otherwise moves the schedule."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from servelab_lab.server import drive
from servelab_lab.server.engine import Request


class Clock:
    """time.monotonic() of the driver, set by hand."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        return self.now


class Steps:
    """An engine whose every step takes 100 simulated ms."""

    late_seconds = 0.0

    idle = True

    def submit(self, request: Request) -> None:
        pass

    def begin(self) -> float:
        return 100.0

    def finish_step(self) -> float:
        return 100.0


class Alarm:
    due = 0.0

    late_seconds = 0.0

    def __init__(self, loop: object, callback: Callable[[], None]) -> None:
        self.ring = callback

    def set(self, when: float) -> None:
        Alarm.due = when


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drive, "time", clock)
    monkeypatch.setattr(drive, "Alarm", Alarm)
    return clock


def play(clock: Clock, late_by: list[float]) -> tuple[list[float], list[float]]:
    """Wake the driver up late by these seconds, step after step; return when each next step is due, and the reports."""
    reports: list[float] = []
    due: list[float] = []

    async def run() -> None:
        # Scale 2: a step lasts 50 wall ms.
        driver = drive.Driver(Steps(), 2, reports.append)  # type: ignore[arg-type]
        driver.submit(Request(1, 1, iter(()), lambda *_: None))
        due.append(Alarm.due)
        for late in late_by:
            clock.now = Alarm.due + late
            driver._alarm.ring()  # type: ignore[attr-defined]
            due.append(Alarm.due)

    asyncio.run(run())
    return due, reports


def test_lateness_of_up_to_a_step_does_not_add_up(clock: Clock) -> None:
    due, reports = play(clock, [0.0, 0.02, 0.049, 0.0])
    assert due == pytest.approx([100.05, 100.10, 100.15, 100.20, 100.25])
    assert reports == []


def test_what_is_later_moves_the_schedule_and_is_not_made_up_for(clock: Clock) -> None:
    due, reports = play(clock, [0.0, 0.2, 0.0])
    # The second step should have ended at 100.10 and did at 100.30; all later ones are 0.2 s late.
    assert due == pytest.approx([100.05, 100.10, 100.35, 100.40])
    assert reports == []


def test_lost_time_is_told_once_it_is_worth_it(clock: Clock) -> None:
    _, reports = play(clock, [0.1, 0.1, 0.1, 0.0, 0.3])
    assert reports == pytest.approx([0.3, 0.3])
