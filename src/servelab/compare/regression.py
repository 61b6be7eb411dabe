"""Has anything become slower? The same modes in two campaigns: before and after an upgrade of driver, stack or kernel.

What was upgraded is the treatment here, so it is told and refuses nothing; all else that differs refuses as between
modes. The starts of two campaigns have nothing in common but their prompts, so they are not paired: the interval is
Welch's, and with one run on one side that of the pooled deviation.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from scipy import special

from servelab.bundle import Bundle, BundleError
from servelab.compare import guard, pairs, words
from servelab.compare.answer import levels_of
from servelab.stats import ratios
from servelab.stats.ratios import CONFIDENCE, MARGIN, Ratio

SLOWER = 3  # exit status
# What an upgrade changes; each begins the sentence of the guard that tells it.
UPGRADED = (
    "the SGLang release",
    "the driver",
    "the kernel",
    "the node's boot",
    "the stack",
    "the client",
    "the client's build",
)


@dataclass(frozen=True)
class Row:
    """One mode at one level. Rates are geometric means in tokens per second; ``ratio``: now / before, without interval
    where neither side was repeated; ``side``: −1 shown to be slower beyond the margin, 1 faster, 0 neither."""

    mode: str
    concurrency: int
    before: float
    now: float
    ratio: Ratio
    side: int


@dataclass(frozen=True)
class Watch:
    """``refused``: why the campaigns cannot be compared; ``changed``: what was upgraded; ``left_out``: what only one of
    them measured."""

    before: str
    now: str
    rows: list[Row]
    refused: list[str]
    changed: list[str]
    left_out: list[str]
    simulated: dict[str, Any] | None
    forced: bool = False

    @property
    def slower(self) -> list[Row]:
        return [row for row in self.rows if row.side < 0 and row.ratio.low is not None]

    @property
    def unknown(self) -> bool:
        return all(row.ratio.low is None for row in self.rows)


def campaign_of(tag: str, now: Path) -> Path:
    """The directory of the earlier campaign: a path, or the name of one beside *now*. Raises BundleError."""
    for path in (Path(tag), now.resolve().parent / tag):
        if path.is_dir():
            return path
    raise BundleError(f"--baseline {tag} is no directory, and {now.resolve().parent} has no campaign of that name.")


def watch(before: Path, now: Path, *, forced: bool = False) -> Watch:
    """Compare each mode of *now* with the same mode of *before*. Raises BundleError where they share none."""
    old, new = pairs.arms_of(before), pairs.arms_of(now)
    shared = [arm for arm in new if arm in old]
    if not shared:
        raise BundleError(
            f"{before} measured {', '.join(old) or 'nothing'}, {now} {', '.join(new) or 'nothing'}: no mode is in both."
        )
    rows: list[Row] = []
    refused: dict[str, None] = {}
    changed: dict[str, None] = {}
    for arm in shared:
        earlier, later = list(old[arm].values()), list(new[arm].values())
        rows += _rows(arm, earlier, later)
        names = (f"{arm} of {before.name}", f"{arm} of {now.name}")
        for finding in guard.findings(*names, pairs.pair(earlier, later)):
            if finding.text.startswith(tuple(f"{what} differs" for what in UPGRADED)):
                changed[finding.text] = None
            elif finding.decisive and " always ran second" not in finding.text:
                refused[finding.text] = None
    adjusted = iter(ratios.holm([row.ratio.p for row in rows if row.ratio.p is not None]))
    rows = [
        replace(row, side=ratios.side(row.ratio, next(adjusted)) if row.ratio.p is not None else row.side)
        for row in rows
    ]
    left_out = [f"{arm} was measured in {before.name} only." for arm in old if arm not in new]
    left_out += [f"{arm} was measured in {now.name} only." for arm in new if arm not in old]
    runs = [run for arm in shared for run in [*old[arm].values(), *new[arm].values()]]
    simulated = next((run.simulated for run in runs if run.simulated), None)
    return Watch(before.name, now.name, rows, list(refused), list(changed), left_out, simulated, forced)


def unpaired(before: Sequence[float], now: Sequence[float], confidence: float = CONFIDENCE) -> Ratio:
    """now / before of two independent sets of logarithms, as a ratio with its t interval; ``n`` is the smaller set.

    Welch's where both were repeated. Where only one was, its deviation stands for both (the pooled test); where neither
    was, there is none.
    """
    a, b = np.asarray(before, dtype=np.float64), np.asarray(now, dtype=np.float64)
    difference = float(b.mean() - a.mean())
    n, m = len(a), len(b)
    if n < 2 and m < 2:
        return Ratio(math.exp(difference), None, None, 1, None, None)
    squares_a, squares_b = float(((a - a.mean()) ** 2).sum()), float(((b - b.mean()) ** 2).sum())
    if n > 1 and m > 1:
        part_a, part_b = squares_a / (n - 1) / n, squares_b / (m - 1) / m
        variance = part_a + part_b
        df = variance**2 / (part_a**2 / (n - 1) + part_b**2 / (m - 1)) if variance else float(n + m - 2)
    else:
        df = float(n + m - 2)
        variance = (squares_a + squares_b) / df * (1 / n + 1 / m)
    error = math.sqrt(variance)
    half = ratios.t_quantile(df, confidence) * error
    p = float(2 * special.stdtr(df, -abs(difference) / error)) if error else float(difference == 0)
    low, high = math.exp(difference - half), math.exp(difference + half)
    return Ratio(math.exp(difference), low, high, min(n, m), math.sqrt((squares_a + squares_b) / (n + m - 2)), p)


def _rows(arm: str, earlier: Sequence[Bundle], later: Sequence[Bundle]) -> list[Row]:
    old, new = _logs(earlier), _logs(later)
    found = []
    for c in sorted(old.keys() & new.keys()):
        ratio = unpaired(old[c], new[c])
        before, now = (math.exp(sum(logs) / len(logs)) for logs in (old[c], new[c]))
        found.append(Row(arm, c, before, now, ratio, ratios.side(ratio)))
    return found


def _logs(runs: Sequence[Bundle]) -> Mapping[int, list[float]]:
    """concurrency → the logarithms of its valid rates."""
    found: dict[int, list[float]] = {}
    for run in runs:
        for c, level in levels_of(run).items():
            if level["valid"] and level["output_tok_s"]:
                found.setdefault(c, []).append(math.log(level["output_tok_s"]))
    return found


def text(found: Watch) -> str:
    """The answer, the table and what to know, as Markdown."""
    mark = " (simulated)" if found.simulated else ""
    lines = [
        f"| mode | C | {found.before} tok/s{mark} | {found.now} tok/s{mark} | ratio | verdict |",
        "|---|---:|---:|---:|---:|---|",
    ]
    for row in found.rows:
        cells = (words.number(row.before, 1), words.number(row.now, 1), words.interval(row.ratio))
        lines.append(f"| {row.mode} | {row.concurrency} | " + " | ".join(cells) + f" | {_verdict(row)} |")
    notes = [f"- Changed: {what}" for what in found.changed] + [f"- {what}" for what in found.left_out]
    if any(what.startswith("the client") for what in found.changed):
        notes.append("- Another client measured: a difference may be its own.")
    return "\n".join(
        ["\n".join(lines), "", f"**{headline(found)}**", "", *(f"- {why}" for why in found.refused), *notes]
    )


def headline(found: Watch) -> str:
    if found.refused and not found.forced:
        return "No answer: these campaigns differ in more than an upgrade."
    said = _answer(found)
    return f"NOT COMPARABLE, printed by force: {said}" if found.refused else said


def _answer(found: Watch) -> str:
    if not found.rows:
        return "No level was measured validly in both campaigns: there is no answer."
    if found.unknown:
        return "One run on each side: the noise between two starts is unknown, so nothing can be called slower. Repeat."
    if found.slower:
        places = [f"{row.mode} at C={row.concurrency} ({words.interval(row.ratio)})" for row in found.slower]
        return f"Slower than {found.before}: {', '.join(places)}."
    same = [row for row in found.rows if ratios.same(row.ratio)]
    widest = max(row.ratio.reach for row in found.rows if row.ratio.high is not None)
    shown = "every level is" if len(same) == len(found.rows) else f"{len(same)} of {len(found.rows)} levels are"
    return (
        f"Nothing was shown to be slower than {found.before} by more than {MARGIN:.0%}; {shown} shown to be equal "
        f"within it, and the widest interval is ±{widest:.1%}."
    )


def _verdict(row: Row) -> str:
    if row.ratio.low is None:
        return "unknown: one run on each side"
    if row.side:
        return "faster" if row.side > 0 else "slower"
    return f"equal within {MARGIN:.0%}" if ratios.same(row.ratio) else "no difference shown"


def status(found: Watch) -> int:
    """0: nothing was shown to be slower; 3: something was; 1: there is no answer."""
    if found.refused or not found.rows or found.unknown:
        return 1
    return SLOWER if found.slower else 0
