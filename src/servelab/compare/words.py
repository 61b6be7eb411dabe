"""The answer in words and as Markdown."""

from __future__ import annotations

import math
from collections.abc import Sequence

from servelab.compare import allreduce, guard, verify
from servelab.compare.answer import SINGLE, Comparison, Row, odd_ones, repeats_for_margin, start_noise
from servelab.compare.server_log import batches
from servelab.stats.crossover import Crossing
from servelab.stats.ratios import MARGIN, Ratio, smallest_shown


def verdict(comparison: Comparison) -> str:
    """The answer in one sentence, with the first of its qualifications: that it rests on a single pair of runs."""
    said = _verdict(comparison)
    # Two starts of one mode were up to 20 % apart, and once on different sides of the other mode.
    return (
        f"In one run of each, {said}" if len(comparison.pairs) == 1 and comparison.outcome != "no difference" else said
    )


def _verdict(comparison: Comparison) -> str:
    base, other = comparison.base, comparison.other
    measured = [row for row in comparison.rows if row.ratio]
    if not measured:
        return f"No level was measured validly in both {base} and {other}: there is no answer."
    span = f"from C={measured[0].concurrency} to C={measured[-1].concurrency}"
    values = [row.ratio.value for row in measured if row.ratio]
    spread = f"{min(values):.2f}–{max(values):.2f} times {base}'s tokens per second"
    if comparison.outcome in SINGLE and comparison.crossing:
        at = where(comparison.crossing)
        if comparison.outcome == "below":
            return f"{other} pays up to {at}; beyond, {base} is faster."
        return f"{other} pays from {at} on; below, {base} is faster."
    open_levels = [str(row.concurrency) for row in measured if not row.side]
    but = f"; no difference was shown at C={', '.join(open_levels)}" if open_levels else ""
    at_levels = "wherever a difference was shown" if open_levels else "at every level"
    return {
        "everywhere": f"{other} pays {at_levels} {span}: {spread}{but}.",
        "nowhere": f"{other} pays nowhere {span}: {spread}{but}.",
        "no difference": _no_difference(comparison, span),
    }.get(
        comparison.outcome,
        f"{other} and {base} change places more than once {span}: there is no single crossover.",
    )


def _no_difference(comparison: Comparison, span: str) -> str:
    if all(row.same for row in comparison.rows if row.ratio):
        return f"{comparison.other} and {comparison.base} differ by no more than {MARGIN:.0%} {span}."
    return f"No difference beyond {MARGIN:.0%} was shown {span}."


def where(crossing: Crossing) -> str:
    """A crossover as text: with its interval if there is one, else with the measured levels around it."""
    if not crossing.bounded:
        low, high = crossing.bracket
        return f"C ≈ {crossing.estimate:.0f} (between the measured levels {low:.0f} and {high:.0f})"
    return f"C = {crossing.estimate:.1f} {ends(crossing)}"


def ends(crossing: Crossing) -> str:
    """The interval of a crossover; empty without repetitions."""
    if not crossing.bounded:
        return ""
    low = "below all that was measured" if crossing.low is None else f"{crossing.low:.1f}"
    high = "above all that was measured" if crossing.high is None else f"{crossing.high:.1f}"
    return f"[{low}, {high}]"


def qualifications(comparison: Comparison) -> list[str]:
    """What a reader must know before believing the verdict."""
    notes = []
    if simulated := comparison.simulated:
        notes.append(
            f"simulated: these figures come from the lab's cost model (profile {simulated['profile']}, "
            f"time scale {simulated['time_scale']}), not from GPUs."
        )
    skipped = {name: why for run in comparison.runs for name, why in dict(run.run.get("skipped") or {}).items()}
    if skipped:
        told = "; ".join(f"{name} ({why})" for name, why in sorted(skipped.items()))
        notes.append(f"Skipped on the machine that was measured: {told}.")
    notes.append(_repetitions(comparison))
    notes += _reach(comparison)
    for name, runs in (
        (comparison.base, [left for left, _ in comparison.pairs]),
        (comparison.other, [right for _, right in comparison.pairs]),
    ):
        states = {str((run.run.get("correctness") or {}).get("status", "unverified")) for run in runs}
        if states != {"verified"}:
            notes.append(f"The output of {name} is {' and '.join(sorted(states))}.")
    if not comparison.refused:
        notes += [f"Beside the modes: {finding.text}" for finding in comparison.findings]
    if missing := guard.unknown(comparison.pairs):
        notes.append(f"Not recorded, so not compared: {', '.join(missing)}.")
    return notes + list(comparison.arms.left_out)


