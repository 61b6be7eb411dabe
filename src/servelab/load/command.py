"""`servelab load`: the command line of the load client."""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from servelab import __version__

# What callers may rely on: they check this number and the options they use before they start a server.
INTERFACE = 1
USAGE = 2

EPILOG = """\
exit status: 0 every level is valid; 2 wrong usage; 3 some level is not valid (failed requests, load not
sustained, client the bottleneck, interrupted): the results are kept and say why; 4 could not start (server
unreachable, or another one than expected).
"""


def add_parser(subparsers: Any) -> None:
    """Register the subcommand."""
    parser = subparsers.add_parser(
        "load",
        help="put a server under load and measure it",
        description="Keep a number of streaming requests in flight, level by level, and measure what arrives when.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_options(parser)


def add_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--interface",
        action="store_true",
        help="print the interface's number and the options as one JSON line, and exit",
    )
    add("--url", default="http://127.0.0.1:30000", help="the server (default %(default)s)")
    add("--out", type=Path, metavar="DIR", help="directory for the results; must not hold any yet")
    add("--mode", default="unnamed", help="name of the mode that is measured; only written into the summary")
    add("--levels", type=_levels, default=[1], metavar="C,C,…", help="requests in flight, in this order (default 1)")
    add("--api", choices=("completions", "chat"), default="completions", help="default %(default)s")
    add("--model", help="name to ask for (default: the one that the server gives)")
    add("--input-tokens", type=positive, default=512, help="about this many per prompt (default %(default)s)")
    add("--output-tokens", type=positive, default=128, help="exactly this many per response (default %(default)s)")
    add("--seed", type=int, default=1, help="the same seed gives the same prompts (default %(default)s)")
    add("--min-seconds", type=_seconds, default=30.0, help="shortest steady window, reported seconds (default 30)")
    add("--min-waves", type=_seconds, default=3.0, help="fewest requests ended in it, times the level (default 3)")
    add("--min-requests", type=whole, default=0, help="fewest requests ended in it at any level (default %(default)s)")
    add("--warmup-requests", type=whole, default=4, help="requests before the first level (default %(default)s)")
    add("--timeout", type=_seconds, default=600.0, help="wall seconds for one request (default 600)")
    add(
        "--after-window",
        choices=("drain", "cancel"),
        default="drain",
        help="for requests in flight when the window closes; a cancelled one is no failure (default %(default)s)",
    )
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key (or SERVELAB_API_KEY in the environment)",
    )
    add("--expect-model", help="refuse a server that names another model")
    add("--expect-version", help="refuse another SGLang version")
    add("--progress-file", type=Path, metavar="FILE", help="default DIR/progress.json")


def run(args: argparse.Namespace) -> int:
    """Run the client; returns the exit status."""
    if args.interface:
        parser = argparse.ArgumentParser(add_help=False)
        add_options(parser)
        words = sorted(word for action in parser._actions for word in action.option_strings)
        print(json.dumps({"interface": INTERFACE, "version": __version__, "options": words}))
        return 0

    # Late: --interface and --help need none of it.
    from servelab.load.server import Server, ServerError
    from servelab.load.session import Options, Session

    problems = []
    if args.out is None:
        problems.append("--out is missing: say where the results go")
    elif args.out.exists() and (
        not args.out.is_dir() or any(path.name != "progress.json" for path in args.out.iterdir())
    ):
        problems.append(f"--out {args.out} is not an empty directory: nothing is overwritten, choose another")
    if len(set(args.levels)) < len(args.levels):
        problems.append("--levels names a level twice: each is measured once per run")
    key = os.environ.get("SERVELAB_API_KEY")
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            problems.append(f"--api-key-file: {problem}")
    if key and not (key.isascii() and key.isprintable()):
        problems.append("the API key has characters that no HTTP header can carry")
    try:
        Server(args.url)
    except ServerError as problem:
        problems.append(f"--url: {problem}")
    if problems:
        for sentence in problems:
            print(f"servelab load: {sentence}", file=sys.stderr)
        return USAGE

    args.out.mkdir(parents=True, exist_ok=True)
    options = Options(
        url=args.url,
        out=args.out,
        mode=args.mode,
        levels=args.levels,
        api=args.api,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        seed=args.seed,
        min_seconds=args.min_seconds,
        min_waves=args.min_waves,
        min_requests=args.min_requests,
        warmup_requests=args.warmup_requests,
        timeout=args.timeout,
        drain=args.after_window == "drain",
        key=key or None,
        model=args.model,
        expect_model=args.expect_model,
        expect_version=args.expect_version,
        progress_file=args.progress_file,
    )
    return Session(options, lambda line: print(line, flush=True)).run()


def _levels(text: str) -> list[int]:
    return [positive(word) for word in text.split(",")]


def positive(text: str) -> int:
    value = whole(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return value


def whole(text: str) -> int:
    text = text.strip()
    if not (text.isascii() and text.isdigit()) or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
