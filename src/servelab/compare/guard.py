"""May these runs be put side by side? Only the treatment may differ: what the compared modes declare as theirs.

Every finding is one sentence. A decisive one refuses the headline; the others are told with the answer, and beside the
decisive ones when there are any. What was not recorded is UNKNOWN, said as such, and never taken as equal by
accident: unknown against known differs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from servelab.bundle import Bundle
from servelab.compare.pairs import Pair, reason

# Prompt tokens that one arm found in its cache and the other did not: beyond this share the input differs.
CACHE_SHARE = 0.05
# The pool may differ by the rounding of its pages.
POOL_SHARE = 0.01


@dataclass(frozen=True)
class Finding:
    """``decisive``: no headline with it."""

    text: str
    decisive: bool = True


def findings(base: str, other: str, pairs: Sequence[Pair]) -> list[Finding]:
    """All that differs between the arms *base* and *other* beside the treatment."""
    if not pairs:
        return [Finding("There is no repetition in which both arms were measured.")]
    arms = ((base, [left for left, _ in pairs]), (other, [right for _, right in pairs]))
    failed = _failures(arms)
    if failed and any(not run.summary for both in pairs for run in both):
        # It recorded nothing that could agree or differ.
        return failed
    found = failed
    for check in (_workload, _cache, _memory, _setting, _flags, _machine, _contamination, _order):
        found += check(arms, pairs)
    return found


def unknown(pairs: Sequence[Pair]) -> list[str]:
    """Names of what no run recorded, so that nothing can be said about it."""
    runs = [run for both in pairs for run in both]
    return [what for what, read in [*MACHINE, *_STATE] if all(read(run) is None for run in runs)]


Named = tuple[tuple[str, list[Bundle]], tuple[str, list[Bundle]]]


def _difference(what: str, arms: Named, read: Callable[[Bundle], Any]) -> str | None:
    """ "*what* differs: … in A, … in B.", None where all runs agree."""
    values = [[read(run) for run in runs] for _, runs in arms]
    everything = [value for arm in values for value in arm]
    if all(value == everything[0] for value in everything):
        return None
    for (name, _), arm in zip(arms, values, strict=True):
        if any(value != arm[0] for value in arm):
            distinct = list(dict.fromkeys(map(_short, arm)))
            return f"{what} differs between the runs of {name}: {', '.join(distinct)}."
    (left, _), (right, _) = arms
    return f"{what} differs: {_short(values[0][0])} in {left}, {_short(values[1][0])} in {right}."


def _differ(what: str, arms: Named, read: Callable[[Bundle], Any], decisive: bool = True) -> list[Finding]:
    text = _difference(what, arms, read)
    return [Finding(text, decisive)] if text else []


def _short(value: Any) -> str:
    text = "unknown" if value is None else str(value)
    return text if len(text) <= 120 else text[:117] + "…"


def _dig(value: Any, *keys: Any) -> Any:
    for key in keys:
        if isinstance(key, int):
            value = value[key] if isinstance(value, list) and len(value) > key else None
        else:
            value = value.get(key) if isinstance(value, Mapping) else None
    return value


def summary(*keys: Any) -> Callable[[Bundle], Any]:
    return lambda run: _dig(run.summary, *keys)


def provenance(*keys: Any) -> Callable[[Bundle], Any]:
    return lambda run: _dig(run.provenance, *keys)


def server(*keys: Any) -> Callable[[Bundle], Any]:
    return lambda run: _dig(run.server_info, *keys)


# --- failures


def _failures(arms: Named) -> list[Finding]:
    return [
        Finding(f"{name} failed: {reason(run)}") for name, runs in arms for run in runs if run.run["status"] == "failed"
    ]


# --- what was asked of the server

_WORKLOAD = {
    "api": "the API",
    "input_tokens": "the input length",
    "prompts": "the kind of prompts",
    "temperature": "the temperature",
    "min_seconds": "the shortest window",
    "min_waves": "the number of waves per level",
    "min_requests": "the least number of requests per level",
    "warmup_requests": "the number of warm-up requests",
}


def _workload(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    found = []
    length = _difference("the output length", arms, summary("workload", "output_tokens"))
    eos = _difference("ignore_eos", arms, summary("workload", "ignore_eos"))
    if length and eos:
        length = length.rstrip(".") + " (ignore_eos differs)."
        eos = None
    found += [Finding(text) for text in (length, eos) if text]
    told = {"seed", "output_tokens", "ignore_eos"}
    keys = dict.fromkeys(key for _, runs in arms for run in runs for key in _dig(run.summary, "workload") or {})
    for key in keys:
        if key not in told:
            found += _differ(_WORKLOAD.get(key, f"the workload's {key}"), arms, summary("workload", key))
    # Each repetition has prompts of its own; both of its arms the same.
    for left, right in pairs:
        seeds = [_dig(run.summary, "workload", "seed") for run in (left, right)]
        if seeds[0] != seeds[1]:
            found.append(
                Finding(
                    f"the prompt seed differs: {_short(seeds[0])} in {arms[0][0]}, {_short(seeds[1])} in {arms[1][0]}."
                )
            )
            break
    return found


def cached_share(run: Bundle) -> float | None:
    """Share of the prompt tokens of valid levels that came from the server's prefix cache. None: not told."""
    cached = asked = 0.0
    known = False
    for level in _dig(run.summary, "levels") or []:
        prompt, hit = level.get("prompt_tokens_mean"), level.get("cached_tokens_mean")
        if prompt and hit is not None:
            requests = _dig(level, "requests", "in_window") or 1
            known, cached, asked = True, cached + hit * requests, asked + prompt * requests
    return cached / asked if known else None


