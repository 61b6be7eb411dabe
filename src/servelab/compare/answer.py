"""From paired runs to the answer: per level a ratio with its interval, over all levels one of seven stories."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from servelab.bundle import Bundle
from servelab.compare import guard
from servelab.compare.guard import Finding
from servelab.compare.pairs import Arms, Pair
from servelab.stats import outliers, ratios
from servelab.stats.crossover import Crossing, Curve, refinement
from servelab.stats.ratios import MARGIN, Ratio

# A request's first token is no step's, which makes its tokens per verify a little more than a chunk's.
MORE_THAN_A_CHUNK = 1.25
# The story is told by levels that decided; these outcomes have exactly one change of sides.
SINGLE = ("below", "above")


@dataclass(frozen=True)
class Row:
    """One level. Rates are output tokens per second of all requests together (geometric means over the repetitions
    used), times milliseconds, accept lengths tokens per verify; None where unknown. ``side``: 1 where the other arm
    was shown to be faster, −1 slower, 0 neither. ``same``: shown to differ by no more than the margin."""

    concurrency: int
    base: float | None
    other: float | None
    ratio: Ratio | None
    side: int
    same: bool
    accept_length: float | None
    base_step_ms: float | None
    other_step_ms: float | None
    note: str


@dataclass(frozen=True)
class Comparison:
    """Two arms compared. ``outcome`` is a word of `outcome_of`, ``refused`` the reasons for giving no headline."""

    arms: Arms
    rows: list[Row]
    outcome: str
    crossing: Crossing | None
    per_user: Crossing | None
    findings: list[Finding]
    next_levels: list[int] = field(default_factory=list)
    forced: bool = False

    @property
    def base(self) -> str:
        return self.arms.base

    @property
    def other(self) -> str:
        return self.arms.other

    @property
    def pairs(self) -> list[Pair]:
        return self.arms.pairs

    @property
    def runs(self) -> list[Bundle]:
        return [run for both in self.pairs for run in both]

    @property
    def refused(self) -> list[str]:
        decisive = any(finding.decisive for finding in self.findings)
        return [finding.text for finding in self.findings] if decisive else []

    @property
    def simulated(self) -> dict[str, Any] | None:
        return next((run.simulated for run in self.runs if run.simulated), None)


def compare(arms: Arms, *, forced: bool = False) -> Comparison:
    """Compare the arms level by level."""
    return compare_all([arms], forced=forced)[0]


def compare_all(everything: Sequence[Arms], *, forced: bool = False) -> list[Comparison]:
    """All comparisons of a report. What is claimed of single levels is adjusted over all levels of all of them."""
    tables = [_rows(arms) for arms in everything]
    tested = [
        (i, j) for i, rows in enumerate(tables) for j, row in enumerate(rows) if row.ratio and row.ratio.p is not None
    ]
    p_values = [r.p for i, j in tested if (r := tables[i][j].ratio) is not None and r.p is not None]
    for (i, j), p in zip(tested, ratios.holm(p_values), strict=True):
        ratio = tables[i][j].ratio
        assert ratio is not None
        tables[i][j] = replace(tables[i][j], side=ratios.side(ratio, p))
    return [_comparison(arms, rows, forced) for arms, rows in zip(everything, tables, strict=True)]


def _comparison(arms: Arms, rows: list[Row], forced: bool) -> Comparison:
    decided = [(row.concurrency, row.side) for row in rows if row.ratio]
    outcome = outcome_of([side for _, side in decided])
    logs = level_logs(arms.pairs)
    crossing = _crossing(logs, decided) if outcome in SINGLE else None
    measured = [row.concurrency for row in rows if row.ratio]
    return Comparison(
        arms=arms,
        rows=rows,
        outcome=outcome,
        crossing=crossing,
        per_user=per_user_crossing(arms.pairs),
        findings=guard.findings(arms.base, arms.other, arms.pairs),
        next_levels=refinement(crossing, measured) if crossing and crossing.interpolation > MARGIN / 2 else [],
        forced=forced,
    )


def outcome_of(sides: Sequence[int]) -> str:
    """Which story the sides of ascending levels tell; levels without a shown difference tell none.

    Returns everywhere, nowhere, below, above, several, no difference or nothing valid.
    """
    decided = [s for s in sides if s]
    if not sides:
        return "nothing valid"
    if not decided:
        return "no difference"
    changes = sum(a != b for a, b in pairwise(decided))
    if changes == 0:
        return "everywhere" if decided[0] > 0 else "nowhere"
    if changes > 1:
        return "several"
    return "below" if decided[0] > 0 else "above"


def _crossing(logs: Sequence[dict[float, float]], decided: Sequence[tuple[int, int]]) -> Crossing | None:
    """The one passage between the last level of one side and the first of the other."""
    sides = [side for _, side in decided]
    change = next(s for s in reversed(sides) if s)
    first = next(i for i, s in enumerate(sides) if s == change)
    last = max(i for i, s in enumerate(sides[:first]) if s == -change)
    return Curve(logs).crossing(decided[last][0], decided[first][0])


def level_logs(pairs: Sequence[Pair]) -> list[dict[float, float]]:
    """Per repetition: concurrency → ln(other / base) of the total token rates, valid levels only."""
    return [
        {float(c): math.log(right[c] / left[c]) for c in left if c in right}
        for left, right in ((_rates(base), _rates(other)) for base, other in pairs)
    ]


def per_user_crossing(pairs: Sequence[Pair]) -> Crossing | None:
    """The speed per user (tok/s of one stream, 1000 / TPOT) at which both arms serve the same total.

    At each speed that the base arm reached at a level, the other's total at the same speed is read off its own curve
    (linear in the logarithms). None without a single passage of 1 that at least two speeds surround.
    """
    logs: list[dict[float, float]] = []
    anchors: dict[int, list[float]] = {}
    for base, _ in pairs:
        for c, (speed, _) in _speeds(base).items():
            anchors.setdefault(c, []).append(speed)
    typical = {c: _geometric(speeds) for c, speeds in anchors.items()}
    for base, other in pairs:
        curve = sorted((math.log(speed), math.log(total)) for speed, total in _speeds(other).values())
        row: dict[float, float] = {}
        for c, (speed, total) in _speeds(base).items():
            there = _read_off(curve, math.log(speed))
            if there is not None:
                row[typical[c]] = there - math.log(total)
        logs.append(row)
    try:
        curve_of_logs = Curve([row for row in logs if row])
    except ValueError:
        return None
    signs = [mean < 0 for mean in curve_of_logs.means]
    if sum(a != b for a, b in pairwise(signs)) != 1:
        return None
    return curve_of_logs.crossing(curve_of_logs.levels[0], curve_of_logs.levels[-1])


def _read_off(curve: Sequence[tuple[float, float]], x: float) -> float | None:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x0 <= x <= x1 and x1 > x0:
            return y0 + (y1 - y0) * (x - x0) / (x1 - x0)
    return None


def odd_ones(pairs: Sequence[Pair]) -> list[tuple[int, float, float]]:
    """What looks odd among the ratios: see `servelab.stats.outliers`. Nothing is left out because of it."""
    return outliers.odd(level_logs(pairs))


def repeats_for_margin(rows: Sequence[Row]) -> int | None:
    """Repetitions that would show a difference of the margin at the noisiest level. None: unknown, or beyond reason."""
    spreads = [row.ratio.log_sd for row in rows if row.ratio and row.ratio.log_sd is not None]
    return ratios.repeats_needed(max(spreads)) if spreads else None


def start_noise(runs: Sequence[Bundle]) -> tuple[float, int] | None:
    """What equal starts of one arm differ by, pooled over levels: (sd of the rates' logs, degrees of freedom)."""
    by_level: dict[int, list[float]] = {}
    for run in runs:
        for c, rate in _rates(run).items():
            by_level.setdefault(c, []).append(rate)
    return ratios.start_noise(list(by_level.values()))


def levels_of(run: Bundle) -> dict[int, dict[str, Any]]:
    """concurrency → its entry in summary.json. Levels of an open loop have none, and are not compared."""
    levels = (run.summary or {}).get("levels", [])
    return {level["concurrency"]: level for level in levels if level["concurrency"] is not None}


def _rates(run: Bundle) -> dict[int, float]:
    return {c: level["output_tok_s"] for c, level in levels_of(run).items() if level["valid"] and level["output_tok_s"]}


def _speeds(run: Bundle) -> dict[int, tuple[float, float]]:
    """concurrency → (tok/s of one user, tok/s of all)."""
    found = {}
    for c, total in _rates(run).items():
        tpot = (levels_of(run)[c].get("tpot_ms") or {}).get("mean")
        if tpot:
            found[c] = (1000 / tpot, total)
    return found


def _geometric(values: Sequence[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values))


def _rows(arms: Arms) -> list[Row]:
    levels = sorted({c for both in arms.pairs for run in both for c in levels_of(run)})
    return [_row(arms, c) for c in levels]


def _row(arms: Arms, c: int) -> Row:
    notes: dict[str, int] = {}
    used: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen: tuple[list[dict[str, Any]], list[dict[str, Any]]] = ([], [])
    for pair in arms.pairs:
        found = [levels_of(run).get(c) for run in pair]
        good = True
        for side, (name, level) in enumerate(zip((arms.base, arms.other), found, strict=True)):
            why = _why_not(name, level)
            if why:
                notes[why] = notes.get(why, 0) + 1
                good = False
            if level is not None and level["valid"] and level["output_tok_s"]:
                seen[side].append(level)
        if good and found[0] is not None and found[1] is not None:
            used.append((found[0], found[1]))
    # A level added later is no omission of the earlier repetitions.
    shown = [text for text in notes if not (used and text.endswith(" was not measured"))]
    shown += _queues(arms, used)
    of = [[pair[side] for pair in used] or seen[side] for side in (0, 1)]
    logs = [math.log(right["output_tok_s"] / left["output_tok_s"]) for left, right in used]
    ratio = ratios.paired(logs) if logs else None
    return Row(
        concurrency=c,
        base=_mean(of[0], lambda level: level["output_tok_s"]),
        other=_mean(of[1], lambda level: level["output_tok_s"]),
        ratio=ratio,
        side=ratios.side(ratio) if ratio else 0,
        same=ratios.same(ratio) if ratio else False,
        accept_length=_mean(of[1], accepted),
        base_step_ms=_mean(of[0], step_ms),
        other_step_ms=_mean(of[1], step_ms),
        note=", ".join(shown),
    )


def _why_not(name: str, level: dict[str, Any] | None) -> str | None:
    if level is None:
        return f"{name} was not measured"
    if not level["valid"]:
        return f"{name}: " + "; ".join(level["invalid_reasons"])
    return None if level["output_tok_s"] else f"{name} has no rate"


def _queues(arms: Arms, used: Sequence[tuple[dict[str, Any], dict[str, Any]]]) -> list[str]:
    """Where requests queue, C is no longer the batch: said at the level, from the client's notices."""
    found: dict[str, None] = {}
    for pair in used:
        for name, level in zip((arms.base, arms.other), pair, strict=True):
            for notice in level.get("notices") or []:
                if "queue" in notice:
                    found[f"{name}: {notice}"] = None
    return list(found)


def accepted(level: dict[str, Any]) -> float | None:
    """Tokens per step: the server's own figure per verify, else the client's tokens per chunk where it is above 1.

    What a step yields comes in one chunk. A figure far above that counts few verifies among many plain steps, as an
    adaptive server's does, and says nothing of a step.
    """
    value, chunk = level.get("accept_length"), level.get("tokens_per_chunk")
    if value is None or (chunk and value > MORE_THAN_A_CHUNK * chunk):
        return chunk if chunk and chunk > 1.005 else None
    return float(value)


def step_ms(level: dict[str, Any]) -> float | None:
    """Time of one step: TPOT × tokens per step. Deltas that came together falsify the mean gap, and not this."""
    tpot, tokens = (level.get("tpot_ms") or {}).get("mean"), accepted(level) or 1.0
    return tpot * tokens if tpot else None


def _mean(levels: Sequence[dict[str, Any]], read: Callable[[dict[str, Any]], float | None]) -> float | None:
    values = [value for value in map(read, levels) if value]
    return _geometric(values) if values else None
