"""What looks odd is named, never removed.

The only measurements left out are those that a guard voided for a cause it names, before anybody saw the ratio.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from servelab.stats.ratios import MARGIN

# In units of the standard deviation that the median absolute deviation stands for.
FAR = 5.0
MAD_TO_SD = 1.4826


def odd(logs: Sequence[Mapping[float, float]]) -> list[tuple[int, float, float]]:
    """(repetition from 0, level, ln ratio minus the level's median) of what lies far from its level's median.

    The scale is pooled over all levels, as the few repetitions of one have none of their own. Fewer than three
    repetitions of a level say nothing, and what differs by less than matters to a verdict is never odd.
    """
    away: list[tuple[int, float, float]] = []
    for level in sorted({level for repetition in logs for level in repetition}):
        here = [(i, repetition[level]) for i, repetition in enumerate(logs) if level in repetition]
        if len(here) < 3:
            continue
        median = float(np.median([value for _, value in here]))
        away += [(i, level, value - median) for i, value in here]
    if not away:
        return []
    scale = MAD_TO_SD * float(np.median([abs(distance) for _, _, distance in away]))
    return [(i, level, distance) for i, level, distance in away if abs(distance) > max(FAR * scale, MARGIN)]
