"""The charts of a report, as figures; `svg` makes one fit a light and a dark page, `png` is for everywhere else.

Colours are Okabe and Ito's, told apart with every common form of colour blindness; the arms also differ by marker and
by line. Every figure that comes from the simulator says so across its middle.
"""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from servelab.compare.answer import Comparison, levels_of
from servelab.report.requests import latencies, readings
from servelab.stats.ratios import MARGIN

BASE, OTHER, QUIET = "#0072b2", "#d55e00", "#777777"
INK = "#010203"  # becomes the page's text colour
# What a page may set, so that lines stay visible on a dark one.
VARIABLES = {BASE: "var(--base)", OTHER: "var(--other)", QUIET: "var(--quiet)", INK: "currentColor"}
STYLE: Any = {
    "svg.fonttype": "none",  # text stays text: it can be selected, searched and read aloud
    "svg.hashsalt": "servelab",  # no random ids: the same figures give the same file
    "font.family": "sans-serif",
    "font.size": 11,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
}


def draw(comparison: Comparison) -> Iterator[tuple[str, str, str, Figure]]:
    """(name, title, what a reader who does not see it is told, figure) of every chart that the runs have data for."""
    for chart, title, told in (
        (throughput, "Throughput and ratio", "Tokens per second of both modes against concurrency, and their ratio."),
        (pareto, "What a user gets and what a GPU yields", "Speed of one user against tokens per second of one GPU."),
        (steps, "What a step costs and yields", "Milliseconds per step and tokens per verify against concurrency."),
        (distributions, "Single requests", "Cumulative shares of TTFT, TPOT and E2E at up to three levels."),
        (cards, "The cards over time", "Power, clock, temperature, memory and link of the cards while the levels ran."),
    ):
        with rc_context(STYLE):
            figure = chart(comparison)
        if figure is not None:
            yield chart.__name__, title, told, figure


def throughput(comparison: Comparison) -> Figure:
    """The chart that answers the question: total rate against concurrency, below it the ratio with its intervals."""
    figure = _figure(7.5, 6.4)
    rates, ratio = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for side, name in enumerate((comparison.base, comparison.other)):
        points = [(row.concurrency, (row.base, row.other)[side]) for row in comparison.rows]
        _line(rates, side, name, [(c, rate) for c, rate in points if rate is not None])
        if len(comparison.pairs) > 1:
            single = [
                (c, level["output_tok_s"])
                for pair in comparison.pairs
                for c, level in levels_of(pair[side]).items()
                if level["valid"] and level["output_tok_s"]
            ]
            rates.plot(*_columns(single), ls="", marker="_", ms=9, color=(BASE, OTHER)[side])
    rates.set_ylabel("output tokens per second")
    rates.set_ylim(bottom=0)
    rates.legend(frameon=False)

    compared = [(row.concurrency, row.ratio) for row in comparison.rows if row.ratio]
    ratio.axhspan(1 / (1 + MARGIN), 1 + MARGIN, color=QUIET, alpha=0.25, lw=0)
    ratio.axhline(1, color=QUIET, lw=1)
    ratio.plot([c for c, _ in compared], [r.value for _, r in compared], marker="s", ms=5, ls="--", color=OTHER)
    for c, r in compared:
        if r.low is not None and r.high is not None:
            ratio.errorbar([c], [r.value], [[r.value - r.low], [r.high - r.value]], color=OTHER, capsize=4)
    ratio.set_ylabel(f"{comparison.other} /\n{comparison.base}")
    ratio.set_xlabel("concurrency C (requests in flight)")
    if crossing := comparison.crossing:
        low, high = crossing.bracket
        if crossing.bounded:
            low = crossing.low or min(row.concurrency for row in comparison.rows)
            high = crossing.high or max(row.concurrency for row in comparison.rows)
        for axes in (rates, ratio):
            axes.axvspan(low, high, color=QUIET, alpha=0.2, lw=0)
            axes.axvline(crossing.estimate, color=INK, ls=":", lw=1.2)
        sign = "=" if crossing.bounded else "≈"
        label = f"C {sign} {crossing.estimate:.0f}"
        rates.annotate(label, (crossing.estimate, 0), (4, 6), textcoords="offset points")
    _concurrency(ratio, [row.concurrency for row in comparison.rows])
    return _finish(figure, comparison)


