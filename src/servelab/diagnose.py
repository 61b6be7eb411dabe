"""`servelab diagnose server.log`: why a server ended, from its log alone, on any machine."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servelab.shared.readiness_diagnosis import Diagnosis, Exit, diagnose, notices
from servelab.shared.readiness_log import start_progress, warnings
from servelab.shared.redact import redact

# Exit statuses of `servelab diagnose`.
NAMED, UNKNOWN, NO_FAILURE = 0, 3, 4


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser("diagnose", help="name the cause in a server's log")
    parser.description = (
        "Name the cause of a server's end from its log, with the line that shows it and one remedy. "
        f"Exit status: {NAMED} named, {UNKNOWN} a failure that the catalogue does not know, "
        f"{NO_FAILURE} no failure in the log, 2 wrong usage."
    )
    parser.add_argument("log", type=Path, help="the log of one start; - is standard input")
    parser.add_argument(
        "--exit-status",
        type=int,
        metavar="N",
        help="how it ended; 128+n and -n are signal n, as shells and Python say it",
    )
    parser.add_argument("--kernel", type=Path, metavar="FILE", help="the node's kernel log of that time (dmesg)")


def exit_of(status: int | None) -> Exit:
    """What an exit status says: 137 and -9 are signal 9, which does not prove the OOM killer."""
    if status is None:
        return Exit()
    if status < 0 or status > 128:
        return Exit("killed", -status if status < 0 else status - 128, "signal")
    return Exit("exited", status, "exit-code" if status else "success")


def report(found: Diagnosis, text: str) -> list[str]:
    """What is printed: the cause, its line, the remedy, and what else the log has to say."""
    lines = [f"{found.name}: {found.cause}"]
    if found.evidence:
        lines.append(f"  line:   {found.evidence}")
    lines.append(f"  remedy: {found.remedy}")
    lines += [f"  note:   {redact(note)}" for note in [*warnings(start_progress(text)), *notices(text)]]
    if found.tail:
        lines += ["", f"The last {len(found.tail)} lines:", *(f"  {line}" for line in found.tail)]
    return lines


def run(args: argparse.Namespace) -> int:
    """Print the diagnosis; returns the exit status."""
    try:
        raw = sys.stdin.buffer.read() if str(args.log) == "-" else args.log.read_bytes()
        kernel = args.kernel.read_bytes() if args.kernel else b""
    except OSError as error:
        print(f"{error.filename} cannot be read: {error.strerror}.", file=sys.stderr)
        return 2
    text = raw.decode("utf-8", "replace")
    if not text.strip():
        print(
            f"{args.log} is empty: there is nothing to diagnose. Is it the log of the start in question?",
            file=sys.stderr,
        )
        return 2
    found = diagnose(text, exit_of(args.exit_status), kernel.decode("utf-8", "replace"))
    print("\n".join(report(found, text)))
    if found.name == "unknown":
        return UNKNOWN
    return NAMED if found.failed else NO_FAILURE
