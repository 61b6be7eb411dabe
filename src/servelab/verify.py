"""Recompute every figure of a bundle's summary from its raw rows, by the definitions that the summary itself states.

On purpose this shares no code with `servelab.load.metrics`, which made the figures: a mistake in one is seen by the
other. The rows hold wall seconds since 1970; a summary's figures are reported seconds, wall seconds × time_scale.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import Bundle, BundleError

# Rows keep microseconds, figures six digits: what differs by more than both roundings was computed otherwise.
CLOCK = 2e-6
DIGITS = 2e-5

# What no row can tell: the client's and the server's own readings.
NOT_IN_ROWS = ("accept_length where the server told only its average", "GPUs", "self", "cache", "notices")


@dataclass(frozen=True)
class Figure:
    """One figure of a summary beside what the rows give. ``slack``: the rounding that it may be off by."""

    name: str
    stated: Any
    found: Any
    slack: float = 0.0

    @property
    def agrees(self) -> bool:
        if isinstance(self.stated, int | float) and isinstance(self.found, int | float):
            return abs(self.stated - self.found) <= self.slack + DIGITS * abs(self.found) + 1e-12
        return bool(self.stated == self.found)


def figures(run: Bundle) -> list[Figure]:
    """Every figure that the rows of *run* can tell. Raises BundleError when rows are missing or unreadable."""
    if not run.summary:
        raise BundleError(f"{run.path} measured nothing: there is no summary to verify.")
    simulated = (run.summary.get("server") or {}).get("simulated") or {}
    scale = float(simulated.get("time_scale") or 1)
    cards = run.path / "cards.jsonl"
    readings = _rows(cards) if cards.is_file() else []
    found = []
    for level in run.summary["levels"]:
        c, name = level["concurrency"], level.get("level")
        rows = _rows(run.path / "levels" / (f"level-{name}.jsonl" if c is None else f"level-{c:04d}.jsonl"))
        found += [
            Figure(f"{name if c is None else f'C={c}'} {figure.name}", figure.stated, figure.found, figure.slack)
            for figure in [*_level(level, rows, scale), *_cards(level, readings)]
        ]
    return found


def _cards(level: dict[str, Any], readings: Sequence[dict[str, Any]]) -> Iterator[Figure]:
    stated, window = level.get("cards"), level.get("window")
    if not stated or not window:
        return
    inside = [r["gpus"] for r in readings if window["start"] <= r["t"] <= window["end"]]
    yield Figure("cards readings", stated["readings"], len(inside))
    for key, over, along in (
        ("power_w", sum, statistics.fmean),
        ("clock_sm_mhz", min, statistics.fmean),
        ("temperature_c", max, max),
        ("memory_used_mib", max, max),
    ):
        told = [[card[key] for card in gpus] for gpus in inside]
        whole = [over(values) for values in told if None not in values]
        yield Figure(f"cards {key}", stated[key], along(whole) if whole else None)
    for reason, share in (stated["throttle"] or {}).items():
        having = [gpus for gpus in inside if any(reason in (card["throttle_reasons"] or []) for card in gpus)]
        yield Figure(f"cards {reason}", share, len(having) / len(inside) if inside else None, 1e-4)


def _rows(path: Path) -> list[dict[str, Any]]:
    try:
        return [json.loads(line) for line in path.read_text().splitlines() if line]
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read ({error}): without its rows a level cannot be verified.") from error


def _level(level: dict[str, Any], rows: Sequence[dict[str, Any]], scale: float) -> Iterator[Figure]:
    kinds = Counter(row["error"]["kind"] for row in rows if row["error"])
    cancelled = kinds.pop("cancelled", 0)
    requests = level["requests"]
    yield Figure("completed", requests["completed"], sum(1 for row in rows if not row["error"]))
    yield Figure("failed", requests["failed"], kinds.total())
    yield Figure("cancelled", requests.get("cancelled", 0), cancelled)
    yield Figure("errors", requests["errors"], dict(kinds))
    yield from _naive(level, rows, scale)

    window = level.get("window")
    if not window:
        yield Figure("output_tok_s", level["output_tok_s"], None)
        yield Figure("valid", level["valid"], False)
        return
    start, end = window["start"], window["end"]
    is_open = level["concurrency"] is None
    if not is_open:
        need = math.ceil(0.95 * level["concurrency"])
        yield Figure("window start", start, _reached(rows, need), CLOCK)
    length = (end - start) * scale
    yield Figure("window_s", level["window_s"], length, CLOCK * scale)
    tokens = _tokens(rows, start, end)
    edge = _tokens(rows, start - CLOCK, end + CLOCK) - _tokens(rows, start + CLOCK, end - CLOCK)
    yield Figure("output_tok_s", level["output_tok_s"], tokens / length, edge / length)
    busy = sum(max(0.0, min(row["t_end"], end) - max(row["t_send"], start)) for row in rows if row["t_send"])
    in_flight = busy / (end - start)
    yield Figure("in_flight_mean", level["in_flight_mean"], in_flight, CLOCK * len(rows) / (end - start))

    if is_open:
        counted = [row for row in rows if not row["error"] and start - CLOCK <= row["t_due"] <= end + CLOCK]
        # Due at the very edge of the window: the rows' microseconds cannot tell.
        edge = sum(min(abs(row["t_due"] - start), abs(row["t_due"] - end)) <= CLOCK for row in rows)
        came = sum(start < row["t_due"] <= end for row in rows)
        went = sum(start < row["t_end"] <= end for row in rows if not row["error"])
        yield Figure("arrived_per_s", level["arrived_per_s"], came / length, (edge + 1) / length)
        yield Figure("ended_per_s", level["ended_per_s"], went / length, 1 / length)
    else:
        counted = [row for row in rows if not row["error"] and row["t_send"] >= start and row["t_end"] <= end]
    # What latencies count from: the socket in a closed loop, the intended time in an open one.
    late = [row["t_send"] - row["t_due"] if is_open else 0.0 for row in counted]
    yield Figure("in_window", requests.get("in_window", len(counted)), len(counted))
    ms = 1000 * scale
    gaps = [b[0] - a[0] for row in counted for a, b in zip(row["chunks"], row["chunks"][1:], strict=False)]
    decoded = [row for row in counted if len(row["chunks"]) > 1 and row["chunks"][0][1] is not None]
    decoded = [row for row in decoded if row["completion_tokens"] and row["completion_tokens"] > row["chunks"][0][1]]
    later = [row["completion_tokens"] - row["chunks"][0][1] for row in decoded]
    for name, values in (
        ("ttft_ms", [(row["chunks"][0][0] + wait) * ms for row, wait in zip(counted, late, strict=True)]),
        ("e2e_ms", [(row["t_end"] - row["t_send"] + wait) * ms for row, wait in zip(counted, late, strict=True)]),
        (
            "tpot_ms",
            [
                (row["chunks"][-1][0] - row["chunks"][0][0]) / tokens * ms
                for row, tokens in zip(decoded, later, strict=True)
            ],
        ),
        ("chunk_gap_ms", [gap * ms for gap in gaps]),
    ):
        yield from _spread(name, level[name], values, len(counted), CLOCK * ms)
    if "ttfa_ms" in level:
        yield from _later_figures(level, counted, length, scale)
    deltas = sum(len(row["chunks"]) - 1 for row in decoded)
    yield Figure("tokens_per_chunk", level["tokens_per_chunk"], sum(later) / deltas if deltas else None)
    if counted and "prompt_tokens_mean" in level:
        prompt = statistics.fmean(row["prompt_tokens"] or 0 for row in counted)
        yield Figure("prompt_tokens_mean", level["prompt_tokens_mean"], prompt)
        known = [row["cached_tokens"] for row in counted if row["cached_tokens"] is not None]
        yield Figure("cached_tokens_mean", level["cached_tokens_mean"], sum(known) / len(counted) if known else None)
    if level["valid"]:
        # A valid level must be one by the rows too: no failure, the load sustained, something measured.
        failed = kinds.total()
        sound = failed <= level.get("failures_allowed", 0) * len(rows) and bool(counted)
        sound = sound and (is_open or in_flight >= 0.98 * level["concurrency"] * (1 - DIGITS))
        yield Figure("valid", True, sound)


def _later_figures(
    level: dict[str, Any], counted: Sequence[dict[str, Any]], length: float, scale: float
) -> Iterator[Figure]:
    """Figures that summaries of the first client did not have."""
    ms = 1000 * scale
    origin = "t_due" if level["concurrency"] is None else "t_send"
    answers = [(row["t_answer"] - row[origin]) * ms for row in counted if row["t_answer"] is not None]
    yield from _spread("ttfa_ms", level["ttfa_ms"], answers, len(counted), 2 * CLOCK * ms)
    per_token: list[float] = []
    for row in counted:
        before = row["chunks"][0][0]
        for offset, tokens in row["chunks"][1:]:
            if tokens:  # a delta without a token leaves its time to the next one
                per_token += [(offset - before) / tokens * ms] * tokens
                before = offset
    yield from _spread("itl_ms", level["itl_ms"], per_token, len(counted), CLOCK * ms)
    speed = level["tpot_ms"]["mean"]
    yield Figure("output_tok_s_per_user", level["output_tok_s_per_user"], 1000 / speed if speed else None)
    verified = [row for row in counted if row["verify_steps"] is not None]
    if verified:
        steps = sum(row["verify_steps"] for row in verified)
        yield Figure("accept_length", level["accept_length"], sum(r["completion_tokens"] for r in verified) / steps)
    if level["goodput"]:
        limits = level["goodput"]["slo"]
        good = sum(_meets(limits, row, origin, ms) for row in counted)
        # A latency at its limit to the microsecond may count on either side.
        yield Figure("goodput requests_s", level["goodput"]["requests_s"], good / length, 1 / length)


def _meets(limits: dict[str, float], row: dict[str, Any], origin: str, ms: float) -> bool:
    later = (row["completion_tokens"] or 0) - (row["chunks"][0][1] or 0)
    found = {"ttft_ms": row["t_first"] - row[origin], "e2e_ms": row["t_end"] - row[origin]}
    if row["t_answer"] is not None:
        found["ttfa_ms"] = row["t_answer"] - row[origin]
    if row["chunks"][0][1] is not None and len(row["chunks"]) > 1 and later > 0:
        found["tpot_ms"] = (row["chunks"][-1][0] - row["chunks"][0][0]) / later
    return all(name in found and found[name] * ms <= most for name, most in limits.items())


def _naive(level: dict[str, Any], rows: Sequence[dict[str, Any]], scale: float) -> Iterator[Figure]:
    sent = [row["t_send"] for row in rows if row["t_send"]]
    # A response that was cut or failed still ended with its last byte; one that never began did not.
    ends = [row["t_end"] for row in rows if row["chunks"]]
    if not sent or not ends:
        return
    tokens = sum(
        row["completion_tokens"] if row["completion_tokens"] is not None else sum(n or 0 for _, n in row["chunks"])
        for row in rows
    )
    if all(not row["error"] for row in rows):
        yield Figure(
            "output_tok_s_naive", level["output_tok_s_naive"], tokens / ((max(ends) - min(sent)) * scale), 1e-3
        )


def _reached(rows: Sequence[dict[str, Any]], need: int) -> float | None:
    """When *need* requests were in flight for the first time: a start at an instant counts after an end at it."""
    changes = [(row["t_send"], 1) for row in rows if row["t_send"]]
    changes += [(row["t_end"], 0) for row in rows if row["t_send"]]
    running = 0
    for moment, is_start in sorted(changes):
        running += 1 if is_start else -1
        if running >= need:
            return float(moment)
    return None


def _tokens(rows: Sequence[dict[str, Any]], start: float, end: float) -> float:
    """Tokens that arrived after *start* and not after *end*; deltas without a count share their request's total."""
    total = 0.0
    for row in rows:
        chunks = row["chunks"]
        inside = [tokens for offset, tokens in chunks if start < row["t_send"] + offset <= end]
        if any(tokens is not None for _, tokens in chunks):
            total += sum(tokens or 0 for tokens in inside)
        elif chunks and row["completion_tokens"]:
            total += row["completion_tokens"] * len(inside) / len(chunks)
    return total


