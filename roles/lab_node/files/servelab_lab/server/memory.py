"""How much of every card a start takes, and where it runs out. GiB unless a name says MiB."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .cost import Mode, Profile
from .dialect import Dialect


class StartFailure(Exception):
    """A scheduler's exception that ends a start: `kind` and `text` as Python would print them, on `ranks`.

    `cause` is the exception that was being handled when this one was raised.
    """

    def __init__(self, kind: str, text: str, ranks: Sequence[int], cause: StartFailure | None = None) -> None:
        super().__init__(text)
        self.kind, self.text, self.ranks, self.cause = kind, text, list(ranks), cause


@dataclass(frozen=True)
class Plan:
    """What one card's memory goes to. `available` is what is free once the contexts are there.

    `weights` includes what the custom all-reduce maps of its peers meanwhile.
    """

    available: float
    weights: float
    draft: float
    kv: float
    draft_kv: float
    graph: float
    tokens: int
    claim_mib: int

    @property
    def after_weights(self) -> float:
        return self.available - self.weights

    @property
    def after_draft(self) -> float:
        return self.after_weights - self.draft

    @property
    def after_pool(self) -> float:
        return self.after_draft - self.kv - self.draft_kv


def plan(profile: Profile, mode: Mode, fraction: float, used_mib: Sequence[int], dialect: Dialect) -> Plan:
    """Divide a card's memory as SGLang does, given what others already use of each rank's card (MiB).

    Raises StartFailure: cards too unequal, no room for a context, no room left for the KV cache. The weights per card
    do not depend on the number of cards: a smaller lab serves a smaller imagined model.
    """
    numbers = profile.memory
    local = [(numbers["card_mib"] - used) / 1024 - numbers["context_gib"] for used in used_mib]
    least = min(local)
    every = range(len(local))
    if least <= 0:
        text = "NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)"
        raise StartFailure("RuntimeError", text, every)
    _check_balance(least, local)
    # n-gram drafts come from the text: no second model, no second cache.
    draft = numbers["draft_gib"] if mode.draft_steps else 0.0
    weights = numbers["weights_gib"]
    if mode.backend == "custom_ar":
        weights += numbers["custom_ar_gib"]
    loaded = weights + draft
    if loaded >= least:
        raise out_of_memory(profile, 0.33, least - weights, every)
    rest = least - loaded - least * (1 - fraction)
    if rest <= 0:
        kind, text = dialect.no_room(fraction, loaded / least)
        raise StartFailure(kind, text, every)
    per_token = numbers["kv_kib_per_token"]
    draft_per_token = numbers["draft_kv_kib_per_token"] if mode.draft_steps else 0.0
    tokens = int(rest * 2**20 / (per_token + draft_per_token))
    return Plan(
        available=least,
        weights=weights,
        draft=draft,
        kv=tokens * per_token / 2**20,
        draft_kv=tokens * draft_per_token / 2**20,
        graph=numbers["graph_gib"] if mode.graph_max_batch else 0.0,
        tokens=tokens,
        claim_mib=round(fraction * (numbers["card_mib"] - max(used_mib))),
    )


def _check_balance(pre_model_load_memory: float, local: Sequence[float]) -> None:
    """Refuse as SGLang does when one card has much less to give than another."""
    for number, local_gpu_memory in enumerate(local):
        if pre_model_load_memory < local_gpu_memory * 0.9:
            raise StartFailure(
                "RuntimeError",
                "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. "
                f"{pre_model_load_memory=}, {local_gpu_memory=}, {local_gpu_memory * 0.9=}",
                [number],
            )


def out_of_memory(profile: Profile, wanted: float, free: float, ranks: Sequence[int]) -> StartFailure:
    """Return torch's out-of-memory error."""
    total = profile.memory["card_mib"] / 1024
    free = max(free, 0.01)
    return StartFailure(
        "torch.OutOfMemoryError",
        f"CUDA out of memory. Tried to allocate {wanted * 1024:.2f} MiB. GPU 0 has a total capacity of {total:.2f} "
        f"GiB of which {free * 1024:.2f} MiB is free. Including non-PyTorch memory, this process has "
        f"{total - free:.2f} GiB memory in use.",
        ranks,
    )
