"""Single requests of a level, read from a bundle's raw rows."""

from __future__ import annotations

import json
from typing import Any

from servelab.bundle import Bundle


def latencies(run: Bundle, level: dict[str, Any]) -> tuple[list[float], list[float]]:
    """(TTFT, TPOT) of the requests that the level counts, in reported milliseconds; empty without rows or window."""
    if level["concurrency"] is None:  # an open loop, which the report does not draw
        return [], []
    path = run.path / "levels" / f"level-{level['concurrency']:04d}.jsonl"
    window = level.get("window")
    ttft: list[float] = []
    tpot: list[float] = []
    if not window or not path.is_file():
        return ttft, tpot
    ms = 1000 * float((run.simulated or {}).get("time_scale") or 1)
    for text in path.read_text().splitlines():
        row = json.loads(text)
        chunks = row["chunks"]
        if row["error"] or not chunks or row["t_send"] < window["start"] or row["t_end"] > window["end"]:
            continue
        ttft.append(chunks[0][0] * ms)
        tokens = (row["completion_tokens"] or 0) - (chunks[0][1] or 0)
        if len(chunks) > 1 and chunks[0][1] is not None and tokens > 0:
            tpot.append((chunks[-1][0] - chunks[0][0]) / tokens * ms)
    return ttft, tpot
