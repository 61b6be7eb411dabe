"""Whether somebody set the system clock meanwhile, which would make intervals wrong: CLOCK_REALTIME, which the kernel
stamps with, against CLOCK_MONOTONIC, which nobody can set."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

READINGS = 20

# A clock may be slewed by 500 ppm; what goes beyond was a step.
SLEW = 600e-6
JITTER_NS = 5_000_000


@dataclass(frozen=True)
class Offset:
    """CLOCK_REALTIME - CLOCK_MONOTONIC, give or take `unsure` (ns)."""

    ns: int
    unsure: int


def offset(
    real: Callable[[], int] = time.time_ns, monotonic: Callable[[], int] = time.monotonic_ns, readings: int = READINGS
) -> Offset:
    """The surest of some readings. Two clocks cannot be read at once, and a process that waits for a core between the
    two sees them apart although nobody set one; how long the whole reading took says how far apart at most."""
    taken = []
    for _ in range(readings):
        before, now, after = monotonic(), real(), monotonic()
        taken.append(Offset(now - (before + after) // 2, (after - before + 1) // 2))
    return min(taken, key=lambda reading: reading.unsure)


def stepped(before: Offset, after: Offset, wall: int) -> bool:
    """Whether the clock was set between the two readings, which are `wall` ns apart."""
    return abs(after.ns - before.ns) > JITTER_NS + before.unsure + after.unsure + SLEW * wall
