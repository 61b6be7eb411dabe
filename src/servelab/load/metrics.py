"""From the requests of a level to its figures. Pure; every definition that a result rests on is written here.

A *request* counts for latency figures when it did not fail and, in a closed loop, was sent and ended inside the steady
window; in an open loop, was due inside it, however long it took. Tokens count for the throughput when they arrived
inside the window, whichever request they belong to.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise, repeat
from operator import sub
from typing import Any

from servelab.load.arrivals import STEADY
from servelab.load.capture import Record
from servelab.shared.sse import Reply

DEFINITIONS = {
    "window": "closed loop: from the moment when 95 % of the level's requests were in flight until the client stopped "
    "launching; open loop: from when all requests launched before the first response was complete have ended until "
    "min_seconds later; ramp and trace: all of it, no steady state",
    "requests counted for latencies": "not failed, and in a closed loop sent and ended inside the window, in an open "
    "one due inside it",
    "origin of latencies": "closed loop: last byte of the request handed to the socket; open loop: when it was due",
    "ttft_ms": "origin → first delta with text in any channel",
    "ttfa_ms": "origin → first delta with text that is not reasoning",
    "chunk_gap_ms": "between two consecutive deltas with text of one request",
    "itl_ms": "a chunk gap / the tokens of the delta that ends it, counted once for each of those tokens",
    "tpot_ms": "(last - first delta with text) / (tokens - tokens of the first delta), one value per request",
    "e2e_ms": "origin → last byte of the response",
    "output_tok_s": "tokens that arrived inside the window / its length",
    "silence_s": "longest time inside the window in which no delta with text came on any connection",
    "output_tok_s_naive": "all tokens received / (last byte received - first request sent)",
    "output_tok_s_per_user": "1000 / mean tpot_ms",
    "output_tok_s_per_gpu": "output_tok_s / GPUs of the server; null where their number is unknown",
    "goodput": "requests that count for latencies and meet every limit: per second of the window, and as a share of "
    "these and of those that failed",
    "tokens_per_chunk": "(tokens - tokens of the first delta) / (deltas - 1), over all counted requests",
    "accept_length": "requests: tokens / verify steps over all counted requests that the server told steps of; server: "
    "its own average since the cache flush before the level; null where neither can be known",
    "percentile": "nearest rank: the smallest value that at least p % of the values do not exceed",
    "p90, p99": "null below 64 and 662 requests",
    "tokens of a delta": "from the cumulative usage on every delta; without it the total is spread evenly",
    "lag": "kernel receive stamp → read by the client",
    "late_send": "due (in a closed loop: the response before it complete, or its time in the ramp) → request sent",
    "simulator_late_share": "share of the level by which a simulated server fell behind its own time; null: a real one",
    "merged_share": "share of deltas that came in one read with the one before, so that their gap is 0",
    "merged_first_share": "share of requests whose first delta came in one read with the second, and has its stamp",
}

# Fewest requests for a percentile (MLPerf's early stopping rule at 99 % confidence).
P90_REQUESTS = 64
P99_REQUESTS = 662

# A closed level is sustained when this share of its requests is in flight on average in the window.
SUSTAINED = 0.98

# An open level is not sustained when more requests came than ended, by both this share and three times their scatter.
QUEUE_GROWS = 0.05
SCATTER = 3

# Requests sent later than this (wall time, p99) are not the load that was asked for.
LATE_SEND_MS = 10.0

# In a steady closed loop something arrives within the time of any one request. A server that is silent for much longer
# did something else, like compiling kernels for a batch that it met for the first time.
SILENT_REQUESTS = 2.0
SILENT_MS = 500.0
SILENCE_SLOT = 10_000_000  # ns; no silence is told more exactly

# The client was the bottleneck above these. Stamps come from the kernel, so a late read does not falsify a time, unless
# it is so late that the next delta is already there too. A server that wakes late bunches deltas as well, however
# promptly they are read: it is the client's doing only when it is usually late by a good part of a gap.
# Deltas read together move no mean and no throughput, only the gaps' distribution, and a first one the TTFT: a notice.
CPU_SHARE = 0.7
CPU_SHARE_STAMPED = (
    0.9  # with kernel stamps a busy client still measures right; what it does to the load shows elsewhere
)
MERGED_SHARE = 0.1
LATE_SHARE = 0.25
MERGED_NOTICE = 0.01

# A simulated server that falls behind its schedule is slower than its model by the same share.
SIMULATOR_LATE = 0.05

# Prompts have nothing in common but a chat template; a prefix cache that holds more of them distorts the TTFT.
CACHED_NOTICE = 0.1


@dataclass(frozen=True)
class Window:
    """The steady window. Times in ns; `in_flight_mean` over the window."""

    start: int
    end: int
    in_flight_mean: float


def steady_window(intervals: Iterable[tuple[int, int]], concurrency: int, stop: int) -> Window | None:
    """The window of a closed loop that stopped launching at `stop`, from the (sent, ended) of its requests.

    It opens when at least 95 % of `concurrency` are in flight for the first time and closes at `stop`; the short dips
    between one response and the next request stay in it (they show in the mean). None when the load was never reached.
    """
    need = math.ceil(STEADY * concurrency)
    changes: list[tuple[int, int]] = []
    for sent, ended in intervals:
        changes.append((sent, 1))
        changes.append((ended, -1))
    changes.sort()
    start: int | None = None
    level = 0
    area = 0
    last = 0
    for time, change in changes:
        if time >= stop:
            break
        if start is not None:
            area += level * (time - last)
        last = time
        level += change
        if start is None and level >= need:
            start = time
    if start is None or stop <= start:
        return None
    area += level * (stop - last)
    return Window(start, stop, area / (stop - start))


def open_window(intervals: Iterable[tuple[int, int]], start: int, end: int) -> Window | None:
    """The window of an open loop, which knows its ends, from the (sent, ended) of its requests."""
    if end <= start:
        return None
    area = sum(max(0, min(ended, end) - max(sent, start)) for sent, ended in intervals)
    return Window(start, end, area / (end - start))


def spread(values: Iterable[float], requests: int, unit: float = 1.0) -> dict[str, float | int | None]:
    """mean, p50, p90, p99 and n of values × `unit`; a percentile that `requests` requests do not support is null."""
    return weighted_spread({1: values}, requests, unit)


def weighted_spread(
    values: Mapping[int, Iterable[float]], requests: int, unit: float = 1.0
) -> dict[str, float | int | None]:
    """The same for values by how many times each stands. Large levels have millions: one copy, to sort them."""
    groups = {weight: sorted(group) for weight, group in values.items()}
    n = sum(weight * len(group) for weight, group in groups.items())
    if not n:
        return {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}
    found = _percentiles(groups, n, (50, 90, 99))
    return {
        "mean": _figure(sum(weight * math.fsum(group) for weight, group in groups.items()) / n * unit),
        "p50": _figure(found[0] * unit),
        "p90": _figure(found[1] * unit) if requests >= P90_REQUESTS else None,
        "p99": _figure(found[2] * unit) if requests >= P99_REQUESTS else None,
        "n": n,
    }


def _percentiles(groups: Mapping[int, Sequence[float]], n: int, wanted: Sequence[int]) -> list[float]:
    if len(groups) == 1:
        ((weight, ordered),) = groups.items()
        return [ordered[math.ceil(math.ceil(p / 100 * n) / weight) - 1] for p in wanted]
    ranks = [math.ceil(p / 100 * n) for p in wanted]
    found: list[float] = []
    passed = 0
    for value, weight in heapq.merge(*(zip(group, repeat(weight)) for weight, group in groups.items())):
        passed += weight
        while passed >= ranks[len(found)]:
            found.append(value)
            if len(found) == len(ranks):
                return found
    raise AssertionError("the ranks are within the values")


def tokens_between(reply: Reply, start: int, end: int) -> float:
    """Tokens of one reply that arrived after `start` and not after `end`."""
    known = [tokens for time, tokens in reply.chunks if start < time <= end and tokens is not None]
    if known:
        return sum(known)
    if reply.completion_tokens is None or not reply.chunks or reply.chunks[0][1] is not None:
        return 0
    inside = sum(1 for time, _ in reply.chunks if start < time <= end)
    return reply.completion_tokens * inside / len(reply.chunks)


def received_tokens(reply: Reply) -> int:
    """All tokens of one reply that are known to have arrived."""
    if reply.completion_tokens is not None:
        return reply.completion_tokens
    return sum(tokens or 0 for _, tokens in reply.chunks)


def decode(reply: Reply) -> tuple[int, int, int] | None:
    """(ns, tokens, deltas) behind the first delta; None where that cannot be known."""
    if len(reply.chunks) < 2 or reply.completion_tokens is None or reply.chunks[0][1] is None:
        return None
    tokens = reply.completion_tokens - reply.chunks[0][1]
    if tokens <= 0:
        return None
    return reply.chunks[-1][0] - reply.chunks[0][0], tokens, len(reply.chunks) - 1


class Silence:
    """Finds the longest time in which nothing came, whatever the order in which requests are told. Times in ns."""

    def __init__(self, window: Window) -> None:
        self.start = window.start
        self.heard = bytearray(max(1, (window.end - window.start) // SILENCE_SLOT))

    def add(self, reply: Reply) -> None:
        start, slots = self.start, len(self.heard)
        for slot in {(time - start) // SILENCE_SLOT for time, _ in reply.chunks}:
            if 0 <= slot < slots:
                self.heard[slot] = 1

    def longest(self) -> int:
        return max(map(len, self.heard.split(b"\1"))) * SILENCE_SLOT


@dataclass
class Tally:
    """Adds up one level, request by request, so that no level has to fit into memory as a whole."""

    window: Window | None
    open_loop: bool = False
    slos: dict[str, float] = field(default_factory=dict)  # figure (ttft_ms, …) → most that is good, wall ms
    completed: int = 0
    cancelled: int = 0
    errors: Counter[str] = field(default_factory=Counter)
    tokens_in_window: float = 0.0
    tokens: int = 0
    first_sent: int | None = None
    last_byte: int | None = None
    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    verified_tokens: int = 0
    verify_steps: int = 0
    estimated: int = 0
    good: int = 0
    failed_in_window: int = 0
    due_in_window: int = 0
    ended_in_window: int = 0
    ttfa: array[float] = field(default_factory=lambda: array("d"))
    itl: dict[int, array[float]] = field(default_factory=dict)  # by the tokens that came together
    ttft: array[float] = field(default_factory=lambda: array("d"))
    e2e: array[float] = field(default_factory=lambda: array("d"))
    tpot: array[float] = field(default_factory=lambda: array("d"))
    gaps: array[float] = field(default_factory=lambda: array("d"))
    late: array[float] = field(default_factory=lambda: array("d"))
    lag: array[float] = field(default_factory=lambda: array("d"))
    decode_tokens: int = 0
    decode_deltas: int = 0
    merged: int = 0
    merged_first: int = 0
    reads: int = 0
    unstamped: int = 0
    silence: Silence | None = field(init=False)

    def __post_init__(self) -> None:
        self.silence = Silence(self.window) if self.window else None

    def add(self, record: Record, reply: Reply) -> None:
        """Take one request in."""
        self.tokens += received_tokens(reply)
        if record.sent:
            self.first_sent = min(self.first_sent or record.sent, record.sent)
        if record.times:
            self.last_byte = max(self.last_byte or 0, record.times[-1])
        self.reads += len(record.reads)
        self.unstamped += record.unstamped
        kind = reply.error[0] if reply.error else None
        if kind is None:
            self.completed += 1
        elif kind == "cancelled":
            self.cancelled += 1
        else:
            self.errors[kind] += 1
        window = self.window
        if window is None or self.silence is None:
            return
        self.silence.add(reply)
        self.tokens_in_window += tokens_between(reply, window.start, window.end)
        self.due_in_window += window.start < record.due <= window.end
        self.ended_in_window += window.start < record.ended <= window.end and kind is None
        if self.open_loop:
            counts = window.start <= record.due <= window.end and kind != "cancelled"
        else:
            counts = record.sent >= window.start and record.ended <= window.end
        if not counts:
            return
        self.lag.extend(map(sub, record.reads, record.times))
        if record.sent:
            self.late.append(record.sent - record.due)
        if kind is None:
            self._count(record, reply)
        elif kind != "cancelled":
            self.failed_in_window += 1

    def _count(self, record: Record, reply: Reply) -> None:
        times = [time for time, _ in reply.chunks]
        origin = record.due if self.open_loop else record.sent
        self.requests += 1
        self.estimated += reply.estimated
        self.prompt_tokens += reply.prompt_tokens or 0
        if reply.cached_tokens is not None:
            self.cached_tokens = (self.cached_tokens or 0) + reply.cached_tokens
        if reply.reasoning_tokens is not None:
            self.reasoning_tokens = (self.reasoning_tokens or 0) + reply.reasoning_tokens
        if reply.verify_steps is not None and reply.completion_tokens is not None:
            self.verified_tokens += reply.completion_tokens
            self.verify_steps += reply.verify_steps
        figures: dict[str, float] = {"ttft_ms": times[0] - origin, "e2e_ms": record.ended - origin}
        self.ttft.append(figures["ttft_ms"])
        self.e2e.append(figures["e2e_ms"])
        if reply.first_answer is not None:
            figures["ttfa_ms"] = reply.first_answer - origin
            self.ttfa.append(figures["ttfa_ms"])
        gaps = [b - a for a, b in pairwise(times)]
        self.gaps.extend(gaps)
        self.merged += gaps.count(0)
        self.merged_first += gaps[:1] == [0]
        self._per_token(gaps, reply)
        decoded = decode(reply)
        if decoded is not None:
            ns, tokens, deltas = decoded
            self.tpot.append(ns / tokens)
            figures["tpot_ms"] = self.tpot[-1]
            self.decode_tokens += tokens
            self.decode_deltas += deltas
        self.good += all(name in figures and figures[name] <= most * 1e6 for name, most in self.slos.items())

    def _per_token(self, gaps: list[int], reply: Reply) -> None:
        waited = 0
        if gaps and {tokens for _, tokens in islice(reply.chunks, 1, None)} == {1}:
            self.itl.setdefault(1, array("d")).extend(gaps)
            return
        for gap, (_, tokens) in zip(gaps, reply.chunks[1:], strict=True):
            if tokens is None:
                return
            waited += gap  # a delta without a token of its own passes its time on
            if tokens > 0:
                if tokens not in self.itl:
                    self.itl[tokens] = array("d")
                self.itl[tokens].append(waited / tokens)
                waited = 0

    def summary(self, concurrency: int | None, scale: float, stamped: bool, cpu_share: float) -> dict[str, Any]:
        """The level's entry in summary.json. Times and rates in reported seconds = wall seconds × `scale`."""
        ms = scale / 1e6
        window = self.window
        seconds = (window.end - window.start) / 1e9 * scale if window else None
        total = (self.last_byte - self.first_sent) / 1e9 * scale if self.last_byte and self.first_sent else None
        n = self.requests
        gaps = len(self.gaps)
        merged = self.merged / gaps if gaps else None
        lag = spread(self.lag, P99_REQUESTS, ms) if stamped else None
        late = spread(self.late, P99_REQUESTS, ms)
        failed = sum(self.errors.values())
        n_tpot = len(self.tpot)
        chunk_gap = spread(self.gaps, n, ms)
        # Where each gap brought one token they are the same values, millions at a large level.
        alike = self.itl.keys() == {1} and len(self.itl[1]) == gaps
        return {
            "concurrency": concurrency,
            "requests": {
                "completed": self.completed,
                "failed": failed,
                "cancelled": self.cancelled,
                "in_window": n,
                "failed_in_window": self.failed_in_window,
                "tokens_estimated": self.estimated,
                "errors": dict(sorted(self.errors.items())),
            },
            "window_s": _figure(seconds),
            "silence_s": _figure(self.silence.longest() / 1e9 * scale) if self.silence else None,
            "output_tok_s": _figure(self.tokens_in_window / seconds) if seconds else None,
            "output_tok_s_naive": _figure(self.tokens / total) if total else None,
            "output_tok_s_per_user": _figure(1e9 / scale * n_tpot / math.fsum(self.tpot)) if n_tpot else None,
            "output_tok_s_per_gpu": None,
            "in_flight_mean": _figure(window.in_flight_mean) if window else None,
            "arrived_per_s": _figure(self.due_in_window / seconds) if seconds else None,
            "ended_per_s": _figure(self.ended_in_window / seconds) if seconds else None,
            "goodput": self._goodput(seconds, scale),
            "ttft_ms": spread(self.ttft, n, ms),
            "ttfa_ms": spread(self.ttfa, n, ms),
            "tpot_ms": spread(self.tpot, n, ms),
            "chunk_gap_ms": chunk_gap,
            "itl_ms": dict(chunk_gap) if alike else weighted_spread(self.itl, n, ms),
            "e2e_ms": spread(self.e2e, n, ms),
            "prompt_tokens_mean": _figure(self.prompt_tokens / n) if n else None,
            "cached_tokens_mean": _figure(self.cached_tokens / n) if self.cached_tokens is not None else None,
            "reasoning_tokens_mean": _figure(self.reasoning_tokens / n) if self.reasoning_tokens is not None else None,
            "tokens_per_chunk": _figure(self.decode_tokens / self.decode_deltas) if self.decode_deltas else None,
            "accept_length": _figure(self.verified_tokens / self.verify_steps) if self.verify_steps else None,
            "accept_length_from": "requests" if self.verify_steps else None,
            "self": {
                "cpu_share": round(cpu_share, 4),
                "lag_p50_ms": lag["p50"] if lag else None,
                "lag_p99_ms": lag["p99"] if lag else None,
                "late_send_p99_ms": late["p99"],
                "merged_share": round(merged, 5) if merged is not None else None,
                "merged_first_share": round(self.merged_first / len(self.ttft), 5) if self.ttft else None,
                "unstamped_reads": self.unstamped if stamped else None,
                "reads": self.reads,
            },
        }

    def _goodput(self, seconds: float | None, scale: float) -> dict[str, Any] | None:
        if not self.slos or not seconds:
            return None
        return {
            "slo": {name: _figure(most * scale) for name, most in self.slos.items()},
            "requests_s": _figure(self.good / seconds),
            "share": _figure(self.good / of) if (of := self.requests + self.failed_in_window) else None,
        }


