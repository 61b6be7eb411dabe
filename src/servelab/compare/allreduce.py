"""How much of a step is all-reduce: latencies from a collectives run of the same machine, held against measured steps.

A share is arithmetic, not a measurement: the model's all-reduces of a step follow each other and nothing overlaps them
(see `servelab.collectives.predict`). It is given only where a run of `playbooks/collectives.yml` on the same cards is
among the results.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import Bundle, BundleError
from servelab.collectives.predict import MODES, Model, latency_us
from servelab.compare.server_log import Batch

FILE = "collectives.json"


@dataclass(frozen=True)
class Share:
    """Milliseconds of all-reduce in one forward pass of ``tokens`` tokens: under a CUDA graph and launched one by one;
    equal where it is known how the server launched them. ``way``: the arm of the collectives run."""

    tokens: int
    low_ms: float
    high_ms: float
    way: str


@dataclass(frozen=True)
class Collectives:
    """A collectives run: where it is, and what it found."""

    path: Path
    result: Mapping[str, Any]

    @property
    def model(self) -> Model:
        told = self.result["model"]
        return Model(told["layers"], told["hidden"], told["source"])

    def share(self, run: Bundle, batch: Batch, tokens_per_request: int) -> Share | None:
        """The all-reduces of one pass of *run* with this batch; None where its way or size was not measured."""
        arm = way_of(run, self.result["arms"])
        tokens = round(batch.running) * tokens_per_request
        if arm is None or tokens < 1:
            return None
        launched = MODES if batch.graph is None else ("graph",) if batch.graph else ("eager",)
        each = [latency_us(arm, mode, self.model.message(tokens)) for mode in launched]
        known = [self.model.allreduces * us / 1000 for us in each if us is not None]
        return Share(tokens, min(known), max(known), str(arm["name"])) if known else None


def way_of(run: Bundle, arms: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
    """The arm whose variables the run's mode sets, the one with most of them; None where none was measured."""
    mode = run.provenance.get("mode") or {}
    env, args = mode.get("env") or {}, mode.get("args") or {}
    fitting = [arm for arm in arms if all(str(env.get(name)) == value for name, value in arm["env"].items())]
    if args.get("tp_size") == 2 and not args.get("disable_custom_all_reduce"):
        # Between two cards SGLang puts kernels of its own in NCCL's place unasked; which ones depends on its release.
        fitting = [arm for arm in fitting if arm["env"] and arm["backend"] != "nccl"]
    return max(fitting, key=lambda arm: len(arm["env"]), default=None)


def tokens_of_a_pass(run: Bundle) -> int:
    """Tokens that the model's forward pass computes for each running request: 1, or what a verify checks."""
    args = (run.provenance.get("mode") or {}).get("args") or {}
    told = run.server_info.get("speculative_num_draft_tokens") or args.get("speculative_num_draft_tokens")
    return int(told) if told else 1


def find(run: Bundle) -> Collectives | None:
    """The newest collectives run beside *run* (in any campaign of the same results) on the same cards and simulator."""
    found = sorted(run.path.parent.parent.glob(f"*/*-collectives/{FILE}"), key=lambda path: path.parent.name)
    for path in reversed(found):
        try:
            other = bundle.read(path.parent)
            result = json.loads(path.read_text())
        except (BundleError, OSError, ValueError):
            continue
        if _profile(other) == _profile(run) and _cards(other) == _cards(run) and _cards(run):
            return Collectives(path.parent, result)
    return None


def _profile(run: Bundle) -> Any:
    """Of the simulator; None of a real machine. Its time scale changes no latency."""
    return (run.simulated or {}).get("profile")


def _cards(run: Bundle) -> list[str]:
    return [str(card.get("uuid")) for card in run.provenance.get("gpus") or []]
