"""The `servelab` command. Only the module of the subcommand asked for is imported: the load client must start fast
and must not need what the others need."""

from __future__ import annotations

import argparse
import importlib
import os
import sys
from collections.abc import Sequence

from servelab import __version__

# name → (module with `add_parser(subparsers)` and `run(args) -> int`, one line for --help)
COMMANDS = {
    "load": ("servelab.load.command", "put a server under load and measure it"),
    "read-bench": ("servelab.bench_rows", "read a result file of sglang.bench_serving, and judge its rows"),
    "bundle": ("servelab.bundle", "check and describe the directory of one run"),
    "diagnose": ("servelab.diagnose", "name the cause in a server's log"),
    "compare": ("servelab.compare", "compare the runs of two modes"),
    "verify-bundle": ("servelab.verify", "recompute a run's figures from its raw rows"),
    "ledger": ("servelab.ledger", "write LEDGER.md: everything ever tried, with outcome and reason"),
    "campaign": ("servelab.campaign.command", "measure several modes, interleaved and repeated"),
    "by-node": ("servelab.by_node", "run a playbook for every node by itself, all at the same time"),
    "lock": ("servelab.lock", "resolve SGLang's stacks into locks with hashes"),
    "holders": ("servelab.holders", "who holds the GPUs of this machine"),
    "report": ("servelab.report", "write the report of a campaign"),
    "correctness": ("servelab.correctness", "compare a server's greedy answers with the baseline's"),
    "collectives": ("servelab.collectives.command", "measure every way to all-reduce on this machine"),
}


INTERRUPTED = 130  # as a shell has it for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns its exit status (2: wrong usage, as argparse has it; 130: interrupted)."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(
        prog="servelab", description="Measure and compare ways of serving a large language model with SGLang."
    )
    parser.add_argument("--version", action="version", version=f"servelab {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    asked = words[0] if words else ""
    run = None
    for name, (module_name, summary) in COMMANDS.items():
        if name == asked:
            module = importlib.import_module(module_name)
            module.add_parser(subparsers)
            run = module.run
        else:
            subparsers.add_parser(name, help=summary)
    args = parser.parse_args(words)
    if run is None:  # argparse has already left for everything but an option before the command
        parser.error("the command comes first, then its options")
    try:
        return int(run(args))
    except BrokenPipeError:
        # Whoever read it, like head, has enough; nothing may be flushed into the closed pipe at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        print(f"servelab {asked}: interrupted", file=sys.stderr)
        return INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