def _repetitions(comparison: Comparison) -> str:
    n = len(comparison.pairs)
    if n < 2:
        return (
            "One run per mode: the noise between two starts is unknown, so no interval is given. Two starts of one "
            "mode on an H200 were up to 20 % apart; repeat before you believe in less (a campaign does)."
        )
    kept = sum(bool((run.provenance.get("start") or {}).get("went_on")) for run in comparison.runs)
    starts = (
        f"{n} repetitions. In {kept} of the {2 * n} runs the server of the run before went on (keep_server), so two "
        "repetitions share a start, and the brackets see only a part of the noise between starts."
        if kept
        else f"{n} repetitions, each one fresh start of both modes."
    )
    return (
        f"{starts} Brackets are 95 % t intervals of the paired ratio; "
        f"“faster” holds for all levels of this report together (Holm) and beyond {MARGIN:.0%}."
    )


def _reach(comparison: Comparison) -> list[str]:
    """How far the repetitions carry: noise, what would be needed, what looks odd, where to measure next."""
    notes = []
    if len(comparison.pairs) > 1:
        noise = start_noise([left for left, _ in comparison.pairs])
        if noise:
            sd, df = noise
            floor = smallest_shown(sd * math.sqrt(2), len(comparison.pairs))
            notes.append(
                f"One start of {comparison.base} varies by {math.expm1(sd):.1%} (standard deviation, {df} degrees of "
                f"freedom): with {len(comparison.pairs)} repetitions, equal modes may come out {floor:.1%} apart."
            )
        undecided = [row for row in comparison.rows if row.ratio and not row.side and not row.same]
        if undecided:
            needed = repeats_for_margin(undecided)
            many = "more repetitions than anybody makes" if needed is None else f"about {needed} repetitions"
            notes.append(f"To show a difference of {MARGIN:.0%} where none was shown takes {many}.")
    for repetition, level, away in odd_ones(comparison.pairs):
        notes.append(
            f"Odd: in repetition {repetition + 1} the ratio at C={level:g} is {math.expm1(away):+.0%} off its level's "
            "median. Nothing was left out for it."
        )
    if comparison.crossing and comparison.next_levels:
        levels = " and ".join(map(str, comparison.next_levels))
        notes.append(
            f"Between {comparison.crossing.bracket[0]:g} and {comparison.crossing.bracket[1]:g} a straight line is "
            f"assumed, which may be {comparison.crossing.interpolation:.0%} off: measure C={levels} too."
        )
    if at := comparison.per_user:
        speed = f"{at.estimate:.1f} {ends(at)}".strip()
        notes.append(f"At equal speed per user, both serve the same total where a user gets {speed} tok/s.")
    return notes


def why(comparison: Comparison) -> list[str]:
    """What a verify costs and yields where the other mode speculates: at the ends, and where the answer changes."""
    known = [row for row in comparison.rows if row.accept_length and row.base_step_ms and row.other_step_ms]
    ends = {row.concurrency for row in known[:1] + known[-1:]}
    if comparison.crossing:
        ends |= {round(level) for level in comparison.crossing.bracket}
    notes = []
    for row in known:
        if row.concurrency not in ends or not (row.accept_length and row.base_step_ms and row.other_step_ms):
            continue
        limit = row.accept_length * row.base_step_ms
        needed = row.other_step_ms / row.base_step_ms
        relation = "pays" if row.other_step_ms < limit else "does not pay"
        notes.append(
            f"C={row.concurrency}: a step of {comparison.other} takes {row.other_step_ms:.1f} ms and yields "
            f"{row.accept_length:.2f} tokens, one of {comparison.base} takes {row.base_step_ms:.1f} ms for one. "
            f"It {relation}: at this accept length it may take {limit:.1f} ms, "
            f"or at this step time it must yield {needed:.2f} tokens."
            + _verify_and_draft(comparison, row)
            + _of_which(comparison, row.concurrency)
        )
    return notes


