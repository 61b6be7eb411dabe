"""How many times as fast: paired ratios over repetitions, what they show, and how many more would show it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import special

CONFIDENCE = 0.95
# What one must win by to be called faster: less vanishes with the next release of anything.
MARGIN = 0.02
# More repetitions than anybody makes: "it cannot be shown in practice".
MOST_REPEATS = 200


@dataclass(frozen=True)
class Ratio:
    """A ratio of two arms with its t interval. ``low`` and ``high`` are None for fewer than two pairs.

    ``log_sd`` is the standard deviation of the paired logarithms, ``p`` the two-sided probability of a mean this far
    from 1 if the arms were equal; both None for fewer than two pairs.
    """

    value: float
    low: float | None
    high: float | None
    n: int
    log_sd: float | None
    p: float | None

    @property
    def reach(self) -> float:
        """How far the interval reaches beyond the ratio, as a share of it; infinite without an interval."""
        return math.inf if self.high is None else self.high / self.value - 1


def t_quantile(df: float, confidence: float = CONFIDENCE) -> float:
    """The two-sided quantile: 4.30 for two degrees of freedom at 95 %."""
    return float(special.stdtrit(df, (1 + confidence) / 2))


def paired(logs: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """The ratio behind *logs*, one ln(other / base) per repetition. Raises ValueError for none.

    A t interval of the mean, taken back by exp: the percentile bootstrap's nominal 95 % covers 75 to 87 % at the three
    to seven repetitions that a server start can be afforded.
    """
    values = np.asarray(logs, dtype=np.float64)
    n = len(values)
    if not n:
        raise ValueError("a ratio needs at least one pair")
    mean = float(values.mean())
    if n < 2:
        return Ratio(math.exp(mean), None, None, n, None, None)
    sd = float(values.std(ddof=1))
    error = sd / math.sqrt(n)
    half = t_quantile(n - 1, confidence) * error
    equal = 1.0 if mean == 0 else 0.0
    p = float(2 * special.stdtr(n - 1, -abs(mean) / error)) if error > 0 else equal
    return Ratio(math.exp(mean), math.exp(mean - half), math.exp(mean + half), n, sd, p)


def holm(p_values: Sequence[float]) -> list[float]:
    """The same p-values, raised so that the chance of even one false claim among them stays what it says.

    Holm's step-down: valid however the claims depend on each other, which those of one set of starts do, and never
    weaker than Bonferroni's.
    """
    order = sorted(range(len(p_values)), key=lambda i: p_values[i])
    adjusted = [0.0] * len(p_values)
    worst = 0.0
    for rank, i in enumerate(order):
        worst = max(worst, min(1.0, (len(order) - rank) * p_values[i]))
        adjusted[i] = worst
    return adjusted


def side(ratio: Ratio, p: float | None = None, margin: float = MARGIN, confidence: float = CONFIDENCE) -> int:
    """1: a win beyond *margin* was shown, −1: a loss, 0: neither. *p*: the adjusted p-value, if there is one.

    A single pair has no interval; then the ratio alone decides, and whoever prints it must say so.
    """
    p = ratio.p if p is None else p
    if p is not None and p > 1 - confidence:
        return 0
    if ratio.value > 1 + margin:
        return 1
    return -1 if ratio.value < 1 / (1 + margin) else 0


def same(ratio: Ratio, margin: float = MARGIN) -> bool:
    """Whether the interval shows that the arms differ by no more than *margin*: more than no difference shown."""
    return ratio.low is not None and ratio.high is not None and ratio.low > 1 / (1 + margin) and ratio.high < 1 + margin


def repeats_needed(
    log_sd: float, difference: float = MARGIN, power: float = 0.8, confidence: float = CONFIDENCE
) -> int | None:
    """Fewest repetitions that show a true ratio of 1 + *difference* in a share *power* of all campaigns.

    From the noncentral t distribution. None: more than MOST_REPEATS. Two at least: one pair has no interval.
    """
    effect = math.log1p(difference)
    if log_sd <= 0:
        return 2
    for n in range(2, MOST_REPEATS + 1):
        limit = t_quantile(n - 1, confidence)
        shift = effect * math.sqrt(n) / log_sd
        # scipy's tail is nan far out, where the power is 1.
        missed = special.nctdtr(n - 1, shift, limit) if shift < limit + 30 else 0.0
        if 1 - missed >= power:
            return n
    return None


def smallest_shown(log_sd: float, n: int, confidence: float = CONFIDENCE) -> float:
    """The noise floor: how far from 1 the mean of *n* pairs of equal arms still goes by chance, as a share of 1."""
    return math.expm1(t_quantile(n - 1, confidence) * log_sd / math.sqrt(n))


# Who looks earlier stops too often at a width that is narrow by chance: from three on, intervals that were stopped for
# cover as little as 90 % (docs/statistics.md).
LEAST_TO_STOP = 5


def narrow(found: Sequence[Ratio], share: float) -> bool:
    """Whether every interval reaches no further than *share* of its ratio, each from enough pairs to say so.

    It asks how wide they are and never where they lie: that would favour the lucky.
    """
    return bool(found) and min(ratio.n for ratio in found) >= LEAST_TO_STOP and max(r.reach for r in found) <= share


def start_noise(rates: Sequence[Sequence[float]]) -> tuple[float, int] | None:
    """What one start differs from the next by: (standard deviation of the logarithms, degrees of freedom).

    *rates* holds, per level (or per mode and level), what equal starts reached: the A/A runs, or the repetitions of a
    mode. The deviations are pooled. None where nothing was repeated.
    """
    squares, df = 0.0, 0
    for same_arm in rates:
        logs = np.log(np.asarray(same_arm, dtype=np.float64))
        if len(logs) > 1:
            squares += float(((logs - logs.mean()) ** 2).sum())
            df += len(logs) - 1
    return (math.sqrt(squares / df), df) if df else None
