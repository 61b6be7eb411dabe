"""What a bundle's raw files hold beside its summary: single requests, and readings of the cards."""

from __future__ import annotations

import json
from typing import Any

from servelab.bundle import Bundle


def latencies(run: Bundle, level: dict[str, Any]) -> tuple[list[float], list[float], list[float]]:
    """(TTFT, TPOT, E2E) of the requests that the level counts, in reported ms; empty without rows or window."""
    if level["concurrency"] is None:  # an open loop, which the report does not draw
        return [], [], []
    path = run.path / "levels" / f"level-{level['concurrency']:04d}.jsonl"
    window = level.get("window")
    ttft: list[float] = []
    tpot: list[float] = []
    e2e: list[float] = []
    if not window or not path.is_file():
        return ttft, tpot, e2e
    ms = 1000 * float((run.simulated or {}).get("time_scale") or 1)
    for text in path.read_text().splitlines():
        row = json.loads(text)
        chunks = row["chunks"]
        if row["error"] or not chunks or row["t_send"] < window["start"] or row["t_end"] > window["end"]:
            continue
        ttft.append(chunks[0][0] * ms)
        e2e.append((row["t_end"] - row["t_send"]) * ms)
        tokens = (row["completion_tokens"] or 0) - (chunks[0][1] or 0)
        if len(chunks) > 1 and chunks[0][1] is not None and tokens > 0:
            tpot.append((chunks[-1][0] - chunks[0][0]) / tokens * ms)
    return ttft, tpot, e2e


def readings(run: Bundle) -> list[dict[str, Any]]:
    """What nvidia-smi said while the levels ran, oldest first; empty where nobody asked it."""
    path = run.path / "cards.jsonl"
    return [json.loads(text) for text in path.read_text().splitlines()] if path.is_file() else []