def _verify_and_draft(comparison: Comparison, row: Row) -> str:
    """How the speculating step divides, where the plain mode was measured under as many tokens."""
    if not (parts := verify.split(comparison, row)):
        return ""
    share = parts.verify_ms / (parts.verify_ms + parts.draft_ms)
    return (
        f" A pass over {parts.tokens} tokens takes {comparison.base} about {parts.verify_ms:.1f} ms: so much is the "
        f"verify ({share:.0%}), and {parts.draft_ms:.1f} ms are the draft and what surrounds it."
    )


def _of_which(comparison: Comparison, c: int) -> str:
    """The all-reduces' share of both modes' steps, where a collectives run on the same cards can tell it."""
    told, way = [], ""
    for name, run in ((comparison.other, comparison.pairs[0][1]), (comparison.base, comparison.pairs[0][0])):
        collectives = allreduce.find(run)
        batch = batches(run).get(c)
        share = collectives.share(run, batch, allreduce.tokens_of_a_pass(run)) if collectives and batch else None
        if collectives is None or share is None:
            continue
        ms = (
            f"{share.low_ms:.1f}"
            if share.high_ms - share.low_ms < 0.05
            else f"{share.low_ms:.1f} to {share.high_ms:.1f}"
        )
        told.append(f"{ms} ms ({share.tokens} tokens, {share.way}) in {name}")
        way = collectives.path.name
    return f" Of which all-reduce, by {way}: {', '.join(told)}." if told else ""


def table(comparison: Comparison) -> str:
    """The comparison as a Markdown table."""
    mark = " (simulated)" if comparison.simulated else ""
    lines = [
        f"| C | {comparison.base} tok/s{mark} | {comparison.other} tok/s{mark} | ratio | accept length | verdict |",
        "|---:|---:|---:|---:|---:|---|",
    ]
    for row in comparison.rows:
        cells = (number(row.base, 1), number(row.other, 1), interval(row.ratio), number(row.accept_length, 2))
        lines.append(f"| {row.concurrency} | " + " | ".join(cells) + f" | {words(comparison, row)} |")
    return "\n".join(lines)


def words(comparison: Comparison, row: Row) -> str:
    """What one row of the table says."""
    if row.ratio is None:
        return row.note or "—"
    if row.side:
        said = f"{comparison.other if row.side > 0 else comparison.base} faster"
    elif row.ratio.low is None:
        said = f"no difference beyond {MARGIN:.0%}"
    else:
        said = f"equal within {MARGIN:.0%}" if row.same else "no difference shown"
    return f"{said} ({row.note})" if row.note else said


def interval(ratio: Ratio | None) -> str:
    """×1.42 [1.38, 1.46], or the bare ratio of a single pair."""
    if ratio is None:
        return "—"
    if ratio.low is None or ratio.high is None:
        return f"{ratio.value:.2f}"
    return f"{ratio.value:.3f} [{ratio.low:.3f}, {ratio.high:.3f}]"


def number(value: float | None, digits: int) -> str:
    return "—" if value is None else f"{value:.{digits}f}"


def headline(comparison: Comparison) -> list[str]:
    """The answer, or why there is none, as Markdown lines. With --force the answer carries the reasons."""
    if not comparison.refused:
        return [f"**{verdict(comparison)}**"]
    reasons = [f"- {reason}" for reason in comparison.refused]
    if comparison.forced:
        return [f"**NOT COMPARABLE, printed by force: {verdict(comparison)}**", "", *reasons]
    return ["**No headline: these runs cannot be compared.**", "", *reasons]


def text(comparison: Comparison) -> str:
    """Table, verdict and qualifications as Markdown. A refused headline is replaced by the reasons for the refusal."""
    notes = [f"- {note}" for note in qualifications(comparison)]
    parts = [table(comparison), "", *headline(comparison), "", *notes]
    if explained := why(comparison):
        parts += ["", "Why:", "", *[f"- {line}" for line in explained]]
    return "\n".join(parts)


def texts(comparisons: Sequence[Comparison]) -> str:
    return "\n\n".join(map(text, comparisons))
