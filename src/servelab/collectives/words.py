"""A collectives run as text: a table of latencies, what they would make of a step, and what did not work."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from servelab.collectives.predict import MODES

MARKED = 43008


def size_name(size: int) -> str:
    """1024 → "1 KiB"; what is no whole number of KiB keeps its bytes."""
    for unit, name in ((1 << 20, "MiB"), (1 << 10, "KiB")):
        if size % unit == 0:
            return f"{size // unit} {name}"
    return f"{size} B"


def report(result: Mapping[str, Any]) -> str:
    """The whole run in Markdown. `result` is the content of collectives.json."""
    simulated, marked = result["simulated"], set(result["marked"])
    mark = " (simulated)" if simulated else ""
    arms = result["arms"]
    parts = [f"# All-reduce on {result['world_size']} GPUs{mark}"]
    if simulated:
        parts.append(
            f"simulated: these figures come from the lab's cost model (profile {simulated.get('profile')}), "
            "not from GPUs."
        )
    ready: dict[str, Any] = next((arm["ready"] for arm in arms if arm["ready"]), {})
    parts.append(
        f"{ready.get('device', 'unknown GPU')}, torch {ready.get('torch', '?')}, NCCL {ready.get('nccl', '?')}; bf16, "
        f"µs per operation: the median of {_samples(arms)} samples of 20 operations, each sample the slowest rank's."
    )
    for mode in MODES:
        table = _table(arms, mode, marked)
        if table:
            title = {"eager": "Launched one by one", "graph": "Under a CUDA graph"}[mode]
            parts += [f"## {title}{mark}", table]
    parts += ["## A step of the model", *_steps(result, mark)]
    bad = [f"- {arm['name']}: **{arm['status']}** – {arm['reason']}" for arm in arms if arm["status"] != "ok"]
    partly = [
        f"- {arm['name']}: left to NCCL: {', '.join(size_name(size) for size in arm['not_taken'])}"
        for arm in arms
        if arm["not_taken"]
    ]
    # The variable alone forces nothing where SGLang would not refuse: two cards, or NVLink between all of them.
    partly += [
        f"- {arm['name']}: nothing was forced here, because SGLang refuses neither two cards nor NVLink"
        for arm in arms
        if "SGLANG_FORCE_CUSTOM_AR_PCIE" in arm["env"] and arm["rows"] and not _forced(arm) and not simulated
    ]
    checked = [arm["name"] for arm in arms if arm["status"] == "ok"]
    parts += ["## What did not work, and what was checked"]
    parts.append("\n".join([*bad, *partly, f"- every sum was right: {', '.join(checked) or 'nowhere'}"]))
    return "\n\n".join(parts) + "\n"


def _forced(arm: Mapping[str, Any]) -> bool:
    return bool(arm["ready"].get("facts", {}).get("pcie_forced"))


def _samples(arms: Sequence[Mapping[str, Any]]) -> int | str:
    return next((row["samples"] for arm in arms for modes in arm["rows"].values() for row in modes.values()), "?")


def _table(arms: Sequence[Mapping[str, Any]], mode: str, marked: set[int]) -> str:
    shown = [arm for arm in arms if any(mode in row for row in arm["rows"].values())]
    sizes = sorted({int(size) for arm in shown for size, row in arm["rows"].items() if mode in row})
    if not sizes:
        return ""
    head = [arm["name"] + (" (WRONG SUMS)" if arm["status"] == "wrong" else "") for arm in shown]
    rows = ["| size | " + " | ".join(head) + " |", "|---:|" + "---:|" * len(shown)]
    for size in sizes:
        name = f"**{size_name(size)}** ◄" if size in marked else size_name(size)
        cells = [arm["rows"].get(str(size), {}).get(mode) for arm in shown]
        rows.append(f"| {name} | " + " | ".join(f"{cell['median_us']:.1f}" if cell else "–" for cell in cells) + " |")
    return "\n".join(rows)


def _steps(result: Mapping[str, Any], mark: str) -> list[str]:
    model, prediction = result["model"], result["prediction"]
    parts = [
        f"{model['layers']} layers make {2 * model['layers']} all-reduces per step, of {model['hidden']} bf16 elements "
        f"per token ({model['source']}). A prediction: one after the other, nothing overlapping. Gain: against "
        f"{prediction['default']} launched the same way."
    ]
    for step in prediction["steps"]:
        what = "decode" if step["tokens"] == 1 else f"verify of {step['tokens']} tokens"
        rows = [
            f"One request, {what}: {step['allreduces']} all-reduces of {step['bytes']} bytes{mark}",
            "",
            "| way | launched | µs each | ms per step | gain, ms |",
            "|---|---|---:|---:|---:|",
        ]
        for name, modes in step["arms"].items():
            for mode, cost in modes.items():
                gain = "–" if cost["gain_ms"] is None else f"{cost['gain_ms']:+.2f}"
                launched = "graph" if mode == "graph" else "one by one"
                rows.append(f"| {name} | {launched} | {cost['us']:.1f} | {cost['step_ms']:.2f} | {gain} |")
        parts.append("\n".join(rows))
    for crossing in prediction["crossovers"]:
        launched = "under a graph" if crossing["mode"] == "graph" else "launched one by one"
        sizes = ", ".join(f"{size / 1024:.0f} KiB" for size in crossing["bytes"])
        parts.append(f"{crossing['arm']} and {crossing['against']} change places at {sizes} ({launched}).")
    return parts