def _cache(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    shares = [[share for share in map(cached_share, runs) if share is not None] for _, runs in arms]
    if not all(shares):
        return []
    left, right = (sum(arm) / len(arm) for arm in shares)
    if abs(left - right) <= CACHE_SHARE:
        return []
    more, less = (arms[0][0], arms[1][0]) if left > right else (arms[1][0], arms[0][0])
    high, low = max(left, right), min(left, right)
    return [Finding(f"{high:.0%} of {more}'s prompt tokens were cache hits, {less}'s {low:.0%}.")]


# --- what served


def kv_tokens(run: Bundle) -> int | None:
    """Tokens that the server's KV cache holds, as it resolved it."""
    for keys in (("max_total_num_tokens",), ("internal_states", 0, "memory_usage", "token_capacity")):
        value = _dig(run.server_info, *keys)
        if isinstance(value, int | float):
            return int(value)
    return None


def memory_fraction(run: Bundle) -> Any:
    """As resolved by the server, else as asked for."""
    value = _dig(run.server_info, "mem_fraction_static")
    return value if value is not None else _dig(run.provenance, "mode", "args", "mem_fraction_static")


def treatment(run: Bundle) -> list[str]:
    """What the run's mode declares as its treatment: patterns of flags, environment names, patches, and ``kv_pool``."""
    declared = _dig(run.provenance, "mode", "treatment")
    if isinstance(declared, list):
        return [str(pattern) for pattern in declared]
    # A bundle from before modes declared it.
    speculative = any(str(flag).startswith("speculative_") for flag in _dig(run.provenance, "mode", "args") or {})
    return ["speculative_*", "kv_pool"] if speculative else []


def _belongs(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _memory(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    fraction = _difference("the memory fraction", arms, memory_fraction)
    pools = [[pool for pool in map(kv_tokens, runs) if pool is not None] for _, runs in arms]
    found = []
    if all(pools):
        left, right = (sum(arm) / len(arm) for arm in pools)
        if abs(left - right) > POOL_SHARE * max(left, right):
            text = f"the KV pool differs: {left:.0f} tokens in {arms[0][0]}, {right:.0f} in {arms[1][0]}"
            declared = any(_belongs("kv_pool", treatment(run)) for _, runs in arms for run in runs)
            if fraction:
                text += f" ({fraction.rstrip('.')})"
            elif declared:
                text += " (declared: the memory fraction is the same, and the mode needs memory of its own)"
            found.append(Finding(text + ".", decisive=bool(fraction) or not declared))
            fraction = None
    return found + ([Finding(fraction)] if fraction else [])


# Resolved settings without which two servers do not do the same work; speculation changes some of them on the quiet.
_RESOLVED = {
    "max_running_requests": "the most requests at a time",
    "tp_size": "the tensor parallel size",
    "dp_size": "the data parallel size",
    "ep_size": "the expert parallel size",
    "dtype": "the data type",
    "quantization": "the quantization",
    "kv_cache_dtype": "the KV cache's data type",
    "context_length": "the context length",
    "page_size": "the page size",
    "chunked_prefill_size": "the chunk of a prefill",
    "schedule_policy": "the schedule policy",
    "disable_radix_cache": "disable_radix_cache",
    "cuda_graph_max_bs": "the largest captured batch",
    "cuda_graph_max_bs_decode": "the largest captured batch",
}


def _setting(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    found = []
    allowed = [pattern for _, runs in arms for run in runs for pattern in treatment(run)]
    if all(run.server_info for _, runs in arms for run in runs):
        for key, what in _RESOLVED.items():
            if not _belongs(key, allowed):
                found += _differ(what, arms, server(key))
    return found


_PLACES = ("args", "env")


def _flags(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    """Flags, environment and patches that differ and that neither mode declares."""
    runs = [run for _, both in arms for run in both]
    allowed = [pattern for run in runs for pattern in treatment(run)]
    # What the server made of a flag says more than the flag, and is told already.
    told = {"mem_fraction_static"} | {key for key in _RESOLVED if all(key in run.server_info for run in runs)}
    found = []
    for place in _PLACES:
        names = dict.fromkeys(name for run in runs for name in _dig(run.provenance, "mode", place) or {})
        for name in names:
            if name in told or _belongs(name, allowed):
                continue
            word = "the flag" if place == "args" else "the variable"
            text = _difference(f"{word} {name}", arms, provenance("mode", place, name))
            if text:
                found.append(Finding(text.rstrip(".") + ", and no mode declares it as its treatment."))
    if not _belongs("patches", allowed):
        found += _differ("the mode's list of patches", arms, lambda run: _dig(run.provenance, "mode", "patches") or [])
    return found


# --- the machine: (what, how it is read); each None where it was not recorded


def gpus(key: str) -> Callable[[Bundle], Any]:
    def read(run: Bundle) -> Any:
        cards = run.provenance.get("gpus") or []
        values = [card.get(key) for card in cards]
        return "/".join(map(_short, values)) if any(value is not None for value in values) else None

    return read


def _stack(run: Bundle) -> Any:
    packages = _dig(run.provenance, "guest", "packages")
    return tuple(sorted(packages.items())) if packages else None


def _throttled(run: Bundle) -> Any:
    """Reasons that were seen on idle cards before and after, and under load; None where nobody looked."""
    cards = [*(run.provenance.get("gpus") or []), *(run.provenance.get("gpus_after") or [])]
    values = [card["throttle_reasons"] for card in cards if card.get("throttle_reasons") is not None]
    levels = [
        seen for level in _dig(run.summary, "levels") or [] if (seen := _dig(level, "cards", "throttle")) is not None
    ]
    if not values and not levels:
        return None
    told = {str(reason) for value in values for reason in (value if isinstance(value, list) else [value])}
    return sorted(told | {reason for seen in levels for reason in seen})


def _watched(run: Bundle) -> Any:
    """Whether somebody looked at the cards while they worked; None if not."""
    return any(_dig(level, "cards", "throttle") is not None for level in _dig(run.summary, "levels") or []) or None


def patched(run: Bundle) -> Any:
    """The release's shape and the patch in place, as in "B4, patched (926ff7b4)". None: not recorded."""
    shape, manifest = (_dig(run.provenance, "patch", key) for key in ("shape", "manifest_sha256"))
    if shape is None:
        return None
    return f"{shape}, patched ({manifest[:8]})" if manifest else f"{shape}, not patched"


MACHINE: list[tuple[str, Callable[[Bundle], Any]]] = [
    ("the client", summary("client", "version")),
    ("the client's build", provenance("client", "wheel_sha256")),
    ("the machine that made the load", lambda run: _dig(run.provenance, "client", "host") or "the guest"),
    ("the SGLang release", summary("server", "sglang_version")),
    ("the model", summary("server", "model")),
    ("the driver", gpus("driver_version")),
    ("the kernel", provenance("guest", "kernel")),
    ("the node's boot", provenance("node", "boot_id")),
    ("the set of GPUs", gpus("uuid")),
    ("the GPUs' power limits", gpus("power_limit_w")),
    ("the GPUs' highest clocks", gpus("clock_max_sm_mhz")),
    ("the PCIe link's width", gpus("pcie_link_width")),
]
_STATE: list[tuple[str, Callable[[Bundle], Any]]] = [("throttling under load", _watched)]


def _machine(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    found = _differ("the simulator", arms, lambda run: run.simulated)
    runs = [run for _, both in arms for run in both]
    for what, read in MACHINE:
        found += _differ(what, arms, read)
    changed = _packages(arms)
    if changed:
        found.append(Finding(changed))
    allowed = [pattern for run in runs for pattern in treatment(run)]
    if not _belongs("patches", allowed):
        found += _differ("the state of the all-reduce patch", arms, patched)
    return found + _throttling(arms)


# Not throttling: idle cards, and clocks that somebody set (the highest clocks are compared by themselves).
_IDLE = {"none", "not active", "gpu_idle", "gpu idle", "idle", "[]", "", "0"}
_SET = {"applications_clocks_setting", "display_clock_setting"}
# What belongs to a card at work: it keeps to its power limit, which is compared by itself. Who draws more is held more,
# and that is part of what a mode costs.
_POWER = "sw_power_cap"
# A single reading may fall into a change of clocks; above this share of a level's readings it lasted.
THROTTLED_SHARE = 0.1


def _throttling(arms: Named) -> list[Finding]:
    found = []
    for name, runs in arms:
        for cause, levels in sorted(_causes(runs).items()):
            at = f" at C={', '.join(map(str, sorted(levels)))}" if levels else ""
            if cause == _POWER:
                found.append(Finding(f"GPUs of {name} were held at their power limit{at}.", decisive=False))
            else:
                found.append(Finding(f"GPUs of {name} were throttled{at}: {cause}."))
    return found


def _causes(runs: Sequence[Bundle]) -> dict[str, set[int]]:
    """What throttled → the levels at which it lasted; no level for what was seen before or after a run."""
    causes: dict[str, set[int]] = {}
    for run in runs:
        under_load: dict[str, set[int]] = {}
        for level in _dig(run.summary, "levels") or []:
            for cause, share in (_dig(level, "cards", "throttle") or {}).items():
                lasted = share >= THROTTLED_SHARE and level["concurrency"] is not None
                under_load.setdefault(cause, set()).update([level["concurrency"]] if lasted else [])
        for cause in _throttled(run) or []:
            if cause.lower() not in _IDLE | _SET and under_load.get(cause, True):
                causes.setdefault(cause, set()).update(under_load.get(cause, set()))
    return causes


def _packages(arms: Named) -> str | None:
    first, *rest = [_stack(run) for _, both in arms for run in both]
    if all(stack == first for stack in rest):
        return None
    known = [dict(stack or ()) for stack in (first, *rest)]
    names = sorted({name for stack in known for name in stack if any(s.get(name) != stack[name] for s in known)})
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    return f"the stack differs: {shown}."


# --- the conditions of the measurement


def _contamination(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    found = []
    for name, runs in arms:
        for run in runs:
            for when in ("before", "after"):
                holders = _dig(run.provenance, "gpu_clean", when, "holders") or []
                if run.simulated:  # who plays the driver of simulated cards holds them as a kernel does, unseen
                    holders = [holder for holder in holders if holder.get("name") != "gpu-driver"]
                if holders:
                    found.append(
                        Finding(
                            f"{len(holders)} foreign process(es) held GPUs {when} a run of {name} ({run.path.name})."
                        )
                    )
            before, after = (
                {card.get("uuid") for card in run.provenance.get(key) or []} for key in ("gpus", "gpus_after")
            )
            if before and after and before != after:
                found.append(Finding(f"the GPUs changed during a run of {name} ({run.path.name})."))
    return found


def _order(arms: Named, pairs: Sequence[Pair]) -> list[Finding]:
    """A machine that warms up favours whoever is always second; with a single pair that cannot be told apart."""
    starts = [(left.run.get("started"), right.run.get("started")) for left, right in pairs]
    if any(not left or not right or left == right for left, right in starts):
        return []
    second = {str(right) > str(left) for left, right in starts}
    if len(second) > 1:
        return []
    name = arms[1][0] if second.pop() else arms[0][0]
    return [Finding(f"{name} always ran second.", decisive=len(pairs) > 1)]
