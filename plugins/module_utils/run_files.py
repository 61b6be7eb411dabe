"""The files of one run: their checksums, and what they say in a few lines."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SUMS = "SHA256SUMS"


def sha256(path: Path) -> str:
    """The checksum of one file."""
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write_sums(directory: Path) -> None:
    """Write SHA256SUMS over every file below `directory` but itself, in the format of sha256sum."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != SUMS)
    (directory / SUMS).write_text("".join(f"{sha256(path)}  {path.relative_to(directory)}\n" for path in files))


def packages(site: Path) -> dict[str, str]:
    """Name → version of what is installed in a site-packages directory, read from the names of its dist-info."""
    found = {}
    for path in site.glob("*.dist-info"):
        name, _, version = path.name.removesuffix(".dist-info").rpartition("-")
        if name:
            found[name.lower().replace("_", "-")] = version
    return dict(sorted(found.items()))


def simulated_of(summary: Any, server_info: Any, log: str) -> dict[str, Any] | None:
    """{"profile", "time_scale"} of a simulated server, from whichever witness there is; None for a real one.

    A run that failed before it measured has only its log, whose first line names the simulation.
    """
    for witness in ((summary or {}).get("server"), server_info):
        if isinstance(witness, Mapping) and isinstance(witness.get("simulated"), Mapping):
            return dict(witness["simulated"])
    head = log[:2000]
    if "simulated" not in head.lower():
        return None
    profile = re.search(r"profile[=: ]+'?\"?(\w+)", head)
    scale = re.search(r"time[_ ]scale[=: ]+'?\"?([\d.]+)", head)
    return {"profile": profile[1] if profile else None, "time_scale": float(scale[1]) if scale else None}


def level_table(summary: Mapping[str, Any], simulated: Any, skipped: Mapping[str, str] | None = None) -> list[str]:
    """The levels of a summary as the lines of a Markdown table, for a person at a terminal.

    `skipped`: what the machine could not do (name → why); below the table, as the word `simulated` is.
    """
    lines = [
        "| C | tok/s | TTFT p50 ms | TPOT p50 ms | tokens/chunk | done | failed | valid |",
        "|--:|------:|------------:|------------:|-------------:|-----:|-------:|:------|",
    ]
    for level in summary.get("levels", []):
        requests = level.get("requests") or {}
        valid = "yes" if level.get("valid") else "no: " + "; ".join(level.get("invalid_reasons") or ["no reason given"])
        cells = [
            str(level.get("level", level.get("concurrency"))),
            _number(level.get("output_tok_s")),
            _number((level.get("ttft_ms") or {}).get("p50")),
            _number((level.get("tpot_ms") or {}).get("p50")),
            _number(level.get("tokens_per_chunk"), 2),
            str(requests.get("completed", "?")),
            str(requests.get("failed", "?")),
            valid,
        ]
        lines.append("| " + " | ".join(cells) + " |")
    if simulated:
        lines.append(f"simulated: profile {simulated.get('profile')}, time scale {simulated.get('time_scale')}")
    lines += [f"skipped: {name} ({why})" for name, why in sorted((skipped or {}).items())]
    return lines


def _number(value: Any, digits: int = 1) -> str:
    return f"{value:.{digits}f}" if isinstance(value, (int, float)) else "–"
