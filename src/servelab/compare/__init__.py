"""Compare runs: which mode serves more tokens per second at which level, and where that changes.

`pairs` says which run is compared with which, `guard` whether they may be, `answer` computes, `words` tells. One run
per mode is a measurement without an interval: the noise between two starts of a server is not in it, and the verdict
says so.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from servelab import bundle
from servelab.bundle import BundleError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "compare",
        help="compare runs of two or more modes, or all modes of a campaign",
        epilog="exit status: 0 compared; 1 no answer (runs that cannot be compared, or cannot be read); 2 wrong usage; "
        "3 with --baseline: something became slower.",
    )
    parser.add_argument(
        "paths",
        type=Path,
        nargs="+",
        metavar="PATH",
        help="one campaign directory, or bundles: several of a mode repeat it",
    )
    parser.add_argument("--base", help="the mode the others are compared with (default: baseline, or the first named)")
    parser.add_argument(
        "--baseline",
        metavar="CAMPAIGN",
        help="an earlier campaign (directory, or name beside this one): has any mode become slower since?",
    )
    parser.add_argument(
        "--force",
        action="store_true",
        help="print the answer of runs that cannot be compared, with the reasons attached",
    )


def run(args: argparse.Namespace) -> int:
    # Imported here: numpy takes a second, and --help needs none of it.
    from servelab.compare import answer, pairs, words

    try:
        if args.baseline is not None:
            return _watch(args)
        if len(args.paths) == 1 and not (args.paths[0] / "run.json").is_file():
            arms = pairs.of_campaign(args.paths[0], args.base or "baseline")
        else:
            arms = pairs.of_bundles([bundle.read(path) for path in args.paths], args.base)
    except BundleError as error:
        print(f"servelab compare: {error}", file=sys.stderr)
        return 1
    comparisons = answer.compare_all(arms, forced=args.force)
    print(words.texts(comparisons))
    return 1 if any(c.refused for c in comparisons) else 0


def _watch(args: argparse.Namespace) -> int:
    from servelab.compare import regression

    now, *more = args.paths
    if more or (now / "run.json").is_file():
        print("servelab compare: --baseline compares one campaign directory with an earlier one.", file=sys.stderr)
        return 2
    found = regression.watch(regression.campaign_of(args.baseline, now), now, forced=args.force)
    print(regression.text(found))
    return regression.status(found)
