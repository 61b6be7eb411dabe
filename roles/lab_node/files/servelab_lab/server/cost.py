"""What a step of the simulated server costs. Pure functions of a profile: no clock, no randomness, no I/O.

Units: milliseconds of simulated time unless a name says otherwise; batches count requests.

    step = compute(tokens) + draft(batch) + all-reduces × latency(backend, bytes, captured)

A decode step runs one token per request. An EAGLE step drafts, then verifies `draft_tokens` tokens per request; an
n-gram step looks its drafts up instead. Every draft is accepted with the same chance p if all before it were, so that
a step yields 1 + p + p² + … tokens; p is such that the profile's `accept_length` comes out for its draft tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

PROFILES = Path(__file__).with_name("profiles")


class ProfileError(ValueError):
    """There is no such profile, or it lacks a number. The text is one sentence."""


@dataclass(frozen=True)
class Backend:
    """One way to all-reduce: a start-up cost in µs, lower under a CUDA graph, and a bandwidth."""

    graph_us: float
    eager_us: float
    gigabytes_per_s: float

    def latency_us(self, size: int, captured: bool) -> float:
        """Return the µs of one all-reduce of `size` bytes."""
        return (self.graph_us if captured else self.eager_us) + size / self.gigabytes_per_s / 1000


@dataclass(frozen=True)
class Drafts:
    """How well drafts are guessed: a step of `draft_tokens` (the sure one included) yields `accept_length` on average.

    Drafting itself takes `step_ms + request_ms × batch` for each step of it.
    """

    draft_tokens: int
    accept_length: float
    step_ms: float
    request_ms: float

    @property
    def chance(self) -> float:
        """The chance that one draft is accepted, all before it being right."""
        return _chance(self.accept_length, self.draft_tokens)


@dataclass(frozen=True)
class Profile:
    """The numbers of one imagined machine and model; profiles/*.json say where each comes from."""

    name: str
    description: str
    model: str
    hidden_size: int
    bytes_per_element: int
    allreduces_per_forward: int
    step_ms: float
    token_ms: float
    prefill_ms: float
    prefill_token_ms: float
    eagle: Drafts
    ngram: Drafts
    verify_captured: bool
    graphs_free_up_to: int
    graphs_ms_per_batch: float
    backends: Mapping[str, Backend]
    memory: Mapping[str, float]
    context_length: int
    crossover: float | None


@dataclass(frozen=True)
class Mode:
    """What the server's flags mean here. `graph_max_batch` 0: no CUDA graphs; `draft_tokens` 1: no speculation.

    All-reduces of more than `limit` bytes go over `nccl` whatever the `backend`.
    """

    backend: str = "nccl"
    graph_max_batch: int = 512
    draft_steps: int = 0
    draft_tokens: int = 1
    ngram: bool = False
    limit: int | None = None
    nccl: str = "nccl"

    @property
    def speculative(self) -> bool:
        return self.draft_tokens > 1

    def drafting(self, steps: int) -> Mode:
        """Return this mode with chains of `steps` drafts."""
        return replace(self, draft_steps=steps, draft_tokens=steps + 1)


def profile_names() -> list[str]:
    """Return the names of the profiles that there are."""
    return sorted(path.stem for path in PROFILES.glob("*.json"))


def load_profile(name: str) -> Profile:
    """Read profiles/<name>.json. Raises ProfileError."""
    if name not in profile_names():
        raise ProfileError(f"profile {name!r} is unknown: choose one of {', '.join(profile_names())}.")
    data: dict[str, Any] = json.loads((PROFILES / f"{name}.json").read_text(encoding="utf-8"))
    try:
        compute, prefill, graphs = data["compute"], data["prefill"], data["graphs"]
        return Profile(
            name=name,
            description=data["description"],
            model=data["model"]["architecture"],
            hidden_size=data["model"]["hidden_size"],
            bytes_per_element=data["model"]["bytes_per_element"],
            context_length=data["model"]["context_length"],
            allreduces_per_forward=data["model"]["allreduces_per_forward"],
            step_ms=compute["step_ms"],
            token_ms=compute["token_ms"],
            prefill_ms=prefill["step_ms"],
            prefill_token_ms=prefill["token_ms"],
            eagle=Drafts(**data["eagle"]),
            ngram=Drafts(**data["ngram"]),
            verify_captured=graphs["verify_captured"],
            graphs_free_up_to=graphs["free_up_to"],
            graphs_ms_per_batch=graphs["ms_per_batch_beyond"],
            backends={key: Backend(**value) for key, value in data["allreduce"].items()},
            memory=data["memory"],
            crossover=data["crossover"],
        )
    except (KeyError, TypeError) as error:
        raise ProfileError(f"profile {name!r} lacks or misspells {error}.") from error


def captured(profile: Profile, mode: Mode, batch: int) -> bool:
    """Say whether the target's forward of a decode or verify step of `batch` requests replays a CUDA graph."""
    if mode.speculative and not profile.verify_captured:
        return False
    return batch <= mode.graph_max_batch


def allreduce_ms(profile: Profile, mode: Mode, batch: int) -> float:
    """Return the ms that one decode or verify step of `batch` requests spends in all-reduces."""
    size = batch * mode.draft_tokens * profile.hidden_size * profile.bytes_per_element
    backend = mode.backend if mode.limit is None or size <= mode.limit else mode.nccl
    latency = profile.backends[backend].latency_us(size, captured(profile, mode, batch))
    return profile.allreduces_per_forward * latency / 1000


def step_ms(profile: Profile, mode: Mode, batch: int) -> float:
    """Return the ms of one decode step (draft and verify, with speculation) of `batch` requests."""
    compute = profile.step_ms + profile.token_ms * batch * mode.draft_tokens
    if captured(profile, mode, batch):
        compute += profile.graphs_ms_per_batch * max(0, mode.graph_max_batch - profile.graphs_free_up_to)
    drafts = profile.ngram if mode.ngram else profile.eagle
    times = 1 if mode.ngram else mode.draft_steps
    return compute + times * (drafts.step_ms + drafts.request_ms * batch) + allreduce_ms(profile, mode, batch)


def prefill_ms(profile: Profile, tokens: int) -> float:
    """Return the ms of one prefill step over `tokens` prompt tokens of any number of requests."""
    return profile.prefill_ms + profile.prefill_token_ms * tokens


def accept_thresholds(profile: Profile, mode: Mode) -> tuple[float, ...]:
    """Return for n = 2 … draft_tokens the probability of gaining at least n tokens in one step."""
    chance = (profile.ngram if mode.ngram else profile.eagle).chance
    return tuple(chance**n for n in range(1, mode.draft_tokens))


def accept_length(profile: Profile, mode: Mode) -> float:
    """Return the mean tokens that a request gains in one step: 1 without speculation."""
    return 1 + sum(accept_thresholds(profile, mode))


@cache
def _chance(mean: float, draft_tokens: int) -> float:
    """Solve 1 + p + p² + … + p^(draft_tokens - 1) = mean."""
    low, high = 0.0, 1.0
    for _ in range(60):
        p = (low + high) / 2
        if sum(p**n for n in range(draft_tokens)) < mean:
            low = p
        else:
            high = p
    return high


def decode_tok_s(profile: Profile, mode: Mode, batch: int) -> float:
    """Return the output tokens per simulated second while `batch` requests decode and nobody prefills."""
    return 1000 * batch * accept_length(profile, mode) / step_ms(profile, mode, batch)


def crossover(profile: Profile, one: Mode, other: Mode, highest: int = 4096) -> float | None:
    """Return the batch at which `one` and `other` decode equally fast, or None where neither overtakes the other.

    Exact where the step times are linear between two neighbouring batches. Only the first crossing is looked for.
    """

    def lead(batch: int) -> float:
        """Positive where `other` is faster; the common factor batch is left out."""
        gain_one, gain_other = accept_length(profile, one), accept_length(profile, other)
        return gain_other * step_ms(profile, one, batch) - gain_one * step_ms(profile, other, batch)

    before = lead(1)
    for batch in range(2, highest + 1):
        now = lead(batch)
        if before == 0:
            return float(batch - 1)
        if (before > 0) != (now > 0):
            return batch - 1 + before / (before - now)
        before = now
    return None
