"""The report of a campaign: one self-contained HTML file and the same as Markdown, the answer first."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from servelab.bundle import Bundle, BundleError
from servelab.compare import answer, pairs, words
from servelab.compare.answer import Comparison


def write(campaign: Path, base: str = "baseline", *, forced: bool = False) -> tuple[Path, str]:
    """Write report.html and report.md into *campaign*; return the HTML file's path and the Markdown text.

    Raises BundleError when there are not two measured modes to compare.
    """
    comparisons = answer.compare_all(pairs.of_campaign(campaign, base), forced=forced)
    text = markdown(campaign.name, comparisons)
    (campaign / "report.md").write_text(text)
    html = campaign / "report.html"
    html.write_text(_html(campaign.name, comparisons))
    return html, text


def markdown(name: str, comparisons: list[Comparison]) -> str:
    """Every comparison of the campaign as Markdown that pastes into an issue."""
    parts = [f"# {name}{' (simulated)' if _simulated(comparisons) else ''}"]
    parts += [f"## {c.other} against {c.base}\n\n{words.text(c)}" for c in comparisons]
    return "\n\n".join(parts) + "\n"


def _html(name: str, comparisons: list[Comparison]) -> str:
    # Imported here: the client's wheel is the same package, and a guest has neither of the two.
    from jinja2 import Environment, PackageLoader, select_autoescape

    from servelab.report import chart

    environment = Environment(loader=PackageLoader("servelab.report"), autoescape=select_autoescape(["html.j2"]))
    sections = [
        {
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
                    "accept": words.number(row.accept_length, 2),
                    "words": words.words(c, row),
                }
                for row in c.rows
            ],
            "base": c.base,
            "other": c.other,
            "chart": chart.svg(c),
            "runs": [_provenance(run) for run in c.runs],
        }
        for c in comparisons
    ]
    page = environment.get_template("report.html.j2")
    return page.render(name=name, sections=sections, simulated=_simulated(comparisons))


def _simulated(comparisons: list[Comparison]) -> dict[str, Any] | None:
    return next((c.simulated for c in comparisons if c.simulated), None)


def _provenance(arm: Bundle) -> dict[str, Any]:
    summary = arm.summary or {}
    return {
        "mode": arm.mode,
        "bundle": arm.path.name,
        "started": arm.run.get("started"),
        "sglang": summary.get("server", {}).get("sglang_version"),
        "model": summary.get("server", {}).get("model"),
        "workload": summary.get("workload", {}),
        "command": f"ansible-playbook bench.yml -e mode={arm.mode} -e campaign={arm.run.get('campaign')}",
    }


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
