"""From latencies to a model's step: what its all-reduces cost per way, the gain over the default, and the crossovers.

Everything here is arithmetic over measured (or simulated) latencies of one message each. That the all-reduces of a step
follow each other and nothing overlaps them is an assumption, and the reason why a prediction is called one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

BYTES_PER_ELEMENT = 2  # bf16
MODES = ("eager", "graph")


@dataclass(frozen=True)
class Model:
    """What of a model decides about its all-reduces: two per layer, of hidden x tokens elements."""

    layers: int
    hidden: int
    source: str

    @property
    def allreduces(self) -> int:
        """All-reduces of one forward pass: one after attention, one after the experts or the MLP."""
        return 2 * self.layers

    def message(self, tokens: int) -> int:
        """Bytes of one all-reduce of `tokens` tokens."""
        return tokens * self.hidden * BYTES_PER_ELEMENT


def model_of(config: Mapping[str, Any], source: str) -> Model:
    """Read a model's config.json; multimodal ones keep the language model's numbers one level down.

    Raises ValueError with one sentence when layers or width are not there.
    """
    inner = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    layers, hidden = inner.get("num_hidden_layers"), inner.get("hidden_size")  # type: ignore[union-attr]
    if not isinstance(layers, int) or not isinstance(hidden, int):
        raise ValueError(f"{source} names no num_hidden_layers and hidden_size: give --layers and --hidden.")
    return Model(layers, hidden, source)


def latency_us(arm: Mapping[str, Any], mode: str, size: int) -> float | None:
    """µs of one all-reduce of `size` bytes, measured or between its two measured neighbours (straight in log-log).

    None outside what was measured, and where an arm's sums are wrong: such a latency means nothing.
    """
    if arm["status"] not in ("ok", "hung", "failed"):
        return None
    return between(_points(arm, mode), size)


def between(points: Sequence[tuple[int, float]], x: int) -> float | None:
    """The value at *x* of ascending (x, value): measured, or straight in log-log. None outside of them."""
    if x in (measured := dict(points)):
        return measured[x]
    for (left, low), (right, high) in pairwise(points):
        if left < x < right:
            return low * math.pow(high / low, math.log(x / left) / math.log(right / left))
    return None


def crossovers(one: Mapping[str, Any], other: Mapping[str, Any], mode: str) -> list[float]:
    """The sizes in bytes at which the faster of two arms changes.

    A size at which the two arms' samples overlap (from the least to the 90th percentile) decides nothing: noise is no
    crossover. The size is interpolated between the decided neighbours, straight in log-log.
    """
    if "wrong" in (one["status"], other["status"]):
        return []
    lead = []
    for size in sorted(set(one["rows"]) & set(other["rows"]), key=int):
        left, right = one["rows"][size].get(mode), other["rows"][size].get(mode)
        if left and right and (left["p90_us"] < right["min_us"] or right["p90_us"] < left["min_us"]):
            lead.append((int(size), math.log(left["median_us"] / right["median_us"])))
    return [
        low * (high / low) ** (before / (before - after))
        for (low, before), (high, after) in pairwise(lead)
        if before * after < 0
    ]


def predict(arms: Sequence[Mapping[str, Any]], model: Model, tokens: Sequence[int], default: str) -> dict[str, Any]:
    """For each number of tokens of a step (1: one request's decode; 3: its verify with three draft tokens): bytes, and
    per arm and mode µs per all-reduce, ms per step, and ms gained over the arm `default` in the same mode."""
    by_name = {str(arm["name"]): arm for arm in arms}
    steps = []
    for count in tokens:
        size = model.message(count)
        costs: dict[str, Any] = {}
        for name, arm in by_name.items():
            for mode in MODES:
                each = latency_us(arm, mode, size)
                if each is None:
                    continue
                base = latency_us(by_name[default], mode, size) if default in by_name else None
                costs.setdefault(name, {})[mode] = {
                    "us": round(each, 3),
                    "step_ms": round(model.allreduces * each / 1000, 3),
                    "gain_ms": None if base is None else round(model.allreduces * (base - each) / 1000, 3),
                }
        steps.append({"tokens": count, "bytes": size, "allreduces": model.allreduces, "arms": costs})
    crossing = [
        {"arm": name, "against": default, "mode": mode, "bytes": [round(size) for size in found]}
        for name, arm in by_name.items()
        if default in by_name and name != default
        for mode in MODES
        if (found := crossovers(arm, by_name[default], mode))
    ]
    return {"default": default, "steps": steps, "crossovers": crossing}


def _points(arm: Mapping[str, Any], mode: str) -> list[tuple[int, float]]:
    return sorted((int(size), float(row[mode]["median_us"])) for size, row in arm["rows"].items() if mode in row)
