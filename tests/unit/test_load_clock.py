"""A clock that was set voids a level; a client that had to wait for a core does not."""

import time

import pytest

from servelab.load import clock

S = 1_000_000_000
MS = 1_000_000


@pytest.mark.parametrize(
    ("moved", "stepped"),
    [(0, False), (10 * MS, False), (-10 * MS, False), (12 * MS, True), (-12 * MS, True), (3600 * S, True)],
)
def test_a_clock_that_was_set_and_one_that_was_only_slewed(moved: int, stepped: bool) -> None:
    # In 10 s a slew of 500 ppm moves it by 5 ms, and as much is allowed for how it is read.
    before, after = clock.Offset(7 * S, 0), clock.Offset(7 * S + moved, 0)
    assert clock.stepped(before, after, 10 * S) is stepped


def test_what_nobody_knows_exactly_is_no_proof() -> None:
    assert not clock.stepped(clock.Offset(0, 0), clock.Offset(30 * MS, 20 * MS), 10 * S)
    assert clock.stepped(clock.Offset(0, 0), clock.Offset(32 * MS, 20 * MS), 10 * S)


class Machine:
    """Two clocks, 5 s apart, of a machine on which this process has to wait before some of its readings (by number)."""

    def __init__(self, waits: dict[int, int], apart: int = 5 * S) -> None:
        self.now, self.reading, self.waits, self.apart = 100 * S, 0, waits, apart

    def _read(self) -> int:
        self.now += 100 + self.waits.get(self.reading, 0)
        self.reading += 1
        return self.now

    def monotonic(self) -> int:
        return self._read()

    def real(self) -> int:
        return self._read() + self.apart


def read(machine: Machine, readings: int = clock.READINGS) -> clock.Offset:
    return clock.offset(machine.real, machine.monotonic, readings)


@pytest.mark.parametrize("waits", [{}, {1: 40 * MS}, {2: 40 * MS}, dict.fromkeys(range(50), 40 * MS)])
def test_a_process_that_waits_between_the_two_clocks_sees_none_that_was_set(waits: dict[int, int]) -> None:
    undisturbed, disturbed = read(Machine({})), read(Machine(waits))
    assert undisturbed == clock.Offset(5 * S, 100)
    assert disturbed == clock.Offset(5 * S, 100)  # some of its readings were not disturbed
    assert not clock.stepped(undisturbed, disturbed, S)


@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_process_that_always_waits_says_how_unsure_it_is(number: int) -> None:
    waits = {3 * i + number: 40 * MS for i in range(clock.READINGS)}
    disturbed = read(Machine(waits))
    assert abs(disturbed.ns - 5 * S) <= disturbed.unsure
    assert not clock.stepped(read(Machine({})), disturbed, S)
    # A step that is larger than that is seen all the same.
    assert clock.stepped(read(Machine({})), read(Machine(waits, 5 * S + 200 * MS)), S)


def test_the_clocks_of_this_machine() -> None:
    taken = clock.offset()
    # The difference of two readings one after the other is never above the offset.
    assert max(time.time_ns() - time.monotonic_ns() for _ in range(20)) <= taken.ns + taken.unsure + 1000
