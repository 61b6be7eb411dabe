"""--speculative-adaptive: how many draft steps a batch gets, by its size and by what was accepted before.

The configuration maps batch sizes to candidate steps: {"1": {"candidate_steps": [1, 3]}, "32": …}. A batch is padded
to the next captured size and takes the entry with the largest size not above it. Each entry keeps a moving average of
the accepted drafts and moves among its candidates; 0 steps (since 0.5.14) means no speculation.
"""

from __future__ import annotations

import json
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from .dialect import Dialect

_BUILT_IN: Mapping[str, Mapping[str, Any]] = {
    "1": {"candidate_steps": [1, 3, 5, 7]},
    "8": {"candidate_steps": [0, 1, 3], "down_hysteresis": 0.0},
    "32": {"candidate_steps": [0, 1], "down_hysteresis": 0.0},
    "64": {"candidate_steps": [0], "down_hysteresis": 0.0},
}


def unsupported(args: Any) -> str | None:
    """Return why SGLang goes on without adapting, or None."""
    if args.speculative_algorithm.upper() not in ("EAGLE", "EAGLE3"):
        return f"speculative_algorithm={args.speculative_algorithm} (only EAGLE/EAGLE3 are supported)"
    if args.speculative_eagle_topk not in (None, 1):
        return f"speculative_eagle_topk={args.speculative_eagle_topk} (only topk=1 is supported)"
    if args.enable_dp_attention:
        return (
            "enable_dp_attention=True is not supported (adaptive tier decisions are not synchronized across DP ranks)"
        )
    return None


def load(path: str | None, dialect: Dialect) -> tuple[Mapping[str, Any], dict[int, Mapping[str, Any]]]:
    """Read the configuration. Raises ValueError in SGLang's words, and OSError."""
    document: Any = _BUILT_IN
    if path is not None:
        with open(path, encoding="utf-8") as file:  # noqa: PTH123 - the message shall name the path as it was given
            document = json.load(file)
    least, kind = (0, "non-negative") if dialect.since("0.5.14") else (1, "positive")
    entries: dict[int, Mapping[str, Any]] = {}
    for key, entry in document.items():
        if not key.isdigit():
            continue
        steps = entry.get("candidate_steps")
        if not isinstance(steps, list) or not steps or not all(isinstance(s, int) and s >= least for s in steps):
            raise ValueError(f"BS {key}: candidate_steps must be a list of {kind} ints, got {steps!r}")
        entries[int(key)] = entry
    if not entries:
        raise ValueError(
            "speculative_adaptive_config must contain at least one integer-string BS key, e.g. "
            f'{{"1": {{"candidate_steps": [1,3,7]}}}}. Got keys: {list(document)}'
        )
    return document, entries


class _Slot:
    """One entry: the steps that it uses now, and the average that moves them."""

    def __init__(self, initial: int, options: Mapping[str, Any]) -> None:
        self.candidates: list[int] = sorted(set(options["candidate_steps"]))
        self.steps = initial if initial in self.candidates else self.candidates[len(self.candidates) // 2]
        self._average = float(self.steps - 1)
        self._weight = float(options.get("ema_alpha", 0.2))
        self._interval = int(options.get("update_interval", 5))
        self._warm_up = int(options.get("warmup_batches", 10))
        self._down = float(options.get("down_hysteresis", -0.25))
        self._up = float(options.get("up_hysteresis", 0.0))
        self._seen = 0

    def saw(self, accepted: float) -> None:
        """Take in the mean accepted drafts of one step, and move if it is time."""
        if self.steps > 0:
            self._average += self._weight * (accepted - self._average)
        self._seen += 1
        if self._seen > self._warm_up and (self._seen - self._warm_up) % self._interval == 0:
            self.steps = self._better()

    def _better(self) -> int:
        at = self.candidates.index(self.steps)
        if self.steps == 0:
            # Without drafts nothing is learnt: try the next longer draft and see.
            at = min(at + 1, len(self.candidates) - 1)
            self._average = max(self._average, self.candidates[at] - 1.0)
            return self.candidates[at]
        begin = at
        # |0 - 0.5| makes no speculation the answer to no accepted drafts.
        while at and self._average <= abs(self.candidates[at - 1] - 0.5) + self._down:
            at -= 1
        moved_down = at < begin
        while not moved_down and at < len(self.candidates) - 1 and self._average > self.candidates[at] - 0.5 + self._up:
            at += 1
        return self.candidates[at]


class Adaptive:
    """Tells the engine how many steps the next batch drafts."""

    def __init__(self, initial: int, path: str | None, dialect: Dialect, captured: Sequence[int]) -> None:
        """Raises ValueError and OSError."""
        document, entries = load(path, dialect)
        self.initial = initial
        self._sizes = sorted(entries)
        self._slots = {size: _Slot(initial, {**document, **entries[size]}) for size in self._sizes}
        self._captured = sorted(captured)

    @property
    def candidates(self) -> list[int]:
        """All steps that any batch may draft."""
        return sorted({steps for slot in self._slots.values() for steps in slot.candidates})

    def greeting(self) -> str:
        """Return the line that the first rank writes."""
        first = self._slots[self._sizes[0]]
        return f"AdaptiveSpeculativeParams initialized: steps={first.steps}, candidate_steps={first.candidates}"

    def _slot(self, batch: int) -> _Slot:
        at = bisect_left(self._captured, batch)
        padded = self._captured[at] if at < len(self._captured) else batch
        return self._slots[self._sizes[max(bisect_right(self._sizes, padded) - 1, 0)]]

    def steps(self, batch: int) -> int:
        """Return how many steps a batch of this size drafts now."""
        return self._slot(batch).steps

    def saw(self, batch: int, accepted: float) -> None:
        """Tell how many drafts of a batch were accepted, on average per request."""
        self._slot(batch).saw(accepted)