def _spread(name: str, stated: dict[str, Any], values: list[float], requests: int, slack: float) -> Iterator[Figure]:
    values = sorted(values)
    yield Figure(f"{name} n", stated["n"], len(values))
    yield Figure(f"{name} mean", stated["mean"], statistics.fmean(values) if values else None, slack)
    for p, least in ((50, 1), (90, 64), (99, 662)):
        enough = values and requests >= least
        rank = math.ceil(len(values) * p / 100)
        yield Figure(f"{name} p{p}", stated[f"p{p}"], values[rank - 1] if enough else None, slack)


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "verify-bundle", help="check a run's files and recompute its figures from its raw rows"
    )
    parser.add_argument("paths", type=Path, nargs="+", metavar="BUNDLE")


def run(args: argparse.Namespace) -> int:
    bad = False
    for path in args.paths:
        try:
            wrong = bundle.problems(path)
            found = figures(bundle.read(path))
        except BundleError as error:
            print(f"servelab verify-bundle: {error}", file=sys.stderr)
            bad = True
            continue
        wrong += [f"{f.name} is stated as {f.stated}; the rows give {f.found}." for f in found if not f.agrees]
        bad = bad or bool(wrong)
        print(
            "\n".join(f"{path}: {text}" for text in wrong)
            if wrong
            else f"{path}: {len(found)} figures recomputed, all agree."
        )
    if not bad:
        print(f"Not in the rows, so taken as told: {', '.join(NOT_IN_ROWS)}.")
    return 1 if bad else 0
