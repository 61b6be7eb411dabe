"""From a measured crossover to the configuration of --speculative-adaptive.

SGLang chooses the number of draft steps by the running batch, padded to the next size that a CUDA graph was captured
for; the entry with the largest key not above it holds. So the crossover in concurrency becomes a batch, and the batch
a captured size.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from servelab.bundle import Bundle
from servelab.compare.answer import Comparison
from servelab.compare.server_log import batches
from servelab.compare.words import where


class NotAdaptable(Exception):
    """There is nothing to adapt, or not enough is known; the message is one sentence."""


@dataclass(frozen=True)
class Derived:
    """``document``: the configuration; ``crossing``: the concurrency that it was made from; ``batch``: the running
    batch there; ``key``: from which padded batch on the other half holds; ``says``: how it came about, in sentences."""

    document: dict[str, Any]
    crossing: float
    batch: float
    key: int
    says: list[str]


def derive(comparison: Comparison) -> Derived:
    """The configuration that speculates where the comparison's other mode pays. Raises NotAdaptable."""
    base, other = comparison.base, comparison.other
    if comparison.refused and not comparison.forced:
        raise NotAdaptable(f"{other} and {base} cannot be compared: {comparison.refused[0]}")
    single = {
        "everywhere": f"{other} pays at every level that decided, so there is nothing to adapt: run {other}.",
        "nowhere": f"{other} pays nowhere, so there is nothing to adapt: run {base}.",
        "no difference": f"No difference between {other} and {base} was shown: run {base}, or repeat more often.",
        "several": f"{other} and {base} change places more than once; write the configuration by hand from the table.",
    }
    crossing = comparison.crossing
    if comparison.outcome in single or crossing is None:
        raise NotAdaptable(single.get(comparison.outcome, f"No level was measured validly in both {base} and {other}."))
    spec = comparison.pairs[0][1]
    args = (spec.provenance.get("mode") or {}).get("args") or {}
    steps = spec.server_info.get("speculative_num_steps") or args.get("speculative_num_steps")
    if not isinstance(steps, int):
        raise NotAdaptable(f"{other} does not say its speculative_num_steps, which must be among the candidates.")

    says = [f"The crossover is {where(crossing)}."]
    batch, told = _batch(crossing.estimate, [pair[1] for pair in comparison.pairs])
    says.append(told)
    sizes = captured(spec)
    key = switch(batch, sizes)
    if not sizes:
        says.append("The server does not tell its captured batch sizes, so the batch is taken as it is.")
    elif key in sizes:
        says.append(f"Batches are padded to captured sizes: those up to {last_below(key, sizes)} stay below key {key}.")
    below, above = ([steps], [0]) if comparison.outcome == "below" else ([0], [steps])
    document = {"1": {"candidate_steps": below}, str(key): {"candidate_steps": above}}
    return Derived(document, crossing.estimate, batch, key, says)


def switch(batch: float, sizes: Sequence[int]) -> int:
    """The key from which on batches beyond *batch* fall: of the captured sizes around it the one whose edge is nearer
    (in the logarithm); above the largest size batches are not padded."""
    largest = max(sizes, default=0)
    edges = [*sizes, *range(largest + 1, max(largest, math.ceil(batch)) + 2)]
    # A key equal to edges[i + 1] holds for batches above edges[i].
    at = bisect_left(edges, batch)
    candidates = [i for i in (at - 1, at) if 0 <= i < len(edges) - 1]
    nearest = min(candidates, key=lambda i: abs(math.log(edges[i] / batch)))
    return int(edges[nearest + 1])


def last_below(key: int, sizes: Sequence[int]) -> int:
    return max((size for size in sizes if size < key), default=key - 1)


def captured(run: Bundle) -> list[int]:
    """Batch sizes that decode graphs were captured for, ascending, as the server resolved them; empty if unknown."""
    config = run.server_info.get("cuda_graph_config")
    decode = config.get("decode") if isinstance(config, Mapping) else None
    for sizes in (decode.get("bs") if isinstance(decode, Mapping) else None, run.server_info.get("cuda_graph_bs")):
        if isinstance(sizes, list) and sizes and all(isinstance(size, int) for size in sizes):
            return sorted(sizes)
    return []


def _batch(concurrency: float, runs: Sequence[Bundle]) -> tuple[float, str]:
    """(running batch at *concurrency*, how that is known): straight between levels in the logarithms."""
    seen: dict[int, list[float]] = {}
    for run in runs:
        for c, told in batches(run).items():
            if told.running > 0:
                seen.setdefault(c, []).append(math.log(told.running))
    points = sorted((math.log(c), sum(logs) / len(logs)) for c, logs in seen.items())
    x = math.log(concurrency)
    for (x0, y0), (x1, y1) in pairwise(points):
        if x0 <= x <= x1:
            batch = math.exp(y0 + (y1 - y0) * (x - x0) / (x1 - x0))
            return batch, f"There the server runs a batch of {batch:.1f}, by its own log."
    return concurrency, "The server's log does not tell the batch there: it is taken as the concurrency."
