"""The two call forms that people have in their notes, translated to `servelab load`. Nothing is measured here."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servelab.cli import main
from servelab.load.command import positive, whole


def eagle3(argv: Sequence[str] | None = None) -> int:
    """benchmark_eagle3.py: one stream, one figure per run. Returns the exit status of `servelab load`."""
    parser = _parser("benchmark_eagle3.py", "Speed of a single stream.")
    parser.add_argument("--num-runs", type=positive, default=5, help="requests, one after the other (default 5)")
    parser.add_argument("--warmup", type=whole, default=1, help="requests before the first run (default 1)")
    args = parser.parse_args(argv)
    out, status = _load(args, [1], args.num_runs, args.warmup)
    summary = _read(out / "summary.json")
    if summary is None:
        return status
    scale, word = _scale(summary)
    speeds = []
    for line in (out / "levels" / "level-0001.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["error"] is not None:
            print(f"run {row['id'] + 1}: failed: {row['error']['kind']}: {row['error']['detail']}")
            continue
        seconds = (row["t_end"] - row["t_send"]) * scale
        speeds.append(row["completion_tokens"] / seconds)
        print(
            f"run {row['id'] + 1}: {row['completion_tokens']} tokens in {seconds:.2f} s: {speeds[-1]:.1f} tok/s{word}"
        )
    if speeds:
        print(f"mean: {sum(speeds) / len(speeds):.1f} tok/s over {len(speeds)} runs{word}")
    print(f"details: {out}")
    return status


def parallel(argv: Sequence[str] | None = None) -> int:
    """benchmark_parallel.py: throughput by concurrency. Returns the exit status of `servelab load`."""
    parser = _parser("benchmark_parallel.py", "Throughput of parallel streams.")
    parser.add_argument("--concurrency", type=positive, nargs="+", default=[1, 2, 5, 10], help="default 1 2 5 10")
    parser.add_argument(
        "--num-requests", type=whole, default=0, help="fewest requests per concurrency (default 3 each)"
    )
    parser.add_argument("--warmup", type=whole, default=1, help="requests before the first one (default 1)")
    args = parser.parse_args(argv)
    out, status = _load(args, args.concurrency, args.num_requests, args.warmup)
    summary = _read(out / "summary.json")
    if summary is None:
        return status
    _, word = _scale(summary)
    print(f"{'concurrency':>11} {'tok/s':>9} {'tok/s each':>10} {'TTFT ms':>9} {'TPOT ms':>8} {'requests':>8}{word}")
    for level in summary["levels"]:
        rate = level["output_tok_s"]
        each = rate / level["concurrency"] if rate is not None else None
        figures = (rate, each, level["ttft_ms"]["mean"], level["tpot_ms"]["mean"])
        widths = (9, 10, 9, 8)
        cells = " ".join(f"{'-' if x is None else f'{x:.1f}':>{w}}" for x, w in zip(figures, widths, strict=True))
        note = "" if level["valid"] else f"  NOT VALID: {'; '.join(level['invalid_reasons'])}"
        print(f"{level['concurrency']:>11} {cells} {level['requests']['completed']:>8}{note}")
    print(f"details: {out}")
    return status


def _parser(name: str, description: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog=name, description=f"{description} Measured by `servelab load`.")
    parser.add_argument("--server-url", default="http://127.0.0.1:30000", help="default %(default)s")
    parser.add_argument(
        "--max-tokens", type=positive, default=256, help="tokens of each response (default %(default)s)"
    )
    parser.add_argument("--input-tokens", type=positive, default=128, help="about this many per prompt (default 128)")
    parser.add_argument("--api", choices=("completions", "chat"), default="completions", help="default %(default)s")
    parser.add_argument("--out", type=Path, help="directory for the results (default: a new one in /var/tmp)")
    return parser


def _load(args: argparse.Namespace, levels: list[int], requests: int, warmup: int) -> tuple[Path, int]:
    """Run it; requests: the fewest per level, three times the level where 0."""
    out = args.out or Path(tempfile.mkdtemp(prefix="servelab-", dir="/var/tmp"))
    words = ["load", "--url", args.server_url, "--out", str(out), "--levels", ",".join(map(str, levels))]
    words += ["--output-tokens", str(args.max_tokens), "--input-tokens", str(args.input_tokens), "--api", args.api]
    words += ["--min-seconds", "0", "--min-waves", "0" if requests else "3", "--min-requests", str(requests)]
    words += ["--warmup-requests", str(warmup)]
    return out, main(words)


def _read(path: Path) -> dict[str, Any] | None:
    return dict(json.loads(path.read_text())) if path.exists() else None


def _scale(summary: dict[str, Any]) -> tuple[float, str]:
    """Reported seconds per wall second, and what must stand behind every figure."""
    simulated = summary["server"]["simulated"]
    if simulated is None:
        return 1.0, ""
    scale = float(simulated.get("time_scale") or 1)
    return scale, f"  (simulated, profile {simulated.get('profile')}, time scale {scale:g})"