def reasons_invalid(level: dict[str, Any], scale: float = 1.0) -> list[str]:
    """Why a level's figures must not be used, one sentence each; empty when they may. `scale`: reported seconds per
    wall second."""
    reasons = []
    requests = level["requests"]
    if requests["failed"] > level.get("failures_allowed", 0.0) * (requests["failed"] + requests["completed"]):
        for kind, count in requests["errors"].items():
            reasons.append(f"{count} request{'s' if count != 1 else ''} failed: {kind}")
    mean = level["in_flight_mean"]
    if mean is None:
        reasons.append("the load was never reached, so there is no steady window")
    elif level["concurrency"] is None:
        reasons += _open_reasons(level, scale)
    elif mean < SUSTAINED * level["concurrency"]:
        reasons.append(f"not sustained: {mean} of {level['concurrency']} requests in flight on average")
    elif not requests["in_window"]:
        reasons.append("no request was sent and ended inside the window")
    else:
        reasons += _silent_reasons(level, scale)
    own = level["self"]
    if own["cpu_share"] > (CPU_SHARE if own["unstamped_reads"] is None else CPU_SHARE_STAMPED):
        reasons.append(f"the client was the bottleneck: it used {own['cpu_share']:.0%} of a core")
    lag, gap = own["lag_p50_ms"], level["chunk_gap_ms"]["mean"]
    if lag is not None and gap is not None and own["merged_share"] > MERGED_SHARE and lag > LATE_SHARE * gap:
        reasons.append(
            f"the client was the bottleneck: it read {own['merged_share']:.1%} of the deltas together with one before, "
            f"usually {lag} ms late"
        )
    late = level.get("simulator_late_share")
    if late is not None and late > SIMULATOR_LATE:
        reasons.append(
            f"the simulated server fell {late:.0%} behind its own time: this machine is too busy or too slow for the "
            "time scale"
        )
    return reasons


