"""`servelab correctness`: hold a running server's greedy answers against those of the baseline, by hand."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from servelab.shared.correctness import TOKENS
from servelab.shared.correctness_probe import probe


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("correctness", help="compare a server's greedy answers with the baseline's")
    parser.add_argument("--url", default="http://127.0.0.1:30000")
    parser.add_argument("--records", type=Path, required=True, help="directory of the baseline's answers")
    parser.add_argument("--stack", default="", help="what serves; part of what tells one record from another")
    parser.add_argument("--record", action="store_true", help="this is a start of the baseline: keep its answers")
    parser.add_argument("--start", default="", help="what tells this start from others")
    parser.add_argument("--known-answers", type=Path, help='JSON list of {"input_ids": [...], "output_ids": [...]}')
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--timeout", type=int, default=120)


def run(args: argparse.Namespace) -> int:
    """Exit status 0: verified; 1: wrong; 3: unverified."""
    known = json.loads(args.known_answers.read_text(encoding="utf-8")) if args.known_answers else []
    answer = probe(
        args.url, args.records, args.stack, record=args.record, start=args.start, known_answers=known,
        tokens=args.tokens, timeout=args.timeout,
    )  # fmt: skip
    print(json.dumps(answer, indent=1, ensure_ascii=False))
    return {"verified": 0, "wrong": 1}.get(answer["status"], 3)
