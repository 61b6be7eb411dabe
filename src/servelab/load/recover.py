"""Rows from what a killed client left: the bytes of every request that had ended are on disk."""

from __future__ import annotations

import sys
from pathlib import Path

from servelab.load import capture, rows
from servelab.load.forms import Forms

OK, NOTHING = 0, 4


def run(directory: Path) -> int:
    """Write `levels/*.jsonl` of a result directory whose client was killed. There is no summary: the level did not end.

    What was read is kept beside the rows. Returns 0, or 4 where there is nothing to recover.
    """
    found = sorted((directory / "levels").glob("*.capture"))
    status = OK if found else NOTHING
    if not found:
        print(f"servelab load: no level in {directory} was cut off", file=sys.stderr)
    for path in found:
        target = path.with_suffix(".jsonl")
        try:
            about = capture.about(path)
            # Rows that the client had begun to write itself are the beginning of the same.
            beside = target.with_suffix(".new")
            count = failed = 0
            known = Forms()
            with beside.open("w") as file:
                for record in capture.read(path):
                    reply = rows.interpret(record, about.expected, forms=known)
                    count, failed = count + 1, failed + (reply.error is not None)
                    file.write(rows.line(record, reply, about.level, about.epoch_offset))
            beside.replace(target)
        except (OSError, ValueError) as problem:
            print(f"servelab load: {problem}", file=sys.stderr)
            status = NOTHING
            continue
        print(f"level {about.level}: {count} requests had ended, {failed} of them failed: {target}, no summary")
    return status
