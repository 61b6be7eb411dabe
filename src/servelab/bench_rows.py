"""Read what sglang.bench_serving wrote, with the distrust that its file deserves.

Its rows are appended to a file whose name does not tell modes apart, hold `Infinity`, zeros where everything failed,
the server's API key, and not how many requests were asked for. A row that must not be ranked says why.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from servelab.shared.redact import redact_value

SHOWN = ("completed", "output_throughput", "median_ttft_ms", "median_itl_ms", "accept_length")


@dataclass(frozen=True)
class Row:
    """One line. `values`: without secrets, and null where it had Infinity or NaN. `problems`: why its figures must
    not be used; `notices`: what to know of them; `ms_per_token`: of one stream, from throughput and concurrency."""

    line: int
    values: dict[str, Any]
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    ms_per_token: float | None = None

    @property
    def usable(self) -> bool:
        return not self.problems


def read(path: Path, requested: int | None = None) -> tuple[list[Row], list[str]]:
    """(rows, lines that are none, a sentence each). `requested`: how many requests each row was asked for; None:
    unknown, so that missing ones cannot be seen. Raises OSError and UnicodeDecodeError."""
    rows: list[Row] = []
    lost = []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line, parse_constant=lambda name: None)
            if not isinstance(value, dict):
                raise ValueError("not an object")
        except ValueError as problem:
            lost.append(f"{path.name}:{number} is cut off or no row, and left out: {problem}")
            continue
        rows.append(_judge(number, dict(redact_value(value)), requested))
    return rows, lost


def differences(first: Row, other: Row) -> list[str]:
    """Server settings that differ and belong to no mode: why two rows cannot be compared as they are."""
    one, two = (row.values.get("server_info") or {} for row in (first, other))
    names = sorted(name for name in one.keys() | two.keys() if not name.startswith("speculative_"))
    return [f"{name}: {one.get(name)} and {two.get(name)}" for name in names if one.get(name) != two.get(name)]


def _judge(number: int, values: dict[str, Any], requested: int | None) -> Row:
    problems, notices = [], []
    completed = values.get("completed")
    throughput, streams = values.get("output_throughput"), values.get("max_concurrency")
    if not isinstance(completed, int) or not completed:
        problems.append("no request was completed: its zeros are no latencies")
    elif requested is not None and completed < requested:
        missing = requested - completed
        problems.append(f"{missing} of {requested} requests failed or are missing: the rest looks better than it was")
    elif requested is None:
        notices.append("the row does not say how many requests were asked for: failed ones cannot be seen")
    elif completed > requested:
        problems.append(f"{completed} requests completed where {requested} were asked for")
    per_token = None
    if completed and isinstance(throughput, int | float) and throughput > 0 and isinstance(streams, int):
        per_token = round(1000 * streams / throughput, 2)
    if (values.get("accept_length") or 0) > 1:
        notices.append("its inter-token latency is per chunk, not per token")
    if values.get("random_range_ratio") == 0.0:
        most = values.get("random_output_len")
        notices.append(
            f"random_range_ratio 0.0: lengths are spread evenly from 1 to {most}, about half of it on average"
        )
    return Row(number, values, problems, notices, per_token)


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser("read-bench", help="read a result file of sglang.bench_serving, and judge its rows")
    parser.add_argument("path", type=Path, metavar="FILE")
    parser.add_argument("--requested", type=int, metavar="N", help="how many requests each row was asked for")
    parser.add_argument("--json", action="store_true", help="print the rows as strict JSON lines")


def run(args: argparse.Namespace) -> int:
    """Exit status 1 where a row or a line cannot be used, 2 where the file cannot be read."""
    try:
        rows, lost = read(args.path, args.requested)
    except (OSError, UnicodeDecodeError) as problem:
        print(f"servelab read-bench: {args.path}: {problem}", file=sys.stderr)
        return 2
    for row in rows:
        if args.json:
            judged = {"line": row.line, "usable": row.usable, "problems": row.problems, "notices": row.notices}
            print(json.dumps({**judged, "ms_per_token": row.ms_per_token, "row": row.values}, allow_nan=False))
            continue
        shown = ", ".join(f"{name} {row.values.get(name)}" for name in SHOWN)
        print(f"line {row.line}: {shown}, ms per token of a stream {row.ms_per_token}")
        for text in [f"NOT USABLE: {problem}" for problem in row.problems] + row.notices:
            print(f"    {text}")
        for text in differences(rows[0], row) if row.usable and rows[0].usable else []:
            print(f"    not comparable with line {rows[0].line} as it is: {text}")
    for text in lost:
        print(text)
    return 1 if lost or not all(row.usable for row in rows) else 0
