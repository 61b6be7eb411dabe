"""The report of a campaign: one self-contained HTML file, the same as Markdown, the charts as PNG. The answer first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servelab.bundle import Bundle, BundleError
from servelab.compare import answer, guard, pairs, words
from servelab.compare.answer import Comparison


def write(campaign: Path, base: str = "baseline", *, forced: bool = False) -> tuple[Path, str]:
    """Write report.html, report.md and the charts into *campaign*; return the HTML file's path and the Markdown text.

    Raises BundleError when there are not two measured modes to compare.
    """
    comparisons = answer.compare_all(pairs.of_campaign(campaign, base), forced=forced)
    text = markdown(campaign.name, comparisons)
    (campaign / "report.md").write_text(text)
    html = campaign / "report.html"
    html.write_text(_html(campaign, comparisons))
    return html, text


def markdown(name: str, comparisons: list[Comparison]) -> str:
    """Every comparison of the campaign as Markdown that pastes into an issue."""
    parts = [f"# {name}{' (simulated)' if _simulated(comparisons) else ''}"]
    parts += [f"## {c.other} against {c.base}\n\n{words.text(c)}" for c in comparisons]
    return "\n\n".join(parts) + "\n"


def _html(campaign: Path, comparisons: list[Comparison]) -> str:
    # Imported here: the client's wheel is the same package, and a guest has neither of the two.
    from jinja2 import Environment, PackageLoader, select_autoescape

    environment = Environment(
        loader=PackageLoader("servelab.report"),
        autoescape=select_autoescape(["html.j2"]),
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html.j2")
    sections = [_section(campaign, comparison) for comparison in comparisons]
    return page.render(name=campaign.name, sections=sections, simulated=_simulated(comparisons)) + "\n"


def _section(campaign: Path, c: Comparison) -> dict[str, Any]:
    return {
        "title": f"{c.other} against {c.base}",
        "headline": None if c.refused and not c.forced else words.verdict(c),
        "refused": c.refused,
        "notes": words.qualifications(c),
        "why": words.why(c),
        "rows": [
            {
                "c": row.concurrency,
                "base": words.number(row.base, 1),
                "other": words.number(row.other, 1),
                "ratio": words.interval(row.ratio),
                "step": words.number(row.other_step_ms, 1),
                "accept": words.number(row.accept_length, 2),
                "words": words.words(c, row),
            }
            for row in c.rows
        ],
        "base": c.base,
        "other": c.other,
        "charts": _charts(campaign, c),
        "runs": [_provenance(i, run) for i, both in enumerate(c.pairs, 1) for run in both],
        "facts": _facts(c.runs),
        "campaign": campaign.name,
    }


def _charts(campaign: Path, c: Comparison) -> list[dict[str, str]]:
    from servelab.report import chart

    found = []
    for name, title, told, figure in chart.draw(c):
        chart.png(figure, campaign / f"report-{c.other}-{name}.png".replace(" ", "-"))
        found.append({"title": title, "told": told, "svg": chart.svg(figure)})
    return found


def _simulated(comparisons: list[Comparison]) -> dict[str, Any] | None:
    return next((c.simulated for c in comparisons if c.simulated), None)


def _provenance(repetition: int, run: Bundle) -> dict[str, Any]:
    workload = dict((run.summary or {}).get("workload", {}))
    levels = ",".join(str(c) for c in answer.levels_of(run))
    again = f"ansible-playbook bench.yml -e mode={run.mode} -e campaign={run.run.get('campaign')} -e levels={levels}"
    if "seed" in workload:
        again += f" -e bench_seed={workload['seed']}"
    return {
        "repetition": repetition,
        "mode": run.mode,
        "bundle": run.path.name,
        "started": run.run.get("started") or "unknown",
        "status": run.run["status"],
        "seed": workload.get("seed"),
        "command": again,
    }


def _facts(runs: list[Bundle]) -> list[tuple[str, str]]:
    """What all runs share, or each value that there is: (what, value)."""
    workload = [key for run in runs for key in (run.summary or {}).get("workload", {}) if key != "seed"]
    asked = [
        *((what, read) for what, read in guard.MACHINE),
        ("the KV pool (tokens)", guard.kv_tokens),
        ("the memory fraction", guard.memory_fraction),
        ("the state of the all-reduce patch", guard.patched),
        ("the operating system of the guest", guard.provenance("guest", "os")),
        ("the GPUs", guard.gpus("name")),
        ("the sources", guard.provenance("controller", "git")),
        *((f"workload: {key}", guard.summary("workload", key)) for key in dict.fromkeys(workload)),
    ]
    found = []
    for what, read in asked:
        values = dict.fromkeys("unknown" if value is None else str(value) for value in map(read, runs))
        found.append((what, "; ".join(values)))
    return found


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("report", help="write a campaign's report and print its tables and verdicts")
    parser.add_argument("campaign", type=Path, metavar="CAMPAIGN_DIR")
    parser.add_argument("--base", default="baseline", help="the mode the others are compared with (default: baseline)")
    parser.add_argument(
        "--force", action="store_true", help="give a headline for runs that cannot be compared, with the reasons"
    )


def run(args: argparse.Namespace) -> int:
    try:
        html, text = write(args.campaign, args.base, forced=args.force)
    except BundleError as error:
        print(f"servelab report: {error}", file=sys.stderr)
        return 1
    print(text)
    print(f"Report: {html.resolve()}")
    return 0
