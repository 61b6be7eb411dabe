"""`servelab load`: the command line of the load client."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from servelab import __version__

# What callers may rely on: they check this number and the options they use before they start a server.
INTERFACE = 1
USAGE = 2
SLOS = ("ttft_ms", "ttfa_ms", "tpot_ms", "e2e_ms")

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
        description="Put streaming requests on a server, level by level, and measure what arrives when.",
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
    add(
        "--recover",
        type=Path,
        metavar="DIR",
        help="write the rows that a killed client left in DIR, and exit",
    )
    add("--url", default="http://127.0.0.1:30000", help="the server, http or https (default %(default)s)")
    add("--out", type=Path, metavar="DIR", help="directory for the results; must not hold any yet")
    add("--mode", default="unnamed", help="name of the mode that is measured; only written into the summary")

    add = parser.add_argument_group("how much load").add_argument
    add("--levels", type=_levels, metavar="C,C,…", help="closed loop: requests in flight, in this order (default 1)")
    add(
        "--arrivals",
        choices=("closed", "together", "poisson", "constant", "burst", "ramp", "trace"),
        default="closed",
        help="when requests are sent: closed keeps so many in flight, together too, but begins with all of them at "
        "once, as other clients do; the others send at --rates whatever the server does (open loop: latencies count "
        "from the intended time), trace as the dataset says (default %(default)s)",
    )
    add("--rates", type=_rates, metavar="R,R,…", help="open loop: requests per second, in this order")
    add("--burst", type=positive, default=8, metavar="N", help="burst: requests sent at once (default %(default)s)")
    add("--ramp-from", type=_seconds, default=0.0, metavar="R", help="ramp: first rate; it ends at --rates (default 0)")
    add("--trace-speed", type=_above_zero, default=1.0, metavar="X", help="trace: so many times as fast (default 1)")
    add("--most-waiting", type=positive, default=4096, help="open loop: in flight, before it gives up (default 4096)")
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

    add = parser.add_argument_group("what is asked").add_argument
    add("--api", choices=("completions", "chat", "generate"), default="completions", help="default %(default)s")
    add("--model", help="name to ask for (default: the one that the server gives)")
    add("--input-tokens", type=positive, default=512, help="per generated prompt (default %(default)s)")
    add("--output-tokens", type=positive, default=128, help="exactly this many per response (default %(default)s)")
    add("--stop-at-eos", action="store_true", help="let the model end earlier: natural lengths, up to --output-tokens")
    add("--seed", type=int, default=1, help="the same seed gives the same prompts and times (default %(default)s)")
    add("--dataset", type=Path, metavar="FILE", help="prompts from a file: JSON lines, or ShareGPT's form; a trace too")
    add("--prompt-form", choices=("text", "ids"), default="text", help="send texts or token ids (default %(default)s)")
    add("--token-range", type=_range, metavar="LO:HI", help="ids without a tokenizer: random ones, LO ≤ id < HI")
    add(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="the server's tokenizer (a model directory or its tokenizer.json): exact prompt lengths, and token counts "
        "where a server gives none; needs the package tokenizers. Without it prompts have --input-tokens words",
    )
    add(
        "--salt",
        choices=("text", "key", "none"),
        help="what keeps a prefix cache from helping: text (each prompt begins with a number), key (SGLang's "
        "extra_key), none (default: key with --dataset, else text)",
    )
    add("--cached-share", type=_share, default=0.0, metavar="S", help="part of each prompt that is cached (default 0)")

    add = parser.add_argument_group("what counts").add_argument
    add(
        "--slo",
        type=_slo,
        action="append",
        default=[],
        metavar="NAME=MS",
        help="a limit for goodput: ttft_ms, ttfa_ms, tpot_ms or e2e_ms, in reported milliseconds; may be given again",
    )
    add("--failures-allowed", type=_share, default=0.0, metavar="S", help="share of requests that may fail (default 0)")
    add(
        "--watch-cards",
        type=_seconds,
        default=0.0,
        metavar="S",
        help="ask nvidia-smi every S seconds for power, clocks, temperature, memory and throttling (default 0: never)",
    )
    add("--gpus", type=positive, help="GPUs of the server (default: what it says of itself)")

    add = parser.add_argument_group("the way there").add_argument
    add(
        "--api-key-file",
        type=Path,
        metavar="FILE",
        help="file with the API key (or SERVELAB_API_KEY in the environment)",
    )
    add(
        "--proxy",
        metavar="URL",
        help="an HTTP proxy (or SERVELAB_PROXY in the environment; other variables that name proxies are not read)",
    )
    add("--ca-file", type=Path, metavar="FILE", help="https: trust these certificates instead of the system's")
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

    if args.recover is not None:
        from servelab.load import recover

        return recover.run(args.recover)

    # Late: --interface and --help need none of it.
    from servelab.load import setup
    from servelab.load.session import Session

    problems = []
    if args.out is None:
        problems.append("--out is missing: say where the results go")
    elif args.out.exists() and (
        not args.out.is_dir() or any(path.name != "progress.json" for path in args.out.iterdir())
    ):
        problems.append(f"--out {args.out} is not an empty directory: nothing is overwritten, choose another")
    options, more = setup.options(args)
    if options is None or problems:
        for sentence in problems + more:
            print(f"servelab load: {sentence}", file=sys.stderr)
        return USAGE
    args.out.mkdir(parents=True, exist_ok=True)
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


def _rates(text: str) -> list[float]:
    return [_above_zero(word) for word in text.split(",")]


def _above_zero(text: str) -> float:
    value = _seconds(text)
    if not value:
        raise argparse.ArgumentTypeError(f"{text!r} is not above 0")
    return value


def _share(text: str) -> float:
    value = _seconds(text)
    if not value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a share from 0 to below 1")
    return value


def _range(text: str) -> tuple[int, int]:
    low, colon, high = text.partition(":")
    if not colon or not whole(low) < whole(high):
        raise argparse.ArgumentTypeError(f"{text!r} is not LO:HI with LO below HI")
    return whole(low), whole(high)


def _slo(text: str) -> tuple[str, float]:
    name, equals, value = text.partition("=")
    if not equals or name not in SLOS:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=MS with one of {', '.join(SLOS)}")
    return name, _above_zero(value)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of at least 0")
    return value
