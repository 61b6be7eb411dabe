"""Compare runs: which mode serves more tokens per second at which level, and where that changes.

One run per mode is a measurement without an interval: the noise between two starts of a server is not in it. The
verdict says so. What differs between the runs beside the mode is listed, and a headline is refused when anything does.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import Bundle, BundleError

# A mode must win by more than this to be called faster: smaller differences vanish with the next start of the server.
MARGIN = 0.02


@dataclass(frozen=True)
class Row:
    """One level of a comparison; rates are output tokens per second of all requests together, None where not valid."""

    concurrency: int
    base: float | None
    other: float | None
    accept_length: float | None
    note: str

    @property
    def ratio(self) -> float | None:
        return self.other / self.base if self.base and self.other else None


@dataclass(frozen=True)
class Crossover:
    """The concurrency where the ratio passes 1, between the measured levels ``low`` and ``high``."""

    estimate: float
    low: int
    high: int


@dataclass(frozen=True)
class Comparison:
    """``outcome`` says where ``other`` beats ``base``: one of the words that `outcome_of` returns."""

    base: Bundle
    other: Bundle
    rows: list[Row]
    outcome: str
    crossover: Crossover | None
    differences: list[str]

    @property
    def simulated(self) -> dict[str, Any] | None:
        return self.base.simulated or self.other.simulated


def compare(base: Bundle, other: Bundle) -> Comparison:
    """Compare *other* with *base* level by level."""
    rows = _rows(base, other)
    measured = [(row.concurrency, row.ratio) for row in rows if row.ratio is not None]
    outcome = outcome_of([ratio for _, ratio in measured])
    crossover = crossover_of(measured) if outcome in ("below", "above") else None
    return Comparison(base, other, rows, outcome, crossover, differences(base, other))


def side(ratio: float, margin: float = MARGIN) -> int:
    """1 where the ratio is a win beyond *margin*, −1 where it is a loss, 0 between."""
    if ratio > 1 + margin:
        return 1
    return -1 if ratio < 1 / (1 + margin) else 0


def outcome_of(ratios: Sequence[float]) -> str:
    """Which story the ratios of ascending levels tell; levels without a clear difference tell none.

    Returns everywhere, nowhere, below, above, several, no difference or nothing valid.
    """
    decided = [s for s in map(side, ratios) if s]
    if not ratios:
        return "nothing valid"
    if not decided:
        return "no difference"
    changes = sum(a != b for a, b in pairwise(decided))
    if changes == 0:
        return "everywhere" if decided[0] > 0 else "nowhere"
    if changes > 1:
        return "several"
    return "below" if decided[0] > 0 else "above"


def crossover_of(measured: Sequence[tuple[int, float]]) -> Crossover:
    """Where the ratio passes 1: ln ratio is taken as linear in ln C, as both are multiplicative.

    *measured* holds (concurrency, ratio) in ascending order with exactly one change between wins and losses.
    """
    sides = [side(ratio) for _, ratio in measured]
    change = next(s for s in reversed(sides) if s)
    first = next(i for i, s in enumerate(sides) if s == change)
    last = max(i for i, s in enumerate(sides[:first]) if s == -change)
    points = [(math.log(c), math.log(ratio)) for c, ratio in measured[last : first + 1]]
    roots = [x0 - y0 * (x1 - x0) / (y1 - y0) for (x0, y0), (x1, y1) in pairwise(points) if (y0 < 0) != (y1 < 0)]
    # Levels without a clear difference can pass 1 more than once by noise alone: take the middle of them.
    return Crossover(math.exp(sum(roots) / len(roots)), measured[last][0], measured[first][0])


def verdict(comparison: Comparison) -> str:
    """The answer in one sentence, without its qualifications."""
    base, other = comparison.base.mode, comparison.other.mode
    measured = [row for row in comparison.rows if row.ratio is not None]
    if not measured:
        return f"No level was measured validly in both {base} and {other}: there is no answer."
    span = f"from C={measured[0].concurrency} to C={measured[-1].concurrency}"
    ratios = [row.ratio for row in measured if row.ratio is not None]
    spread = f"{min(ratios):.2f}–{max(ratios):.2f} times {base}'s tokens per second"
    crossover = comparison.crossover
    if crossover:
        at = f"C ≈ {crossover.estimate:.0f} (between the measured levels {crossover.low} and {crossover.high})"
        if comparison.outcome == "below":
            return f"{other} pays up to {at}; beyond, {base} is faster."
        return f"{other} pays from {at} on; below, {base} is faster."
    return {
        "everywhere": f"{other} pays at every level {span}: {spread}.",
        "nowhere": f"{other} pays nowhere {span}: {spread}.",
        "no difference": f"No difference beyond {MARGIN:.0%} was shown {span}.",
        "several": f"{other} and {base} change places more than once {span}: there is no single crossover.",
    }[comparison.outcome]


def qualifications(comparison: Comparison) -> list[str]:
    """What a reader must know before believing the verdict."""
    notes = []
    if simulated := comparison.simulated:
        notes.append(
            f"simulated: these figures come from the lab's cost model (profile {simulated['profile']}, "
            f"time scale {simulated['time_scale']}), not from GPUs."
        )
    notes.append("One run per mode: the noise between two starts is unknown, so no interval is given.")
    for arm in (comparison.base, comparison.other):
        correctness = arm.run.get("correctness") or {}
        if correctness.get("status") != "verified":
            notes.append(f"The output of {arm.mode} is {correctness.get('status', 'unverified')}.")
    return notes


def differences(a: Bundle, b: Bundle) -> list[str]:
    """Every difference beside the mode itself that makes the two runs incomparable, one sentence each."""
    found = []
    for arm in (a, b):
        if arm.run["status"] == "failed":
            found.append(f"{arm.mode} failed: {arm.run.get('reason') or 'no reason was recorded'}")
    for what, place, key in _SAME:
        left, right = _at(a, place, key), _at(b, place, key)
        if left != right:
            found.append(f"{what} differs: {_short(left)} in {a.mode}, {_short(right)} in {b.mode}.")
    return found


# What must be equal in two runs before their figures may be put side by side: (what it is, file, path of keys).
_SAME: list[tuple[str, str, tuple[str, ...]]] = [
    ("the simulator", "run", ("simulated",)),
    ("the API", "summary", ("workload", "api")),
    ("the input length", "summary", ("workload", "input_tokens")),
    ("the output length", "summary", ("workload", "output_tokens")),
    ("ignore_eos", "summary", ("workload", "ignore_eos")),
    ("the prompt seed", "summary", ("workload", "seed")),
    ("the client", "summary", ("client", "version")),
    ("the SGLang release", "summary", ("server", "sglang_version")),
    ("the model", "summary", ("server", "model")),
]


def _at(arm: Bundle, place: str, keys: tuple[str, ...]) -> Any:
    value: Any = {"run": arm.run, "summary": arm.summary, "provenance": arm.provenance}[place]
    for key in keys:
        value = value.get(key) if isinstance(value, dict) else None
    return value


def _short(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 60 else text[:57] + "…"


def _rows(base: Bundle, other: Bundle) -> list[Row]:
    left, right = (_levels(arm) for arm in (base, other))
    return [_row(c, base.mode, left.get(c), other.mode, right.get(c)) for c in sorted(left.keys() | right.keys())]


def _row(concurrency: int, base: str, left: dict[str, Any] | None, other: str, right: dict[str, Any] | None) -> Row:
    notes = []
    for mode, level in ((base, left), (other, right)):
        if level is None:
            notes.append(f"{mode} was not measured")
        elif not level["valid"]:
            notes.append(f"{mode}: " + "; ".join(level["invalid_reasons"]))
    rates = [level["output_tok_s"] if level and level["valid"] else None for level in (left, right)]
    return Row(concurrency, rates[0], rates[1], (right or {}).get("accept_length"), ", ".join(notes))


def _levels(arm: Bundle) -> dict[int, dict[str, Any]]:
    return {level["concurrency"]: level for level in (arm.summary or {}).get("levels", [])}


def table(comparison: Comparison) -> str:
    """The comparison as a Markdown table."""
    base, other = comparison.base.mode, comparison.other.mode
    mark = " (simulated)" if comparison.simulated else ""
    lines = [
        f"| C | {base} tok/s{mark} | {other} tok/s{mark} | ratio | accept length | verdict |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for row in comparison.rows:
        cells = (_cell(row.base, 1), _cell(row.other, 1), _cell(row.ratio, 2), _cell(row.accept_length, 2))
        lines.append(f"| {row.concurrency} | " + " | ".join(cells) + f" | {words(comparison, row)} |")
    return "\n".join(lines)


def words(comparison: Comparison, row: Row) -> str:
    """What one row of the table says."""
    if row.ratio is None:
        return row.note or "—"
    tie = f"no difference beyond {MARGIN:.0%}"
    return {1: f"{comparison.other.mode} faster", -1: f"{comparison.base.mode} faster", 0: tie}[side(row.ratio)]


def _cell(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def text(comparison: Comparison) -> str:
    """Table, verdict and qualifications as Markdown. A refused headline is replaced by the reasons for the refusal."""
    if comparison.differences:
        answer = ["**No headline: these runs cannot be compared.**", ""]
        answer += [f"- {reason}" for reason in comparison.differences]
    else:
        answer = [f"**{verdict(comparison)}**"]
    notes = [f"- {note}" for note in qualifications(comparison)]
    return "\n".join([table(comparison), "", *answer, "", *notes])


def newest_by_mode(campaign: Path) -> dict[str, Bundle]:
    """The newest run of each mode in a campaign directory that measured something."""
    return {run.mode: run for run in bundle.runs(campaign) if run.summary}


def of_campaign(campaign: Path, base: str = "baseline") -> list[Comparison]:
    """Every other mode of the campaign against *base*.

    Raises BundleError when the directory holds fewer than two measured modes or no *base*.
    """
    arms = newest_by_mode(campaign) if campaign.is_dir() else {}
    if base not in arms or len(arms) < 2:
        raise BundleError(
            f"{campaign} holds measured runs of {', '.join(sorted(arms)) or 'no mode'}; a comparison needs {base} "
            "and one more: run `ansible-playbook bench.yml -e mode=…` with the same campaign."
        )
    return [compare(arms[base], arm) for mode, arm in sorted(arms.items()) if mode != base]


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("compare", help="compare two runs, or all modes of a campaign with its baseline")
    parser.add_argument("paths", type=Path, nargs="+", metavar="PATH", help="two bundles, or one campaign directory")
    parser.add_argument("--base", default="baseline", help="the mode the others are compared with (default: baseline)")


def run(args: argparse.Namespace) -> int:
    try:
        if len(args.paths) == 1:
            comparisons = of_campaign(args.paths[0], args.base)
        else:
            first, *rest = (bundle.read(path) for path in args.paths)
            comparisons = [compare(first, other) for other in rest]
    except BundleError as error:
        print(f"servelab compare: {error}", file=sys.stderr)
        return 1
    print("\n\n".join(map(text, comparisons)))
    return 1 if any(c.differences for c in comparisons) else 0