def _silent_reasons(level: dict[str, Any], scale: float) -> list[str]:
    silence, request = level.get("silence_s"), level["e2e_ms"]["p50"]
    if silence is None or request is None or silence * 1e3 <= max(SILENT_REQUESTS * request, SILENT_MS * scale):
        return []
    return [
        f"the server stood still: for {silence:.2f} s nothing came on any connection, and a request takes "
        f"{request / 1e3:.2f} s; it may have compiled kernels, so measure once more"
    ]


def _open_reasons(level: dict[str, Any], scale: float) -> list[str]:
    reasons = []
    window = level["window_s"]
    came, went = level["arrived_per_s"] * window, level["ended_per_s"] * window
    if level.get("steady", True) and came - went > max(SCATTER * math.sqrt(came), QUEUE_GROWS * came):
        reasons.append(
            f"not sustained: {came:.0f} requests came within the window and {went:.0f} ended, so that the queue grew "
            "and every latency depends on how long it did"
        )
    if not level["requests"]["in_window"]:
        reasons.append("no request was due inside the window and answered")
    late = level["self"]["late_send_p99_ms"]
    if late is not None and late / scale > LATE_SEND_MS:
        reasons.append(f"the client was the bottleneck: it sent requests {late / scale:.3g} ms late (p99, wall time)")
    return reasons


