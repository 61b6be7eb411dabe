"""The report of a campaign: one self-contained HTML file, the same as Markdown, the charts as PNG. The answer first."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servelab.bundle import Bundle, BundleError
from servelab.compare import adaptive, answer, deploy, guard, pairs, words
from servelab.compare.answer import Comparison


def write(campaign: Path, base: str = "baseline", *, forced: bool = False) -> tuple[Path, str]:
    """Write report.html, report.md and the charts into *campaign*; return the HTML file's path and the Markdown text.

    Raises BundleError when there are not two measured modes to compare.
    """
    comparisons = answer.compare_all(pairs.of_campaign(campaign, base), forced=forced)
    derived = pairs.derived(campaign)
    run_what = deployment(comparisons, derived, _recommended(campaign, comparisons, derived))
    text = markdown(campaign.name, comparisons, run_what)
    (campaign / "report.md").write_text(text)
    (campaign / "routes.json").write_text(json.dumps(deploy.routes(comparisons), indent=1) + "\n")
    html = campaign / "report.html"
    html.write_text(_html(campaign, comparisons, run_what))
    return html, text


def deployment(
    comparisons: list[Comparison], derived: Mapping[str, Mapping[str, Any]], recommended: Sequence[str] = ()
) -> list[str]:
    """Which mode to run at which load, and what an adaptive mode is worth: sentences. Empty where the only comparison's
    headline says it all."""
    said = deploy.hint(comparisons) if len(comparisons) > 1 or derived or recommended else []
    for mode, made in derived.items():
        sound = [c for c in comparisons if not c.refused or c.forced]
        if any(c.other == mode for c in sound):
            said += deploy.judgement(sound, mode, str(made["from"]))
        says = " ".join(map(str, made["says"]))
        said.append(f"{mode} was set up while the campaign ran. {says} {json.dumps(made['document'])}")
        source = next((c for c in sound if c.other == made["from"]), None)
        said += _would_be(mode, made, source) if source else []
    return [*said, *recommended]


def _would_be(mode: str, made: Mapping[str, Any], source: Comparison) -> list[str]:
    """What all repetitions together would have made of it."""
    try:
        now = adaptive.derive(source)
    except adaptive.NotAdaptable as why:
        return [f"By all repetitions together {mode} has nothing to adapt: {why}"]
    if now.document == made["document"]:
        return ["All repetitions together give the same configuration."]
    return [f"All repetitions together give key {now.key} in place of {made['key']}: {json.dumps(now.document)}"]


def _recommended(campaign: Path, comparisons: list[Comparison], derived: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Write the adaptive configuration that a crossover makes possible and that this campaign did not measure."""
    said = []
    for c in comparisons:
        args = (c.pairs[0][1].provenance.get("mode") or {}).get("args") or {} if c.pairs else {}
        chain = args.get("speculative_eagle_topk") in (None, 1)
        if c.other in {made["from"] for made in derived.values()} or not chain or args.get("speculative_adaptive"):
            continue
        if args.get("speculative_algorithm") not in ("EAGLE", "EAGLE3"):
            continue
        try:
            found = adaptive.derive(c)
        except adaptive.NotAdaptable:
            continue  # the comparison's own headline says what to run
        path = campaign / f"adaptive-{c.other}.json"
        path.write_text(json.dumps(found.document, indent=1) + "\n")
        said.append(
            f"One server for every load, not measured yet: SGLang's adaptive speculation with {path.name} "
            f"({json.dumps(found.document)}). {' '.join(found.says)} Measure it: docs/modes.md."
        )
    return said


def markdown(name: str, comparisons: list[Comparison], run_what: Sequence[str] = ()) -> str:
    """Every comparison of the campaign as Markdown that pastes into an issue."""
    parts = [f"# {name}{' (simulated)' if _simulated(comparisons) else ''}"]
    if run_what:
        parts += ["## Which mode at which load", "\n".join(f"- {sentence}" for sentence in run_what)]
    parts += [f"## {c.other} against {c.base}\n\n{words.text(c)}" for c in comparisons]
    return "\n\n".join(parts) + "\n"


def _html(campaign: Path, comparisons: list[Comparison], run_what: Sequence[str]) -> str:
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
    simulated = _simulated(comparisons)
    return page.render(name=campaign.name, sections=sections, simulated=simulated, run_what=run_what) + "\n"


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