def pareto(comparison: Comparison) -> Figure | None:
    """What a user gets against what a GPU yields; each point a level, the points that no other beats marked."""
    gpus = max((len(run.provenance.get("gpus") or []) for run in comparison.runs), default=0)
    points: list[tuple[float, float, int, int]] = []
    for side in (0, 1):
        for row in comparison.rows:
            levels = [levels_of(pair[side]).get(row.concurrency) for pair in comparison.pairs]
            good = [level for level in levels if level and level["valid"] and (level.get("tpot_ms") or {}).get("mean")]
            if good:
                speed = 1000 / float(np.mean([level["tpot_ms"]["mean"] for level in good]))
                total = float(np.mean([level["output_tok_s"] for level in good]))
                points.append((speed, total / (gpus or 1), row.concurrency, side))
    if not points:
        return None
    figure = _figure(7.5, 4.6)
    axes = figure.subplots()
    for side, name in enumerate((comparison.base, comparison.other)):
        mine = sorted((speed, total) for speed, total, _, s in points if s == side)
        if mine:
            _line(axes, side, name, mine)
    front = [
        (x, y) for x, y, _, _ in points if not any(u >= x and v >= y and (u, v) != (x, y) for u, v, _, _ in points)
    ]
    axes.plot(*_columns(front), ls="", marker="o", ms=13, mfc="none", mec=INK, label="not beaten by any other")
    for speed, total, c, side in points:
        axes.annotate(
            str(c), (speed, total), (0, 9 if side == 0 else -17), textcoords="offset points", ha="center", fontsize=9
        )
    axes.set_xlabel("tokens per second of one user (1000 / TPOT)")
    axes.set_ylabel("tokens per second of one GPU" if gpus else "tokens per second in all")
    axes.set_ylim(bottom=0)
    axes.set_xlim(left=0)
    axes.margins(0.08)
    axes.legend(frameon=False, title="numbers are C")
    return _finish(figure, comparison)


def steps(comparison: Comparison) -> Figure | None:
    """Why: what a step costs and how many tokens a verify yields, against concurrency."""
    rows = [row for row in comparison.rows if row.base_step_ms or row.other_step_ms]
    if not rows:
        return None
    figure = _figure(7.5, 4.4)
    accepts = [(row.concurrency, row.accept_length) for row in rows if row.accept_length]
    times, *more = figure.subplots(2 if accepts else 1, 1, sharex=True, squeeze=False).flat
    for side, name in enumerate((comparison.base, comparison.other)):
        points = [(row.concurrency, (row.base_step_ms, row.other_step_ms)[side]) for row in rows]
        _line(times, side, name, [(c, ms) for c, ms in points if ms])
    limits = [
        (row.concurrency, row.base_step_ms * row.accept_length)
        for row in rows
        if row.base_step_ms and row.accept_length
    ]
    if limits:
        times.plot(*_columns(limits), color=QUIET, ls=":", label=f"what a step of {comparison.other} may cost")
    times.set_ylabel("ms per step")
    times.set_ylim(bottom=0)
    times.legend(frameon=False)
    last = times
    if accepts:
        last = more[0]
        _line(last, 1, comparison.other, accepts)
        last.set_ylabel("tokens per verify")
        last.set_ylim(bottom=0)
    last.set_xlabel("concurrency C (requests in flight)")
    _concurrency(last, [row.concurrency for row in rows])
    return _finish(figure, comparison)


