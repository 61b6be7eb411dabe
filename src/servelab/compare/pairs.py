"""Which run is compared with which: one repetition is one start of each arm, with the same prompts."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import Bundle, BundleError

# Written by the campaign driver beside the runs: which run is which arm's in which repetition.
PLAN = "campaign.json"

Pair = tuple[Bundle, Bundle]


@dataclass(frozen=True)
class Arms:
    """Two arms, paired. ``left_out`` says in a sentence each which runs are not used and why."""

    base: str
    other: str
    pairs: list[Pair]
    left_out: list[str] = field(default_factory=list)


def reason(run: Bundle) -> str:
    """Why a run failed, in its first line."""
    return str(run.run.get("reason") or "no reason was recorded").splitlines()[0]


def measured(run: Bundle) -> bool:
    return bool(run.summary) and run.run["status"] != "failed"


def pair(base: Sequence[Bundle], other: Sequence[Bundle]) -> list[Pair]:
    """Pair the runs of two arms: first those with the same prompts (their seed), then whatever is left, by time.

    What is paired without the same prompts is for the guard to refuse.
    """
    pairs: list[Pair] = []
    left, right = list(base), list(other)
    for run in base:
        partner = next((r for r in right if _seed(r) == _seed(run)), None)
        if partner is not None:
            pairs.append((run, partner))
            left.remove(run)
            right.remove(partner)
    return pairs + list(zip(left, right, strict=False))


def _seed(run: Bundle) -> Any:
    return (run.summary or {}).get("workload", {}).get("seed")


def of_bundles(runs: Sequence[Bundle], base: str | None = None) -> list[Arms]:
    """The first run's mode (or *base*) against each other mode; several runs of a mode are repetitions.

    Two runs of one mode are its two arms: the A/A test. Raises BundleError when there is nothing to compare.
    """
    by_mode: dict[str, list[Bundle]] = {}
    for run in runs:
        by_mode.setdefault(run.mode, []).append(run)
    first = base if base in by_mode else runs[0].mode
    if len(by_mode) == 1:
        if len(runs) < 2:
            raise BundleError("One run alone cannot be compared: name at least two.")
        again = by_mode[first]
        return [Arms(first, f"{first} (again)", list(zip(again[::2], again[1::2], strict=False)))]
    return [_arms(first, by_mode[first], mode, found) for mode, found in by_mode.items() if mode != first]


def of_campaign(campaign: Path, base: str = "baseline") -> list[Arms]:
    """Every other arm of a campaign directory against *base*.

    A campaign that the driver made says itself which runs are repetitions. Elsewhere the newest measured run of each
    mode counts: runs made at different times by hand are not repetitions of one experiment. Raises BundleError when
    there are not two measured arms.
    """
    runs = bundle.runs(campaign) if campaign.is_dir() else []
    planned = _plan(campaign, runs)
    arms = planned if planned is not None else _newest(runs)
    if base not in arms or len(arms) < 2:
        raise BundleError(
            f"{campaign} holds measured runs of {', '.join(sorted(arms)) or 'no mode'}; a comparison needs {base} "
            "and one more: run `ansible-playbook bench.yml -e mode=…` with the same campaign."
        )
    found = []
    for name, repetitions in sorted(arms.items()):
        if name == base:
            continue
        both = sorted(arms[base].keys() & repetitions.keys())
        left_out = _unpaired(base, arms[base], name, repetitions)
        left_out += [
            f"The {run.mode} run {run.path.name} failed: {reason(run)}"
            for run in runs
            if run.run["status"] == "failed" and run.mode in (base, name) and not run.summary
        ]
        if planned is None:
            older = sum(1 for run in runs if run.summary and run.mode in (base, name)) - 2
            if older > 0:
                left_out.append(
                    f"{older} older run{'s' if older > 1 else ''} of these modes not used: made by hand, not as "
                    "repetitions of one campaign. Name the bundles to use them so."
                )
        left_out += _spared(campaign)
        found.append(Arms(base, name, [(arms[base][i], repetitions[i]) for i in both], left_out))
    return found


def _spared(campaign: Path) -> list[str]:
    """What is to be said of a campaign that ended itself. Called where the plan was read before."""
    file = campaign / PLAN
    runs = json.loads(file.read_text())["runs"] if file.is_file() else []
    why = next((run.get("reason") for run in runs if run.get("status") == "spared"), None)
    if why is None:
        return []
    return [f"It was ended early, because {why}. Intervals that were stopped for cover 92 to 95 %, not 95 %."]


def arms_of(campaign: Path) -> dict[str, dict[int, Bundle]]:
    """arm → repetition → measured run of a campaign directory; without the driver's plan the newest of each mode."""
    runs = bundle.runs(campaign) if campaign.is_dir() else []
    planned = _plan(campaign, runs)
    return planned if planned is not None else _newest([run for run in runs if measured(run)])


def _newest(runs: Sequence[Bundle]) -> dict[str, dict[int, Bundle]]:
    return {run.mode: {0: run} for run in runs if run.summary}


def derived(campaign: Path) -> dict[str, dict[str, Any]]:
    """Adaptive mode → what its configuration was made from, of a campaign that the driver made; else empty."""
    file = campaign / PLAN
    if not file.is_file():
        return {}
    try:
        return dict(json.loads(file.read_text()).get("derived") or {})
    except (OSError, ValueError, AttributeError) as error:
        raise BundleError(f"{file} cannot be used ({error!r}): it is the campaign's plan; restore it.") from error


def _arms(base: str, left: list[Bundle], other: str, right: list[Bundle]) -> Arms:
    """Failed runs count only where an arm has no other, so that the guard can name the failure."""
    kept = [[run for run in arm if measured(run)] or arm[-1:] for arm in (left, right)]
    pairs = pair(*kept)
    used = {id(run) for both in pairs for run in both}
    left_out = [
        f"{run.path.name} has no partner and is not used." for arm in kept for run in arm if id(run) not in used
    ]
    left_out += [
        f"The {run.mode} run {run.path.name} failed: {reason(run)}"
        for run in [*left, *right]
        if not measured(run) and id(run) not in used
    ]
    return Arms(base, other, pairs, left_out)


def _plan(campaign: Path, runs: Sequence[Bundle]) -> dict[str, dict[int, Bundle]] | None:
    """arm → repetition → run, of a campaign that the driver made; None of any other."""
    file = campaign / PLAN
    if not file.is_file():
        return None
    try:
        planned = json.loads(file.read_text())["runs"]
        by_id = {run.path.name: run for run in runs}
        arms: dict[str, dict[int, Bundle]] = {}
        for item in planned:
            run = by_id.get(item.get("run_id") or "")
            if run is not None and measured(run):
                arms.setdefault(item["arm"], {})[int(item["repetition"])] = run
        return arms
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise BundleError(f"{file} cannot be used ({error!r}): it is the campaign's plan; restore it.") from error


def _unpaired(base: str, left: dict[int, Bundle], other: str, right: dict[int, Bundle]) -> list[str]:
    return [
        f"Repetition {i + 1} was measured for {base if i in left else other} only and is not used."
        for i in sorted(left.keys() ^ right.keys())
    ]
