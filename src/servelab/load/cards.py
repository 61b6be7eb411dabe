"""The cards while the load runs: nvidia-smi beside the client, and what it said during each level.

A reading before and after tells nothing about throttling, because the cards are idle then. One nvidia-smi runs for the
whole sweep and writes into a file by itself, so that the client neither waits for it nor reads it while it measures.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from servelab.shared.nvidia_smi import parse_table

FIELDS = (
    "index",
    "memory.used",
    "temperature.gpu",
    "power.draw",
    "clocks.current.sm",
    "pcie.link.gen.current",
    "clocks_event_reasons.active",
)
KEPT = ("index", "memory_used_mib", "temperature_c", "power_w", "clock_sm_mhz", "pcie_link_gen", "throttle_reasons")
FILE = "cards.jsonl"
_RAW = "cards.csv"
# Cards that do nothing, and settings that somebody wanted, are no throttling.
HARMLESS = ("gpu_idle", "applications_clocks_setting", "display_clock_setting")


class Watch:
    """nvidia-smi, asked every *seconds* from now on; its readings end in *directory*/cards.jsonl."""

    def __init__(self, directory: Path, seconds: float, executable: str = "nvidia-smi") -> None:
        self.directory = directory
        self._raw = directory / _RAW
        # The first column is a time of day without a zone: UTC is asked for.
        words = [executable, f"--query-gpu=timestamp,{','.join(FIELDS)}", "--format=csv,noheader,nounits"]
        words.append(f"--loop-ms={max(1, round(seconds * 1000))}")
        environment = {**os.environ, "TZ": "UTC0", "LC_ALL": "C"}
        self.why_not: str | None = None
        self._ended: list[dict[str, Any]] | None = None
        with self._raw.open("w") as out:
            try:
                self._process: subprocess.Popen[bytes] | None = subprocess.Popen(
                    words, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=environment
                )
            except OSError as problem:
                self._process = None
                self.why_not = str(problem)

    def readings(self) -> list[dict[str, Any]]:
        """What it said so far, oldest first: {"t": seconds since 1970, "gpus": [one entry for each card]}. The last
        ones may still be in its buffer until `end`."""
        if self._ended is not None:
            return self._ended
        with suppress(OSError):
            return read(self._raw.read_text(errors="replace"))
        return []

    def end(self) -> None:
        """Stop it and leave cards.jsonl; without readings, what it said instead stays in cards.csv."""
        if self._ended is not None:
            return
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()  # one that hangs in the driver outlives even this, and is not waited for
        found = self._ended = self.readings()
        if found:
            (self.directory / FILE).write_text("".join(json.dumps(reading) + "\n" for reading in found))
            self._raw.unlink()
        elif not self._raw.stat().st_size:
            self._raw.unlink()


def read(text: str) -> list[dict[str, Any]]:
    """The readings in what nvidia-smi printed: a row for each card, those of one look with (nearly) one time.

    Lines that are no rows are passed over: a sentence in place of a table is no reading.
    """
    found: list[dict[str, Any]] = []
    for line in text.splitlines():
        cells = [cell.strip() for cell in next(csv.reader([line]), [])]
        if len(cells) != len(FIELDS) + 1:
            continue
        with suppress(ValueError):
            moment = datetime.strptime(cells[0], "%Y/%m/%d %H:%M:%S.%f").replace(tzinfo=UTC).timestamp()
            gpus = parse_table(", ".join(cells[1:]), FIELDS).gpus
            if not gpus:
                continue
            card = {key: gpus[0][key] for key in KEPT}
            if not found or card["index"] in {other["index"] for other in found[-1]["gpus"]}:
                found.append({"t": round(moment, 3), "gpus": []})
            found[-1]["gpus"].append(card)
    return found


def summary(readings: Sequence[dict[str, Any]], start: float, end: float) -> dict[str, Any] | None:
    """What the cards did from *start* to *end* (seconds since 1970); None without a reading in between.

    ``power_w``: of all cards together, mean over time. ``clock_sm_mhz``: mean of the slowest card, for which the others
    wait. ``temperature_c`` and ``memory_used_mib``: the highest of any card. ``throttle``: reason → share of the
    readings in which any card had it. What nvidia-smi does not tell is None; ``throttle`` too.
    """
    inside = [reading["gpus"] for reading in readings if start <= reading["t"] <= end]
    if not inside:
        return None
    reasons = [[card["throttle_reasons"] for card in gpus] for gpus in inside]
    known = [[told for told in gpus if told is not None] for gpus in reasons]
    seen = sorted({reason for gpus in known for told in gpus for reason in told} - set(HARMLESS))
    return {
        "readings": len(inside),
        "power_w": _mean([_all(gpus, "power_w", sum) for gpus in inside]),
        "clock_sm_mhz": _mean([_all(gpus, "clock_sm_mhz", min) for gpus in inside]),
        "temperature_c": max(filter(None, [_all(gpus, "temperature_c", max) for gpus in inside]), default=None),
        "memory_used_mib": max(filter(None, [_all(gpus, "memory_used_mib", max) for gpus in inside]), default=None),
        "throttle": {
            reason: round(sum(any(reason in told for told in gpus) for gpus in known) / len(inside), 4)
            for reason in seen
        }
        if any(known)
        else None,
    }


def _all(gpus: Sequence[dict[str, Any]], key: str, of: Any) -> float | None:
    """*of* over all cards; None where one of them does not tell, because a sum without it would be another figure."""
    values = [card[key] for card in gpus]
    return None if None in values else of(values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(f"{sum(known) / len(known):.6g}") if known else None