def distributions(comparison: Comparison, most: int = 3) -> Figure | None:
    """TTFT, TPOT and E2E of single requests as cumulative shares, at the lowest, the middle and the highest level."""
    levels = [row.concurrency for row in comparison.rows if row.ratio]
    chosen = [levels[i] for i in sorted({0, len(levels) // 2, len(levels) - 1})][:most] if levels else []
    pooled = {(side, c): _pooled([pair[side] for pair in comparison.pairs], c) for side in (0, 1) for c in chosen}
    if not any(ttft for ttft, *_ in pooled.values()):
        return None
    figure = _figure(7.5, 2.3 * len(chosen) + 0.6)
    panels = figure.subplots(len(chosen), 3, squeeze=False)
    for row, c in enumerate(chosen):
        for column, name in enumerate(("TTFT", "TPOT", "E2E")):
            axes = panels[row][column]
            for side, mode in enumerate((comparison.base, comparison.other)):
                values = np.sort(np.asarray(pooled[side, c][column]))
                if len(values):
                    shares = np.arange(1, len(values) + 1) / len(values)
                    axes.step(values, shares, where="post", color=(BASE, OTHER)[side], ls=("-", "--")[side], label=mode)
            axes.set_ylim(0, 1)
            axes.set_title(f"{name} at C={c}", fontsize=11)
            if column == 0:
                axes.set_ylabel("share")
    for axes in panels[-1]:
        axes.set_xlabel("ms")
    panels[0][0].legend(frameon=False)
    return _finish(figure, comparison)


def cards(comparison: Comparison) -> Figure | None:
    """What the cards did while the levels ran: one line for each run, from its first reading on."""
    told = [(side, run, readings(run)) for pair in comparison.pairs for side, run in enumerate(pair)]
    if not any(found for _, _, found in told):
        return None
    figure = _figure(7.5, 8.4)
    panels = figure.subplots(len(_CARDS), 1, sharex=True)
    for axes, (key, over, what) in zip(panels, _CARDS, strict=True):
        for i, (side, run, found) in enumerate(told):
            points = [
                ((reading["t"] - found[0]["t"]) / 60, over(values))
                for reading in found
                if None not in (values := [card[key] for card in reading["gpus"]])
            ]
            label = run.mode if i < 2 else None
            axes.plot(*_columns(points), lw=1.1, ls=("-", "--")[side], color=(BASE, OTHER)[side], label=label)
        axes.set_ylabel(what)
        axes.set_ylim(bottom=0)
    panels[0].legend(frameon=False)
    panels[-1].set_xlabel("minutes since the first level")
    return _finish(figure, comparison)


# key of a reading, how the cards are put together, what it is called
_CARDS: tuple[tuple[str, Callable[[list[float]], float], str], ...] = (
    ("power_w", sum, "W, all cards"),
    ("clock_sm_mhz", min, "MHz, slowest"),
    ("temperature_c", max, "°C, hottest"),
    ("memory_used_mib", max, "MiB, fullest"),
    ("pcie_link_gen", min, "PCIe gen, lowest"),
)


def _pooled(runs: Sequence[Any], c: int) -> tuple[list[float], list[float], list[float]]:
    pooled: tuple[list[float], list[float], list[float]] = ([], [], [])
    for run in runs:
        level = levels_of(run).get(c)
        if level and level["valid"]:
            for all_of_them, of_this_run in zip(pooled, latencies(run, level), strict=True):
                all_of_them += of_this_run
    return pooled


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _line(axes: Axes, side: int, name: str, points: Sequence[tuple[float, float]]) -> None:
    axes.plot(*_columns(points), marker="os"[side], ms=6, ls=("-", "--")[side], color=(BASE, OTHER)[side], label=name)


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _concurrency(axes: Axes, levels: Sequence[int]) -> None:
    """The axis of concurrency: logarithmic, its ticks the measured levels that have room for their labels."""
    axes.set_xscale("log")
    shown: list[int] = []
    for level in levels:
        if not shown or level / shown[-1] > 1.3:
            shown.append(level)
    axes.set_xticks(shown, [str(c) for c in shown])
    axes.xaxis.set_minor_locator(NullLocator())


def _finish(figure: Figure, comparison: Comparison) -> Figure:
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.2, color=INK)
    if simulated := comparison.simulated:
        words = f"simulated ({simulated['profile']}, time ×{simulated['time_scale']})"
        figure.text(0.53, 0.55, words, ha="center", va="center", fontsize=24, alpha=0.2, rotation=12)
    # The layout is the dear part: once, not for each format.
    figure.draw_without_rendering()
    figure.set_layout_engine("none")
    return figure


def svg(figure: Figure) -> str:
    """The figure as an SVG element whose colours are the page's."""
    out = io.StringIO()
    with rc_context(STYLE):
        figure.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    element = re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
    for colour, variable in VARIABLES.items():
        element = element.replace(colour, variable)
    return element


def png(figure: Figure, path: Path) -> None:
    """Write the figure as a picture on white."""
    with rc_context(STYLE):
        figure.savefig(path, format="png", dpi=120, facecolor="white", metadata={"Software": None})
