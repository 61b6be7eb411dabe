"""What a campaign learns from its own runs: where to measure more, what an adaptive mode is to do, when it is enough.

A look at the ratios that only chooses where to measure biases nothing; nor does one at the widths of intervals that
never asks where they lie.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import Bundle, BundleError
from servelab.campaign.state import State

Say = Callable[[str], None]
OVER = ("ok", "invalid", "failed", "skipped", "spared")


def refine(state: State, directory: Path, say: Say) -> None:
    """Once the first repetition is complete: two more levels inside each bracket, for all repetitions that follow."""
    first = [e for e in state.entries if e["repetition"] == 0]
    if not state.spec.refine or state.added_levels or any(e["status"] not in OVER for e in first):
        return
    # Imported here: planning and resuming need no numpy.
    from servelab.compare import answer
    from servelab.compare.pairs import Arms
    from servelab.stats.crossover import refinement

    runs = _runs(state, directory, 0, say)
    base = _base(state)
    added: set[int] = set()
    for arm, run in runs.items():
        # An adaptive mode is the base on one side of the crossover: it has none of its own worth two levels.
        if arm != base and base in runs and run.mode not in state.spec.adaptive:
            crossing = answer.compare(Arms(base, arm, [(runs[base], run)])).crossing
            if crossing:
                added |= set(refinement(crossing, state.spec.levels))
    if added:
        state.added_levels = sorted(added)
        say(f"from the next repetition on, C={', '.join(map(str, sorted(added)))} too: the crossover is near")


def configure(state: State, directory: Path, mode: str, say: Say) -> str | None:
    """Make the configuration of an adaptive mode, once, from the first repetition that tells a crossover; returns why
    none does yet (a busy machine may have voided levels that the next repetition has).

    It stays the same for all repetitions: an arm whose settings change is several arms.
    """
    source = state.spec.adaptive.get(mode)
    if source is None or mode in state.derived:
        return None
    from servelab.compare import adaptive, answer
    from servelab.compare.pairs import Arms

    base = _base(state)
    found, why = None, f"no repetition has a run of both {base} and {source}"
    for repetition in sorted({entry["repetition"] for entry in state.entries}):
        runs = _runs(state, directory, repetition, say)
        if base not in runs or source not in runs:
            continue
        # What a single pair of runs cannot show (an order that favours the second) does not matter for a setting.
        try:
            found = adaptive.derive(answer.compare(Arms(base, source, [(runs[base], runs[source])]), forced=True))
            break
        except adaptive.NotAdaptable as problem:
            why = str(problem)
    if found is None:
        return why
    path = (directory / f"{mode}.json").resolve()
    path.write_text(json.dumps(found.document, indent=1) + "\n")
    state.derived[mode] = {
        "from": source,
        "file": path.name,
        "document": found.document,
        "crossing": round(found.crossing, 2),
        "batch": round(found.batch, 2),
        "key": found.key,
        "says": found.says,
    }
    say(f"{mode}: {' '.join(found.says)} Configuration: {json.dumps(found.document)}")
    return None


def variables(state: State, directory: Path, mode: str) -> Mapping[str, Any]:
    """What bench.yml must be told for this mode beyond what holds for all."""
    if mode not in state.derived:
        return {}
    return {"sglang_server_adaptive_config": str((directory / state.derived[mode]["file"]).resolve())}


def spare(state: State, directory: Path, say: Say) -> None:
    """Mark the repetitions that are left as not needed, once every interval is as narrow as the campaign asks for.

    Only widths are looked at, and only after whole repetitions.
    """
    wanted = state.spec.precision
    begun = {e["repetition"] for e in state.entries if e["status"] in ("ok", "invalid", "failed")}
    part = any(e["status"] not in OVER and e["repetition"] in begun for e in state.entries)
    if not wanted or part or not begun or not state.waiting():
        return
    from servelab.compare import answer, pairs
    from servelab.stats.ratios import narrow

    state.save()
    try:
        tables = [comparison.rows for comparison in answer.compare_all(pairs.of_campaign(directory, _base(state)))]
    except BundleError:
        return
    ratios = [row.ratio for rows in tables for row in rows if row.ratio]
    if not narrow(ratios, wanted):
        return
    widest = max(ratio.reach for ratio in ratios)
    left = state.waiting()
    for entry in left:
        entry.update(status="spared", reason=f"every interval is within {wanted:.1%} of its ratio")
    say(
        f"precise enough after {len(begun)} repetitions (the widest interval: ±{widest:.1%}): "
        f"{len(left)} runs are spared"
    )


def _base(state: State) -> str:
    return state.spec.arms[0][0]


def _runs(state: State, directory: Path, repetition: int, say: Say) -> dict[str, Bundle]:
    """arm → its run of a repetition, where it measured something."""
    runs = {}
    for entry in state.entries:
        if entry["repetition"] == repetition and entry["status"] in ("ok", "invalid") and entry["run_id"]:
            try:
                runs[entry["arm"]] = bundle.read(directory / entry["run_id"])
            except BundleError as error:
                say(f"cannot be used: {error}")
    return runs
