"""Where one arm stops beating the other, with an interval that can be believed.

The mean log ratio is taken as linear in ln C between neighbouring levels. The interval holds every C at which the
t band around that line, widened by what the line may miss of a curve, contains 0.

Two things vary: the start, which moves all levels of a repetition together, and the single level. A standard
deviation pooled over levels as if they were independent claims more degrees of freedom than there were starts. So both
parts are estimated (analysis of variance, levels × repetitions, gaps allowed) and the band gets the degrees of
freedom of their mixture (Satterthwaite).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt
from scipy import special

from servelab.stats.ratios import CONFIDENCE

Array = npt.NDArray[np.float64]
# Steps per segment at which the band is looked at; its ends are then interpolated, far below the noise.
STEPS = 64


@dataclass(frozen=True)
class Crossing:
    """``estimate`` with its interval, and the measured levels around it.

    ``low`` / ``high`` None: the interval does not end inside the measured levels. ``bounded`` False: nothing was
    repeated, so there is none. ``interpolation``: the share of the estimate by which the straight line may be off.
    """

    estimate: float
    low: float | None
    high: float | None
    bracket: tuple[float, float]
    interpolation: float
    bounded: bool


class Curve:
    """The log ratios of some repetitions at some levels.

    ``levels``: L ascending positive numbers; ``logs``: one mapping level → ln(other / base) per repetition, levels
    may be missing. Every level is in at least one repetition. Raises ValueError for fewer than two levels.
    """

    def __init__(self, logs: Sequence[Mapping[float, float]]) -> None:
        self.levels = sorted({level for repetition in logs for level in repetition})
        if len(self.levels) < 2:
            raise ValueError("a curve needs at least two levels")
        self.x: Array = np.log(np.asarray(self.levels, dtype=np.float64))
        table = [[repetition.get(level, math.nan) for level in self.levels] for repetition in logs if repetition]
        self.table: Array = np.asarray(table, dtype=np.float64)
        self.measured = ~np.isnan(self.table)
        self.means: Array = np.nanmean(self.table, axis=0)

    @cached_property
    def _components(self) -> tuple[float, float, float, int, int]:
        """(sum of squares between starts, its expectation's factor of the start's variance, mean square of the rest,
        degrees of freedom of both). Henderson's method: right for gaps, the textbook's figures without."""
        rows, columns = np.nonzero(self.measured)
        y = self.table[rows, columns]
        n, levels = self.table.shape
        by_level = np.zeros((len(y), levels))
        by_level[np.arange(len(y)), columns] = 1
        by_start = np.zeros((len(y), n))
        by_start[np.arange(len(y)), rows] = 1
        only_levels = y - by_level @ np.linalg.lstsq(by_level, y, rcond=None)[0]
        both = np.hstack([by_level, by_start])
        rest = y - both @ np.linalg.lstsq(both, y, rcond=None)[0]
        rank = int(np.linalg.matrix_rank(both))
        between_df, rest_df = rank - levels, len(y) - rank
        squares_rest = float(rest @ rest)
        squares_between = max(0.0, float(only_levels @ only_levels) - squares_rest)
        centred = by_start - by_level @ np.linalg.lstsq(by_level, by_start, rcond=None)[0]
        factor = float((centred * centred).sum())
        return squares_between, factor, (squares_rest / rest_df if rest_df else 0.0), between_df, rest_df

    def band(self, where: Array, segment: int, confidence: float = CONFIDENCE) -> tuple[Array, Array, Array]:
        """(line, t half width, what the line may miss) at the ln C *where*, all between levels segment and segment + 1.

        The half width is inf where nothing was repeated.
        """
        x0, x1 = self.x[segment], self.x[segment + 1]
        weight = (where - x0) / (x1 - x0)
        weights = np.stack([1 - weight, weight])
        line = weights.T @ self.means[segment : segment + 2]
        squares, factor, rest, between_df, rest_df = self._components
        if between_df < 1 or rest_df < 1:
            return line, np.full_like(where, np.inf), self.missed(where, segment)
        counts = self.measured[:, segment : segment + 2]
        shares = counts / counts.sum(axis=0)
        # The line is a weighted mean of the repetitions: a start's error enters with its whole weight, a level's alone.
        of_start = ((shares @ weights) ** 2).sum(axis=0)
        of_level = (weights**2 / counts.sum(axis=0)[:, None]).sum(axis=0)
        from_between = of_start / factor * squares
        from_rest = (of_level - of_start * between_df / factor) * rest
        variance = np.maximum(from_between + from_rest, of_level * rest)
        df = (from_between + from_rest) ** 2 / (from_between**2 / between_df + from_rest**2 / rest_df + 1e-300)
        df = np.clip(df, between_df, between_df + rest_df)
        half = special.stdtrit(df, (1 + confidence) / 2) * np.sqrt(variance)
        return line, half, self.missed(where, segment)

    def missed(self, where: Array, segment: int) -> Array:
        """How far a curve may be from the straight line: as a parabola with the larger of the neighbouring bends is."""
        bends = [0.0]
        for i in (segment - 1, segment):
            if 0 <= i <= len(self.x) - 3:
                left = (self.means[i + 1] - self.means[i]) / (self.x[i + 1] - self.x[i])
                right = (self.means[i + 2] - self.means[i + 1]) / (self.x[i + 2] - self.x[i + 1])
                bends.append(abs(float((right - left) / (self.x[i + 2] - self.x[i]))))
        away: Array = (where - self.x[segment]) * (self.x[segment + 1] - where)
        return max(bends) * away

    def crossing(self, low: float, high: float, confidence: float = CONFIDENCE) -> Crossing | None:
        """Where the line passes 0 between the levels *low* and *high*; None if it does not.

        Where noise makes it pass more than once in between, the middle of the passages is the estimate.
        """
        first, last = self.levels.index(low), self.levels.index(high)
        roots, slopes, at = [], [], []
        for i in range(first, last):
            y0, y1 = self.means[i], self.means[i + 1]
            if (y0 < 0) != (y1 < 0):
                roots.append(float(self.x[i] - y0 * (self.x[i + 1] - self.x[i]) / (y1 - y0)))
                slopes.append(abs(float((y1 - y0) / (self.x[i + 1] - self.x[i]))))
                at.append(i)
        if not roots:
            return None
        root = sum(roots) / len(roots)
        near = min(range(len(roots)), key=lambda i: abs(roots[i] - root))
        missed = float(self.missed(np.asarray([roots[near]]), at[near])[0]) / slopes[near]
        ends = self._zone(roots, confidence)
        bracket = (self.levels[at[0]], self.levels[at[-1] + 1])
        return Crossing(
            estimate=math.exp(root),
            low=None if ends is None or ends[0] is None else math.exp(ends[0]),
            high=None if ends is None or ends[1] is None else math.exp(ends[1]),
            bracket=bracket,
            interpolation=math.expm1(missed),
            bounded=ends is not None,
        )

    def _zone(self, roots: Sequence[float], confidence: float) -> tuple[float | None, float | None] | None:
        """The connected stretch around *roots* on which the band contains 0. None: there is no band."""
        xs, distance = [], []
        for segment in range(len(self.x) - 1):
            where = np.linspace(self.x[segment], self.x[segment + 1], STEPS, endpoint=True)
            line, half, missed = self.band(where, segment, confidence)
            if not np.isfinite(half).all():
                return None
            xs.append(where)
            distance.append(np.abs(line) - half - missed)  # above 0: the band leaves 0 out
        x, out = np.concatenate(xs), np.concatenate(distance)
        start, end = np.searchsorted(x, min(roots)), np.searchsorted(x, max(roots))
        left = next((i for i in range(int(start) - 1, -1, -1) if out[i] > 0), None)
        right = next((i for i in range(int(end), len(x)) if out[i] > 0), None)
        return (
            None if left is None else _between(x, out, left, left + 1, min(roots)),
            None if right is None else _between(x, out, right, right - 1, max(roots)),
        )


def _between(x: Array, out: Array, outside: int, inside: int, root: float) -> float:
    """Where *out* passes 0 between two neighbouring points; *root* where the whole stretch lies between two points."""
    if out[inside] > 0:
        return root
    share = out[outside] / (out[outside] - out[inside])
    return float(x[outside] + share * (x[inside] - x[outside]))


def refinement(crossing: Crossing, levels: Sequence[float]) -> list[int]:
    """Two levels to add: the geometric middle of the bracket, and that of the half in which the estimate lies.

    Whole numbers not among *levels*; fewer where the bracket has no room. Without them the straight line is off by
    several percent, as ratios of real servers bend.
    """
    low, high = crossing.bracket
    middle = math.sqrt(low * high)
    half = (low, middle) if crossing.estimate < middle else (middle, high)
    proposed: list[int] = []
    for level in (middle, math.sqrt(half[0] * half[1])):
        whole = round(level)
        if low < whole < high and whole not in levels and whole not in proposed:
            proposed.append(whole)
    return sorted(proposed)
