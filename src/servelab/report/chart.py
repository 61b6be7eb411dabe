"""The one chart that answers the question: throughput against concurrency, and the ratio below it."""

from __future__ import annotations

import io
import re

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from servelab.compare.answer import Comparison
from servelab.stats.ratios import MARGIN

# Okabe and Ito's palette: told apart with every common form of colour blindness.
BLUE, ORANGE, GREY = "#0072B2", "#D55E00", "#777777"


def svg(comparison: Comparison) -> str:
    """The chart of *comparison* as an SVG element; marked where its figures are simulated."""
    figure = Figure(figsize=(8, 6.4), layout="constrained")
    rates, ratio = figure.subplots(2, 1, sharex=True, height_ratios=[2, 1])
    for mode, colour, marker, points in (
        (comparison.base, BLUE, "o", [(row.concurrency, row.base) for row in comparison.rows]),
        (comparison.other, ORANGE, "s", [(row.concurrency, row.other) for row in comparison.rows]),
    ):
        measured = [(c, rate) for c, rate in points if rate is not None]
        rates.plot([c for c, _ in measured], [r for _, r in measured], marker=marker, color=colour, label=mode)
    rates.set_ylabel("output tokens per second")
    rates.set_ylim(bottom=0)
    rates.legend(frameon=False)

    compared = [(row.concurrency, row.ratio) for row in comparison.rows if row.ratio]
    ratio.axhspan(1 / (1 + MARGIN), 1 + MARGIN, color=GREY, alpha=0.25, lw=0)
    ratio.axhline(1, color=GREY, lw=1)
    ratio.plot([c for c, _ in compared], [r.value for _, r in compared], marker="s", color=ORANGE)
    with_interval = [(c, r.value, r.low, r.high) for c, r in compared if r.low is not None and r.high is not None]
    if with_interval:
        below = [value - low for _, value, low, _ in with_interval]
        above = [high - value for _, value, _, high in with_interval]
        at = [c for c, *_ in with_interval]
        ratio.errorbar(at, [v for _, v, *_ in with_interval], [below, above], fmt="none", color=ORANGE, capsize=3)
    ratio.set_ylabel(f"{comparison.other} / {comparison.base}")
    ratio.set_xlabel("concurrency C (requests in flight)")
    if crossing := comparison.crossing:
        low, high = crossing.bracket
        if crossing.bounded:
            low = crossing.low or min(row.concurrency for row in comparison.rows)
            high = crossing.high or max(row.concurrency for row in comparison.rows)
        for axes in (rates, ratio):
            axes.axvspan(low, high, color=ORANGE, alpha=0.12, lw=0)
            axes.axvline(crossing.estimate, color=GREY, ls="--", lw=1)
        label = f"C ≈ {crossing.estimate:.0f}"
        rates.annotate(label, (crossing.estimate, 0), (4, 6), textcoords="offset points", color=GREY)
    ratio.set_xscale("log")
    levels = [row.concurrency for row in comparison.rows]
    ratio.set_xticks(levels, [str(c) for c in levels])
    ratio.xaxis.set_minor_locator(NullLocator())
    for axes in (rates, ratio):
        axes.spines[["top", "right"]].set_visible(False)
        axes.grid(alpha=0.25)
    if simulated := comparison.simulated:
        words = f"simulated ({simulated['profile']}, time ×{simulated['time_scale']})"
        rates.text(0.5, 0.5, words, transform=rates.transAxes, ha="center", va="center", fontsize=22, alpha=0.25)

    out = io.StringIO()
    # No date and no random ids: the same figures give the same file.
    with rc_context({"svg.hashsalt": "servelab"}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    return re.sub(r"^.*?(?=<svg)", "", out.getvalue(), flags=re.DOTALL)
