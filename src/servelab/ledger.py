"""The ledger: one line of JSON for everything ever tried, failures included. Only ever appended to."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servelab.bundle import Bundle

FILE = "ledger.jsonl"
SCHEMA = "servelab.ledger/1"


def line_of(bundle: Bundle) -> dict[str, Any]:
    """The ledger's line for a received bundle; ``best_tok_s`` is the best total of its valid levels, or None."""
    levels = bundle.summary["levels"] if bundle.summary else []
    rates = [level["output_tok_s"] for level in levels if level["valid"] and level["output_tok_s"] is not None]
    run = bundle.run
    return {
        "schema": SCHEMA,
        "time": run.get("ended") or run.get("started"),
        "campaign": run.get("campaign"),
        "mode": run["mode"],
        "status": run["status"],
        "reason": run.get("reason"),
        "bundle": str(Path(bundle.path.parent.name) / bundle.path.name),
        "simulated": run.get("simulated"),
        "best_tok_s": max(rates, default=None),
        "sglang_version": (bundle.summary or {}).get("server", {}).get("sglang_version"),
    }


def append(path: Path, line: dict[str, Any]) -> None:
    """Append *line* in one write, so that two runs that end together do not tear each other's lines."""
    data = (json.dumps(line, sort_keys=True) + "\n").encode()
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(descriptor, data)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
