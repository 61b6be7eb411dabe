"""The ledger: one line of JSON for everything ever tried, failures included. Only ever appended to.

What others reported stands in a file of its own (campaigns/reported.jsonl), marked *reported, not measured here*:
those figures come from other weeks, stacks and settings and are never ranked with measured ones.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from servelab.bundle import Bundle

FILE = "ledger.jsonl"
SCHEMA = "servelab.ledger/1"
REPORTED_SCHEMA = "servelab.reported/1"


class LedgerError(Exception):
    """A ledger that cannot be read; the message names file and line."""


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


def read(path: Path, schema: str = SCHEMA) -> list[dict[str, Any]]:
    """The lines of a ledger, oldest first; none where there is no file. Raises LedgerError for a line that is none."""
    if not path.exists():
        return []
    lines = []
    for number, text in enumerate(path.read_text().splitlines(), 1):
        try:
            line = json.loads(text)
        except ValueError as error:
            problem = f"{path}, line {number}, is no JSON ({error}): restore it from the bundles."
            raise LedgerError(problem) from error
        if not isinstance(line, dict) or line.get("schema") != schema:
            raise LedgerError(f"{path}, line {number}, is not of schema {schema}: it belongs to another version.")
        lines.append(line)
    return lines


def render(measured: Sequence[dict[str, Any]], reported: Sequence[dict[str, Any]]) -> str:
    """LEDGER.md: what was measured here, newest first, and what others reported, in two tables that are never mixed."""
    failed = sum(1 for line in measured if line["status"] != "ok")
    simulated = sum(1 for line in measured if line["simulated"])
    parts = [
        "# Ledger",
        "Everything ever tried, with its outcome and the reason; what failed stands beside what worked. "
        "Written by `servelab ledger`, never by hand.",
        "## Measured here",
        f"{len(measured)} runs, {failed} without a usable result, {simulated} simulated (they say nothing about GPUs).",
    ]
    if measured:
        rows = ["| ended | mode | outcome | best tok/s | SGLang | campaign, bundle |", "|---|---|---|---:|---|---|"]
        rows += [_measured(line) for line in sorted(measured, key=lambda line: str(line["time"]), reverse=True)]
        parts.append("\n".join(rows))
    parts += [
        "## Reported, not measured here",
        "Others' results. Their conditions differ and are only partly known: no two of these rows may be "
        "compared, and none with a row above. They are here so that nobody tries a dead end twice unawares.",
    ]
    rows = ["| mode | outcome | conditions | reason | to do |", "|---|---|---|---|---|"]
    rows += [_reported(line) for line in reported]
    parts.append("\n".join(rows))
    return "\n\n".join(parts) + "\n"


def _measured(line: dict[str, Any]) -> str:
    outcome = str(line["status"]) if not line["reason"] else f"{line['status']}: {line['reason'].splitlines()[0]}"
    simulated = line["simulated"]
    if simulated:
        outcome = f"simulated ({simulated.get('profile')}, ×{simulated.get('time_scale')}) {outcome}"
    best = "—" if line["best_tok_s"] is None else f"{line['best_tok_s']:.1f}"
    cells = (line["time"], line["mode"], outcome, best, line["sglang_version"] or "unknown", f"`{line['bundle']}`")
    return _row(cells)


def _reported(line: dict[str, Any]) -> str:
    return _row([line.get(key) or "—" for key in ("mode", "outcome", "conditions", "reason", "next")])


def _row(cells: Sequence[Any]) -> str:
    return "| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("ledger", help="write LEDGER.md beside the ledger: everything ever tried")
    parser.add_argument(
        "--results", type=Path, default=Path("results"), help="directory of the ledger (default: results)"
    )
    parser.add_argument(
        "--reported",
        type=Path,
        default=Path("campaigns/reported.jsonl"),
        help="what others reported (default: campaigns/reported.jsonl)",
    )


def run(args: argparse.Namespace) -> int:
    try:
        text = render(read(args.results / FILE), read(args.reported, REPORTED_SCHEMA))
        args.results.mkdir(parents=True, exist_ok=True)
        target = args.results / "LEDGER.md"
        target.write_text(text)
    except (LedgerError, OSError) as error:
        print(f"servelab ledger: {error}", file=sys.stderr)
        return 1
    print(target)
    return 0