def notices(level: dict[str, Any], most_running: int | None, cached_share: float = 0.0) -> list[str]:
    """What a reader of a valid level should know. `most_running`: how many requests the server runs at a time;
    `cached_share`: the part of each prompt that the cache is meant to hold."""
    found = []
    if level["requests"]["failed"] and level.get("failures_allowed"):
        kinds = ", ".join(f"{kind} {count}" for kind, count in level["requests"]["errors"].items())
        found.append(f"{level['requests']['failed']} requests failed: {kinds}")
    if level["requests"]["tokens_estimated"]:
        found.append(
            f"tokens of {level['requests']['tokens_estimated']} requests are estimated: counted in their text, because "
            "the server did not say"
        )
    if level["concurrency"] is None and not level.get("steady", True):
        found.append("the load changes along the level: its figures are means over all of it")
    meant = level["concurrency"] if level["concurrency"] is not None else round(level["in_flight_mean"] or 0)
    queued = meant - most_running if most_running is not None else 0
    if queued > 0:
        found.append(f"the server runs at most {most_running} requests at a time: {queued} of {meant} queue")
    merged = level["self"]["merged_share"]
    if merged is not None and merged > MERGED_NOTICE:
        found.append(
            f"{merged:.1%} of the deltas came in one read with the one before: gaps look more spread than sent"
        )
    first = level["self"].get("merged_first_share")
    if first is not None and first > MERGED_NOTICE:
        found.append(
            f"{first:.1%} of the requests had their first delta in one read with the second: unless the server sent "
            "them together, their TTFT is too high"
        )
    cached = level["cached_tokens_mean"]
    if cached_share and level["prompt_tokens_mean"]:
        if cached is None:
            found.append(f"{cached_share:.0%} of each prompt should be cached; the server does not say how much was")
        elif abs(cached / level["prompt_tokens_mean"] - cached_share) > CACHED_NOTICE:
            share = cached / level["prompt_tokens_mean"]
            found.append(f"{cached_share:.0%} of each prompt should be cached; the server says {share:.0%}")
    elif cached is not None and cached > CACHED_NOTICE * (level["prompt_tokens_mean"] or 0):
        found.append(f"the prefix cache held {cached} of {level['prompt_tokens_mean']} prompt tokens")
    return found


def _figure(value: float | None) -> float | None:
    """Six significant digits: more than any measurement here has, few enough to read."""
    return None if value is None else float(f"{value:.6g}")
