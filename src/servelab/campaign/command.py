"""`servelab campaign FILE`."""

from __future__ import annotations

import argparse
import datetime
import signal
import sys
from pathlib import Path
from typing import Any

from servelab.bundle import BundleError
from servelab.campaign import learn, orphans, plan, spec, state
from servelab.campaign.drive import Stop, drive
from servelab.campaign.spec import CampaignError


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "campaign",
        help="measure several modes, interleaved and repeated; the same command resumes",
        epilog="Ctrl-C once: stop after this run. Twice: stop now; that run is made again.",
    )
    parser.add_argument("file", type=Path, metavar="FILE", help="campaigns/NAME.yml")
    parser.add_argument(
        "--budget", metavar="TIME", help="as 6h or 90m: make the repetitions that fit, say what was left out"
    )
    parser.add_argument("--plan", action="store_true", help="show the runs and their order, and make none")
    parser.add_argument("--retry-failed", action="store_true", help="make runs again that failed or were not valid")
    parser.add_argument(
        "-i",
        "--inventory",
        action="append",
        default=[],
        metavar="INVENTORY",
        help="as of ansible-playbook; may be given again (default: $ANSIBLE_INVENTORY, else ansible.cfg's)",
    )
    parser.add_argument("--results", type=Path, default=Path("results"), help="(default: results)")
    parser.add_argument(
        "-e", "--extra", action="append", default=[], metavar="NAME=VALUE", help="passed on to bench.yml"
    )


def run(args: argparse.Namespace) -> int:
    try:
        return _run(args)
    except (CampaignError, BundleError) as error:
        print(f"servelab campaign: {error}", file=sys.stderr)
        return 2 if isinstance(error, CampaignError) else 1


def _run(args: argparse.Namespace) -> int:
    wanted = spec.read(args.file)
    budget = plan.seconds(args.budget) if args.budget else None
    if args.plan:
        return _show(wanted, budget)
    from servelab.campaign.runner import BenchRunner

    runner = BenchRunner(Path.cwd(), args.results, wanted, _extra(args.extra), args.inventory)
    directory = args.results / wanted.name
    directory.mkdir(parents=True, exist_ok=True)
    stop = Stop()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop.ask)
    with state.lease(args.results), (directory / "campaign.log").open("a") as log:

        def say(text: str) -> None:
            line = f"{datetime.datetime.now():%H:%M:%S} {text}"
            print(line, flush=True)
            print(line, file=log, flush=True)

        orphans.end(args.results, say)
        done = drive(wanted, args.results, runner, say, budget=budget, retry=args.retry_failed, stop=stop)
    counts = {status: sum(e["status"] == status for e in done.entries) for status in learn.OVER}
    say_counts = ", ".join(f"{count} {status}" for status, count in counts.items() if count)
    print(f"{wanted.name}: {say_counts or 'nothing measured'}, {len(done.waiting())} to go.")
    if counts["ok"] + counts["invalid"]:
        _report(directory, wanted)
    return 1 if counts["failed"] or counts["skipped"] or done.waiting() else 0


def _report(directory: Path, wanted: spec.Spec) -> None:
    from servelab import report

    try:
        html, text = report.write(directory, wanted.arms[0][0])
    except BundleError as error:
        print(f"No report yet: {error}")
        return
    print(text)
    print(f"Report: {html.resolve()}")


def _show(wanted: spec.Spec, budget: float | None) -> int:
    runs = plan.order(wanted)
    left: list[plan.Planned] = []
    each = plan.run_seconds(wanted)
    if budget is not None:
        runs, left = plan.fitting(wanted, runs, budget, each)
    for number, planned in enumerate(runs, 1):
        print(f"{number:3}  repetition {planned.repetition + 1}  seed {planned.seed}  {planned.arm}")
    print(f"{len(runs)} runs, about {plan.duration(each)} each (a guess), {plan.duration(len(runs) * each)} together.")
    if left:
        print(f"Left out for the budget: {len(left)} runs from repetition {left[0].repetition + 1} on.")
    return 0


def _extra(words: list[str]) -> dict[str, Any]:
    pairs = [word.partition("=") for word in words]
    if bad := [name for name, equals, _ in pairs if not equals or not name]:
        raise CampaignError(f"-e {bad[0]} is no NAME=VALUE.")
    return {name: value for name, _, value in pairs}
