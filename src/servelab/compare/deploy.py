"""From comparisons to what to run: the best mode at each load, and whether an adaptive mode is as good as the best."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import Any

from servelab.bundle import Bundle
from servelab.compare.answer import Comparison, accepted, levels_of, step_ms
from servelab.stats import ratios
from servelab.stats.ratios import MARGIN, Ratio

# repetition (by the base's run) → arm → its run
Runs = Mapping[str, Mapping[str, Bundle]]


@dataclass(frozen=True)
class Choice:
    """The mode to run at one level, and those that were not told apart from it."""

    concurrency: int
    mode: str
    also: list[str]


@dataclass(frozen=True)
class Judged:
    """An adaptive mode at one level, against the better of the two modes that it is made of. ``side`` −1: shown to be
    slower by more than the margin; ``holds``: shown to be no slower than that."""

    concurrency: int
    best: str
    ratio: Ratio
    side: int
    holds: bool
    why: str


def choices(comparisons: Sequence[Comparison]) -> list[Choice]:
    """Per level the fastest mode among those that may be compared, the base where none was shown to be faster.

    Ascending; levels at which nothing was compared are missing. A mode is named beside the base where no difference to
    it was shown, and beside another where the interval of their ratio holds 1: without adjustment, so that rather one
    too many is named.
    """
    sound = [c for c in comparisons if not c.refused or c.forced]
    if not sound:
        return []
    runs = by_repetition(sound)
    base = sound[0].base
    found = []
    for level in sorted({row.concurrency for c in sound for row in c.rows if row.ratio}):
        here = {c.other: row for c in sound for row in c.rows if row.concurrency == level and row.ratio}
        ahead = {mode: row.ratio.value for mode, row in here.items() if row.side > 0 and row.ratio}
        best = max(ahead, key=lambda mode: ahead[mode]) if ahead else base
        also = []
        for mode in [base, *here]:
            if mode == best or (mode == base and best != base):
                continue
            if best == base:
                also += [mode] if here[mode].side == 0 else []
                continue
            ratio = paired(runs, mode, best, level)
            if ratio is not None and ratio.low is not None and ratio.high is not None and ratio.low <= 1 <= ratio.high:
                also.append(mode)
        found.append(Choice(level, best, also))
    return found


def hint(comparisons: Sequence[Comparison]) -> list[str]:
    """Which mode to run at which load, as sentences."""
    found = choices(comparisons)
    said = []
    for mode, group in groupby(found, key=lambda choice: choice.mode):
        levels = list(group)
        first, last = levels[0].concurrency, levels[-1].concurrency
        span = f"C={first}" if first == last else f"C={first} to {last}"
        also = sorted({other for choice in levels for other in choice.also})
        beside = [f"{other} at C={', '.join(str(c.concurrency) for c in levels if other in c.also)}" for other in also]
        said.append(f"{span}: {mode}" + (f" (not told apart: {'; '.join(beside)})" if beside else "") + ".")
    for left, right in pairwise(found):
        told_apart = left.mode not in right.also and right.mode not in left.also
        if left.mode != right.mode and told_apart:
            said.append(f"{left.mode} and {right.mode} change places {_boundary(comparisons, left, right)}.")
    for c in comparisons:
        if c.refused and not c.forced:
            said.append(f"{c.other} is left out: it cannot be compared with {c.base}.")
    return said


def routes(comparisons: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The same for a program in front of the servers: from how many requests in flight on which mode."""
    found = choices(comparisons)
    said: list[dict[str, Any]] = []
    for before, choice in zip([None, *found], found, strict=False):
        if before is None:
            said.append({"from": 1, "mode": choice.mode})
        elif before.mode != choice.mode:
            crossing = _crossing(comparisons, before, choice)
            edge = crossing.estimate if crossing else math.sqrt(before.concurrency * choice.concurrency)
            said.append({"from": math.floor(edge) + 1, "mode": choice.mode})
    return said


def _crossing(comparisons: Sequence[Comparison], left: Choice, right: Choice) -> Any:
    """The crossover between the two modes of neighbouring levels, where one of them is the base."""
    for c in comparisons:
        both = {c.base, c.other} == {left.mode, right.mode}
        if both and c.crossing and left.concurrency <= c.crossing.estimate <= right.concurrency:
            return c.crossing
    return None


