"""What a running server does, from its own answers: figures for a person, and the lines they are shown in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_OWNERS = {"serve": "for use", "bench": "for a measurement", "prove": "to be proved"}


def figures(info: Mapping[str, Any] | None, loads: Mapping[str, Any] | None) -> dict[str, Any]:
    """Figures of a server from /server_info and /v1/loads; each is None where neither says it.

    tok_s: tokens per second of the last decode report, over all data-parallel ranks. kv_use: share of the KV cache in
    use, the fullest rank's. accept_length: mean since the start or the last flush.
    """
    info, loads = info or {}, loads or {}
    states = [state for state in info.get("internal_states") or [] if isinstance(state, Mapping)]
    ranks = [load for load in loads.get("loads") or [] if isinstance(load, Mapping)]
    memory = [state.get("memory_usage") or {} for state in states]
    return {
        "release": _text(info.get("version") or loads.get("version")),
        "model": _text(info.get("served_model_name") or info.get("model_path")),
        "tok_s": _sum(ranks, "gen_throughput") if ranks else _sum(states, "last_gen_throughput"),
        "accept_length": _mean(states, "avg_spec_accept_length"),
        "running": _sum(ranks, "num_running_reqs"),
        "queue": _sum(ranks, "num_waiting_reqs"),
        "kv_use": max((use for use in _numbers(ranks, "token_usage")), default=None),
        "kv_tokens": min((int(size) for size in _numbers(memory, "token_capacity")), default=None),
        "simulated": info.get("simulated"),
    }


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _numbers(entries: Sequence[Mapping[str, Any]], key: str) -> list[float]:
    values = [entry.get(key) for entry in entries]
    return [float(value) for value in values if isinstance(value, int | float) and not isinstance(value, bool)]


def _sum(entries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = _numbers(entries, key)
    return sum(found) if found else None


def _mean(entries: Sequence[Mapping[str, Any]], key: str) -> float | None:
    found = _numbers(entries, key)
    return sum(found) / len(found) if found else None


def age(seconds: float) -> str:
    """How long ago, in the two largest units: 2 d 4 h, 3 h 12 min, 47 s."""
    whole = int(seconds)
    for size, unit, below, smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            return f"{whole // size} {unit} {whole % size // below} {smaller}"
    return f"{whole} s"


def lines(
    servers: Sequence[Mapping[str, Any]],
    patched: bool | None,
    gpus: Sequence[Mapping[str, Any]],
    installed: str | None = None,
) -> list[str]:
    """What playbooks/status.yml prints. An unknown figure is a question mark, never 0.

    installed: the release of the stack in use, of which `patched` is told; a server may still be another's.
    """
    said: list[str] = []
    for server in servers:
        unit, found = server["unit"], server["figures"]
        owner = _OWNERS.get(str(server.get("owner")), "by hand or at boot")
        rank, nodes = server.get("rank"), server.get("nodes")
        place = f"rank {rank} of {nodes}, " if nodes else ""
        said.append(
            f"{server['mode']} runs since {age(server['seconds'])} ({unit}, {place}started {owner}; {server['health']})"
        )
        if rank:
            # All that it answers is that it lives.
            said.append(f"  the guest that answers is at {server.get('head')}")
            continue
        release = found["release"] or server.get("release") or "?"
        state = {True: "all-reduce patch in place", False: "unpatched", None: "patch state unknown"}[patched]
        if installed and found["release"] not in (None, installed):
            state = f"while the stack in use is {installed} by now, patch state unknown"
        said.append(f"  stack: SGLang {release}, {state}; model {found['model'] or '?'}")
        pool = f"KV cache {_percent(found['kv_use'])} of {_figure(found['kv_tokens'], 'd')} tokens"
        accepted = _figure(found["accept_length"], ".2f", "none")
        said.append(
            f"  now: {_figure(found['tok_s'], '.1f')} tok/s, accept length {accepted}, {pool}, "
            f"{_figure(found['running'], '.0f')} running, {_figure(found['queue'], '.0f')} waiting"
        )
        if found["simulated"]:
            said.append(f"  simulated: profile {found['simulated'].get('profile')}")
    if not servers:
        said.append("No server of a mode runs.")
    for gpu in gpus:
        memory = f"{_figure(gpu['memory_used_mib'], 'd')} of {_figure(gpu['memory_total_mib'], 'd')} MiB"
        said.append(f"  GPU {gpu['index']}: {memory}, {gpu['name'] or '?'}")
    return said


def _figure(value: Any, form: str, absent: str = "?") -> str:
    return absent if value is None else format(value, form)


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"
