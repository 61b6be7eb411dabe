"""/metrics: the series of a real SGLang 0.5.15, listed in metrics.json, in Prometheus' text format.

Times are simulated seconds. What the double has no notion of (pools of other models, queues of other set-ups) is 0,
as it is in a real server without them.
"""

from __future__ import annotations

import json
import math
import time
from bisect import bisect_left
from collections import defaultdict
from itertools import pairwise
from pathlib import Path
from typing import Any

from .info import Info

SERIES: list[dict[str, Any]] = json.loads(Path(__file__).with_name("metrics.json").read_text(encoding="utf-8"))
KIND = "text/plain; version=0.0.4; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class _Histogram:
    def __init__(self, bounds: list[float]) -> None:
        self.bounds, self.counts, self.sum = bounds, [0] * (len(bounds) + 1), 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class Metrics:
    """Counts what passes; `render()` adds what the engine knows at that moment."""

    def __init__(self, info: Info) -> None:
        self._info = info
        self._counters: dict[str, dict[Labels, float]] = defaultdict(lambda: defaultdict(float))
        self._active: dict[Labels, int] = defaultdict(int)
        self._histograms: dict[str, _Histogram] = {
            row["name"]: _Histogram([float(bound) for bound in row["buckets"][:-1]])
            for row in SERIES
            if row["type"] == "histogram"
        }

    def came(self, endpoint: str, method: str) -> None:
        """Count an HTTP request."""
        labels = (("endpoint", endpoint), ("method", method))
        self._counters["sglang:http_requests_total"][labels] += 1
        self._active[labels] += 1

    def answered(self, endpoint: str, method: str, status: int) -> None:
        """Count its answer's head."""
        labels = (("endpoint", endpoint), ("method", method), ("status_code", str(status)))
        self._counters["sglang:http_responses_total"][labels] += 1
        self._active[labels[:2]] -= 1

    def aborted(self) -> None:
        self._counters["sglang:num_aborted_requests_total"][()] += 1

    def finished(
        self, *, prompt: int, cached: int, generated: int, verifies: int, first_s: float, whole_s: float
    ) -> None:
        """Count a request that ended; times are simulated seconds."""
        count = self._counters
        count["sglang:prompt_tokens_total"][()] += prompt
        count["sglang:generation_tokens_total"][()] += generated
        count["sglang:num_requests_total"][()] += 1
        if verifies:
            count["sglang:spec_verify_calls_total"][()] += verifies
        if cached:
            count["sglang:cached_tokens_total"][(("cache_source", "device"),)] += cached
        for name, value in (
            ("time_to_first_token_seconds", first_s),
            ("e2e_request_latency_seconds", whole_s),
            ("prompt_tokens_histogram", prompt),
            ("uncached_prompt_tokens_histogram", prompt - cached),
            ("generation_tokens_histogram", generated),
            ("queue_time_seconds", 0.0),
        ):
            self._histograms[f"sglang:{name}"].observe(value)
        if generated > 1:
            # Evenly spread: the single gaps are not kept.
            gap = (whole_s - first_s) / (generated - 1)
            self._histograms["sglang:inter_token_latency_seconds"].observe(gap, generated - 1)

    def render(self) -> bytes:
        """Return the whole text."""
        gauges = self._gauges()
        lines = []
        for row in SERIES:
            name, kind = row["name"], row["type"]
            lines += [f"# HELP {name} {row['help']}", f"# TYPE {name} {kind}"]
            if name == "sglang:http_requests_active":
                lines += [f"{name}{_shown(labels)} {_number(value)}" for labels, value in self._active.items()]
            elif kind == "histogram":
                lines += self._histogram(row)
            elif kind == "counter":
                lines += [
                    f"{name}{_shown((*self._common(row, 0), *labels))} {_number(value)}"
                    for labels, value in self._counted(name)
                ]
            else:
                lines += self._gauge(row, gauges.get(name, 0.0))
        return "\n".join([*lines, ""]).encode()

    def _common(self, row: dict[str, Any], rank: int) -> Labels:
        """Return the labels that tell the server and the rank, where the series has them."""
        values = {
            "engine_type": "unified",
            "model_name": self._info.model,
            "moe_ep_rank": "0",
            "pp_rank": "0",
            "tp_rank": str(rank),
        }
        return tuple((label, values[label]) for label in row["labels"] if label in values)

    def _counted(self, name: str) -> list[tuple[Labels, float]]:
        engine = self._info.engine
        if name == "sglang:realtime_tokens_total":
            modes = {
                "prefill_compute": engine.tokens_in,
                "prefill_cache": engine.tokens_cached,
                "decode": engine.tokens_out,
            }
            return [((("mode", mode),), value) for mode, value in modes.items() if value]
        if name == "sglang:cuda_graph_passes_total":
            return [((("mode", mode),), value) for mode, value in engine.passes.items() if value]
        if name == "sglang:process_cpu_seconds_total":
            return [((("component", "tokenizer"),), time.process_time())]
        return list(self._counters[name].items())

    def _gauge(self, row: dict[str, Any], value: float) -> list[str]:
        name, labels = row["name"], row["labels"]
        if not labels:
            return [f"{name} {_number(value)}"]
        if "le" in labels:
            bounds = ["0", "1", "2", "3", "5", "7", "10", "20", "50", "100", "200", "+Inf"]
            return [
                f"{name}{_shown((*self._common(row, 0), ('gt', low), ('le', high)))} 0.0"
                for low, high in pairwise(bounds)
            ]
        ranks = range(int(self._info.args.tp_size or 1)) if row.get("every_rank") else (0,)
        extra = (("pid", "0"),) if "pid" in labels else ()
        return [f"{name}{_shown((*self._common(row, rank), *extra))} {_number(value)}" for rank in ranks]

    def _histogram(self, row: dict[str, Any]) -> list[str]:
        name, histogram = row["name"], self._histograms[row["name"]]
        total = sum(histogram.counts)
        if not total:
            return []
        labels = self._common(row, 0)
        lines, seen = [], 0
        for bound, count in zip(row["buckets"], histogram.counts, strict=True):
            seen += count
            lines.append(f"{name}_bucket{_shown((*labels, ('le', bound)))} {_number(seen)}")
        return [
            *lines,
            f"{name}_sum{_shown(labels)} {_number(histogram.sum)}",
            f"{name}_count{_shown(labels)} {_number(total)}",
        ]

    def _gauges(self) -> dict[str, float]:
        info, engine, plan = self._info, self._info.engine, self._info.plan
        last = info.last_decode
        kept = len(engine.cache) if engine.cache is not None else 0
        held = engine.tokens_held
        drafts = engine.mode.draft_tokens - 1
        accepted = last.accept_length if last is not None and engine.speculates else 0.0
        values: dict[str, float] = {
            "max_total_num_tokens": plan.tokens,
            "num_pages": plan.tokens,
            "page_size": 1,
            "context_len": info.context,
            "startup_available_gpu_memory_gb": plan.after_pool - plan.graph,
            "num_running_reqs": len(engine.running),
            "num_queue_reqs": len(engine.waiting),
            "gen_throughput": info.gen_throughput,
            "cache_hit_rate": engine.hit_rate,
            "decode_sum_seq_lens": held,
            "token_usage": round(held / plan.tokens, 2),
            "full_token_usage": held / plan.tokens,
            "num_used_tokens": held,
            "kv_used_tokens": held,
            "kv_evictable_tokens": kept,
            "kv_available_tokens": max(plan.tokens - held - kept, 0),
            "spec_accept_length": accepted,
            "spec_accept_rate": (accepted - 1) / drafts if accepted and drafts else 0.0,
            "spec_num_steps": engine.mode.draft_steps,
            "spec_num_draft_tokens": engine.mode.draft_tokens if engine.speculates else 0,
            "utilization": len(engine.running) / engine.max_running,
            "fwd_occupancy": math.nan,
            "new_token_ratio": 0.7,
            "is_cuda_graph": last is not None and last.captured,
        }
        return {f"sglang:{name}": float(value) for name, value in values.items()}


def _shown(labels: Labels) -> str:
    """Return labels as the client library orders them: by name."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{value}"' for name, value in sorted(labels)) + "}"


def _number(value: float) -> str:
    """Write a float as Go and the Python client do."""
    if math.isnan(value):
        return "NaN"
    if abs(value) >= 1e6 and value == int(value):
        mantissa, _, exponent = f"{value:.15e}".partition("e")
        digits = mantissa.rstrip("0").rstrip(".")
        return f"{digits}e+{int(exponent):02d}"
    return repr(float(value))