def _boundary(comparisons: Sequence[Comparison], left: Choice, right: Choice) -> str:
    from servelab.compare.words import where

    crossing = _crossing(comparisons, left, right)
    return f"at {where(crossing)}" if crossing else f"between C={left.concurrency} and C={right.concurrency}"


def judge(comparisons: Sequence[Comparison], mode: str, source: str) -> list[Judged]:
    """The adaptive *mode* at every level against the better of the base and its *source*, adjusted over the levels.

    The better one is chosen by the same figures, which flatters it: a mode that holds against it holds all the more.
    """
    runs = by_repetition(comparisons)
    base = comparisons[0].base
    levels = sorted({row.concurrency for c in comparisons for row in c.rows if c.other == mode and row.ratio})
    rows: list[tuple[int, str, Ratio]] = []
    for level in levels:
        against = {name: ratio for name in (base, source) if (ratio := paired(runs, mode, name, level)) is not None}
        if against:
            best = min(against, key=lambda name: against[name].value)
            rows.append((level, best, against[best]))
    p_values = [ratio.p for _, _, ratio in rows]
    adjusted = ratios.holm([p for p in p_values if p is not None])
    after = iter(adjusted)
    found = []
    for level, best, ratio in rows:
        side = ratios.side(ratio, next(after) if ratio.p is not None else None)
        holds = ratio.low is not None and ratio.low > 1 / (1 + MARGIN)
        found.append(Judged(level, best, ratio, side, holds, _why(runs, mode, best, level) if side < 0 else ""))
    return found


def judgement(comparisons: Sequence[Comparison], mode: str, source: str) -> list[str]:
    """Whether the adaptive mode is worth running in place of the two that it is made of, in sentences."""
    found = judge(comparisons, mode, source)
    if not found:
        return [f"{mode} was not measured beside {comparisons[0].base} and {source}."]
    worse = [j for j in found if j.side < 0]
    open_ = [j for j in found if j.side >= 0 and not j.holds]
    names = f"the better of {comparisons[0].base} and {source}"
    single = found[0].ratio.low is None
    said = []
    if not worse and not open_:
        said.append(f"{mode} is at no level more than {MARGIN:.0%} slower than {names}: one server for every load.")
    if worse:
        said.append(f"{mode} is slower than {names} at C={_levels(worse)}:")
        said += [f"C={j.concurrency}: {j.ratio.value:.3f} times {j.best}. {j.why}".strip() for j in worse]
    if open_:
        how = "one run of each has no interval" if single else f"the interval reaches below {1 / (1 + MARGIN):.3f}"
        said.append(f"At C={_levels(open_)} neither a loss beyond {MARGIN:.0%} nor its absence was shown: {how}.")
    return said


def _levels(found: Sequence[Judged]) -> str:
    return ", ".join(str(j.concurrency) for j in found)


def _why(runs: Runs, mode: str, best: str, level: int) -> str:
    """What one step costs and yields in both, as far as it was recorded."""
    told = []
    for name in (mode, best):
        entries = [
            levels_of(arms[name])[level] for arms in runs.values() if name in arms and level in levels_of(arms[name])
        ]
        steps = [ms for entry in entries if (ms := step_ms(entry))]
        tokens = [accepted(entry) or 1.0 for entry in entries]
        if not steps:
            return ""
        told.append(f"{sum(steps) / len(steps):.1f} ms for {sum(tokens) / len(tokens):.2f} tokens in {name}")
    return f"A step takes {', '.join(told)}."


def by_repetition(comparisons: Sequence[Comparison]) -> Runs:
    """The runs of all arms that belong to one repetition: those compared with the same run of the base."""
    found: dict[str, dict[str, Bundle]] = {}
    for c in comparisons:
        for base, other in c.pairs:
            found.setdefault(base.path.name, {c.base: base})[c.other] = other
    return found


def paired(runs: Runs, mode: str, against: str, level: int) -> Ratio | None:
    """The ratio of two arms at a level over the repetitions that have both, validly; None without any."""
    logs = []
    for arms in runs.values():
        if mode in arms and against in arms:
            rates = [
                entry["output_tok_s"] if (entry := levels_of(arms[name]).get(level)) and entry["valid"] else None
                for name in (mode, against)
            ]
            if rates[0] and rates[1]:
                logs.append(math.log(rates[0] / rates[1]))
    return ratios.paired(logs) if logs else None
