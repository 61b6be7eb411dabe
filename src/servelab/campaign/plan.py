"""In which order: pure functions of a Spec."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

from servelab.campaign.spec import CampaignError, Spec

# Before anything was measured: a server's start with the cleaning around it, and a level beside its window.
START_SECONDS = 600.0
LEVEL_SECONDS = 30.0


@dataclass(frozen=True)
class Planned:
    """One run: an arm's start in one repetition (from 0)."""

    arm: str
    mode: str
    repetition: int
    seed: int


def order(spec: Spec) -> list[Planned]:
    """All runs in the order in which they are made.

    Every second repetition runs backwards (A B, B A: the ABBA block), so that a machine that drifts favours nobody,
    and each block begins with another arm.
    """
    arms = spec.arms
    runs = []
    for repetition in range(spec.repetitions):
        shift = (repetition // 2) % len(arms)
        block = arms[shift:] + arms[:shift]
        if repetition % 2:
            block.reverse()
        if repetition == 0:
            # What is made from the others' first runs cannot be the first to run.
            block.sort(key=lambda arm: arm[1] in spec.adaptive)
        runs += [Planned(arm, mode, repetition, spec.seed + repetition) for arm, mode in block]
    return runs


def run_seconds(spec: Spec, measured: Sequence[float] = ()) -> float:
    """What one run takes: the mean of those that were *measured*, else a guess on the long side."""
    if measured:
        return sum(measured) / len(measured)
    window = float(spec.variables.get("bench_min_seconds", 30))
    return START_SECONDS + len(spec.levels) * (window + LEVEL_SECONDS) + spec.pause_seconds


def fitting(spec: Spec, runs: Sequence[Planned], budget: float, each: float) -> tuple[list[Planned], list[Planned]]:
    """(runs that fit into *budget* seconds at *each* seconds a run, runs left out): whole repetitions only, as half a
    pair is worth nothing. Raises CampaignError when not even one fits."""
    fit: list[Planned] = []
    left: list[Planned] = []
    for repetition in sorted({run.repetition for run in runs}):
        block = [run for run in runs if run.repetition == repetition]
        if not left and (len(fit) + len(block)) * each <= budget:
            fit += block
        else:
            left += block
    if runs and not fit:
        raise CampaignError(
            f"Campaign {spec.name}: one repetition takes about {duration(len(spec.arms) * each)}, and the budget is "
            f"{duration(budget)}: give more time, or fewer levels or modes."
        )
    return fit, left


def seconds(text: str) -> float:
    """The seconds of 90s, 45m, 6h or 1h30m. Raises CampaignError."""
    match = re.fullmatch(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s)?", text.strip())
    total = (
        sum(float(part or 0) * unit for part, unit in zip(match.groups(), (3600, 60, 1), strict=True)) if match else 0
    )
    if total <= 0:
        raise CampaignError(f"{text!r} is no time: write it as 6h, 45m or 1h30m.")
    return total


def duration(total: float) -> str:
    """3 h 20 min, 12 min, 40 s."""
    minutes = math.floor(total / 60 + 0.5)
    if total < 60:
        return f"{total:.0f} s"
    return f"{minutes // 60} h {minutes % 60} min" if minutes >= 60 else f"{minutes} min"
