"""What a server's own log says of a level: how many requests it ran at a time, and whether under CUDA graphs.

Concurrency is what a client keeps in flight; some of it is being prefilled or waits. What a server decides by the size
of its batch (CUDA graphs, draft steps) is decided by the requests that run.
"""

from __future__ import annotations

import re
import statistics
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from pathlib import Path

from servelab.bundle import Bundle
from servelab.shared.readiness_log import number, records

QUARTER = 900  # seconds; every time zone is a whole number of them from UTC
_GRAPH = re.compile(r"cuda graph: (True|False)")


@dataclass(frozen=True)
class Batch:
    """``running``: the median of the reports inside a level's window; ``graph``: whether most of them were under CUDA
    graphs, None where the log does not tell; ``reports``: how many there are."""

    running: float
    graph: bool | None
    reports: int


def batches(run: Bundle) -> dict[int, Batch]:
    """concurrency → what the log reports while that level's window was open; levels without a report are missing."""
    log = run.path / "server.log"
    if not run.summary or not log.is_file():
        return {}
    reports = _read(log, run.run.get("started"))
    found = {}
    for level in run.summary["levels"]:
        window = level.get("window")
        if level["concurrency"] is None or not window:
            continue
        # Its times are whole seconds: the first may report what was just before the window.
        inside = [(n, graph) for t, n, graph in reports if window["start"] + 1 <= t <= window["end"]]
        inside = inside or [(n, graph) for t, n, graph in reports if window["start"] - 1 < t <= window["end"]]
        if inside:
            told = [graph for _, graph in inside if graph is not None]
            found[level["concurrency"]] = Batch(
                statistics.median(n for n, _ in inside),
                statistics.fmean(told) > 0.5 if told else None,
                len(inside),
            )
    return found


@lru_cache(maxsize=64)
def _read(log: Path, started: str | None) -> list[tuple[float, float, bool | None]]:
    return _reports(log.read_text(errors="replace"), started)


def _reports(text: str, started: str | None) -> list[tuple[float, float, bool | None]]:
    """(seconds since 1970, running requests, under a graph) of each decode report. The log has the time of day of a
    machine whose zone is not in it: its beginning is held against the run's, which is in UTC."""
    stamped = [(record.time, record.text) for record in records(text) if record.time]
    if not stamped or not started:
        return []
    first = _seconds(stamped[0][0], "%Y-%m-%d %H:%M:%S")
    zone = round((first - _seconds(started, "%Y-%m-%dT%H:%M:%SZ")) / QUARTER) * QUARTER
    found = []
    for time, said in stamped:
        running = number(said, "#running-req") if said.startswith("Decode batch") else None
        if running is not None:
            graph = _GRAPH.search(said)
            moment = _seconds(time, "%Y-%m-%d %H:%M:%S") - zone
            found.append((moment, running, None if graph is None else graph[1] == "True"))
    return found


def _seconds(text: str, form: str) -> float:
    return datetime.strptime(text, form).replace(tzinfo=UTC).timestamp()
