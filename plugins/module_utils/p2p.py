"""Judge what the P2P probe measured: which pairs of cards work, which are staged through host memory, which are broken.

The probe (roles/gpu_p2p/files/p2p) only measures; what is good enough is decided here.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

__all__ = ["Judgement", "PairVerdict", "judge", "parse_report"]

SCHEMA = "servelab.p2p/1"
Verdict = Literal["ok", "slow", "broken", "unknown"]
_ORDER: tuple[Verdict, ...] = ("broken", "slow", "unknown", "ok")

# A transfer that goes straight from card to card is about as fast as the slower of the two host links. One that the
# driver stages in host memory crosses a link twice and reaches half of it at best; a kernel's loads wait for every
# answer and get less.
STAGED_SHARE = {"copy": 0.4, "store": 0.4, "load": 0.2}
# A dependent load from the other card takes 1 to 4 µs over PCIe; one that is staged takes many times that.
SLOW_LATENCY_US = 10.0

_NODE = (
    "on the node boot with iommu=pt (or the IOMMU off) and clear the ACS redirects (pve_gpu_host_acs=true), then probe "
    "again; until then serve with NCCL_P2P_DISABLE=1 and without custom all-reduce"
)
_FORCE = (
    "let the driver offer it (pve_gpu_host_force_p2p=true, large BAR1), then probe again; until then modes with custom "
    "all-reduce cannot work between them, and NCCL may be faster with NCCL_P2P_DISABLE=1: measure both"
)
_LINK = (
    "compare link width and generation (`nvidia-smi -q`, the node's audit), let the driver map peers directly "
    "(pve_gpu_host_force_p2p=true), then probe again; until then measure with NCCL_P2P_DISABLE=1 too"
)


@dataclass(frozen=True)
class PairVerdict:
    """`source` reaches into the memory of `target`. reason: a phrase, empty for "ok"; remedy: None for "ok"."""

    source: int
    target: int
    verdict: Verdict
    reason: str = ""
    remedy: str | None = None
    gb_s: float | None = None
    latency_us: float | None = None


@dataclass
class Judgement:
    """status: the worst verdict; problems: sentences, each with its remedy; table: lines for a person."""

    status: Verdict = "unknown"
    pairs: list[PairVerdict] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)
    table: list[str] = field(default_factory=list)


def parse_report(text: str) -> dict[str, Any]:
    """The probe's JSON object. Raises ValueError, a sentence, for anything else."""
    try:
        report = json.loads(text)
    except ValueError:
        report = None
    if not isinstance(report, dict) or report.get("schema") != SCHEMA:
        said = text.strip()[:200] or "nothing"
        raise ValueError(f"The P2P probe did not print its report ({SCHEMA}) but: {said}")
    return report


def judge(report: Mapping[str, Any]) -> Judgement:
    """Judge a report that has pairs."""
    links = {entry["gpu"]: entry["measured"] for entry in report.get("host", []) if entry.get("state") == "done"}
    judged = Judgement(pairs=[_pair(entry, links) for entry in report.get("pairs", [])])
    ways = report.get("all_reduce", [])
    verdicts = [pair.verdict for pair in judged.pairs]
    for sentence in _links(links):
        verdicts.append("slow")
        judged.problems.append(sentence)
    offered = all((entry.get("measured") or {}).get("advertised", True) for entry in report.get("pairs", []))
    for verdict, reason, remedy in _grouped(judged.pairs):
        named = _names(
            [pair for pair in judged.pairs if (pair.verdict, pair.reason, pair.remedy) == (verdict, reason, remedy)]
        )
        judged.problems.append(f"P2P between GPUs {named} is {verdict}: {reason}. Remedy: {remedy}.")
    for entry in ways:
        sentence, verdict = _all_reduce(entry, ways, offered)
        if verdict in ("broken", "unknown"):
            verdicts.append(verdict)
            judged.problems.append(sentence)
        else:
            judged.notices.append(sentence)
    judged.status = next((verdict for verdict in _ORDER if verdict in verdicts), "unknown")
    judged.table = _table(judged)
    return judged


def _pair(entry: Mapping[str, Any], links: Mapping[int, Mapping[str, float]]) -> PairVerdict:
    source, target = int(entry["from"]), int(entry["to"])
    state, measured = entry.get("state"), entry.get("measured") or {}

    def verdict(name: Verdict, reason: str, remedy: str) -> PairVerdict:
        return PairVerdict(
            source, target, name, reason, remedy, measured.get("copy_gb_s"), measured.get("load_latency_us")
        )

    if state == "not_run":
        return verdict("unknown", str(entry.get("error", "it was not tried")), "reboot the node, then probe again")
    if state == "hung":
        return verdict("broken", f"a transfer never ended ({entry.get('error')})", _NODE)
    if state != "done":
        return verdict("broken", f"it ended in an error ({entry.get('error')})", _NODE)
    wrong = [kind for kind in ("copy", "store", "load") if measured.get(f"{kind}_wrong_words")]
    if wrong:
        return verdict("broken", f"other data arrive than were sent (by {' and '.join(wrong)})", _NODE)
    if not measured.get("advertised"):
        return verdict("slow", "the driver offers no peer access, so copies are staged through host memory", _FORCE)
    # What leaves a card by a copy or a store enters the other one; a load goes the other way round.
    push = _slower(links, source, target)
    pull = _slower(links, target, source)
    for kind, reference in (("copy", push), ("store", push), ("load", pull)):
        rate = measured.get(f"{kind}_gb_s")
        if reference and rate is not None and rate < STAGED_SHARE[kind] * reference:
            share = f"{kind} by far below the host links, as if staged through host memory"
            return verdict("slow", share, _LINK)
    latency = measured.get("load_latency_us")
    if latency is not None and latency > SLOW_LATENCY_US:
        return verdict("slow", f"a load from the other card takes more than {SLOW_LATENCY_US:g} µs", _LINK)
    return PairVerdict(source, target, "ok", "", None, measured.get("copy_gb_s"), latency)


def _slower(links: Mapping[int, Mapping[str, float]], sender: int, receiver: int) -> float | None:
    rates = [(links.get(sender) or {}).get("to_host_gb_s"), (links.get(receiver) or {}).get("from_host_gb_s")]
    known = [rate for rate in rates if rate]
    return min(known) if len(known) == len(rates) else None


def _all_reduce(entry: Mapping[str, Any], ways: Sequence[Mapping[str, Any]], offered: bool) -> tuple[str, Verdict]:
    measured = entry.get("measured") or {}
    what = f"All-reduce over {entry.get('way')}"
    if measured.get("bytes"):
        what += f", {int(measured['bytes']) // 1024} KiB"
    if entry.get("state") == "done" and not measured.get("late_gpus") and not measured.get("wrong_words"):
        return f"{what}: {measured['us']:.1f} µs", "ok"
    if entry.get("way") == "peer memory" and not offered:
        return f"{what} was not possible: some pairs have no peer access.", "slow"
    if entry.get("state") == "not_run":
        return f"{what} was not tried: {entry.get('error')}.", "unknown"
    if measured.get("late_gpus"):
        fault = f"{measured['late_gpus']} GPUs waited in vain for the others"
    elif measured.get("wrong_words"):
        fault = "the sums are wrong"
    else:
        fault = str(entry.get("error", "it failed"))
    remedy = _NODE
    if entry.get("way") == "NCCL":
        without = next((way for way in ways if way.get("way") == "NCCL, P2P off"), {})
        if without.get("state") == "done" and not (without.get("measured") or {}).get("wrong_words"):
            remedy = f"NCCL_P2P_DISABLE=1 works here; for more speed, {_NODE.split(', then')[0]}"
    return f"{what} is broken: {fault}. Remedy: {remedy}.", "broken"


def _links(links: Mapping[int, Mapping[str, Any]]) -> list[str]:
    """Links that were below their best while the card worked. "32.0 GT/s PCIe" and "16", as the kernel shows them."""
    sentences = []
    for gpu, seen in links.items():
        now, most = (_figure(seen.get(f"{when}_link_speed")) for when in ("current", "max"))
        narrow, wide = (_figure(seen.get(f"{when}_link_width")) for when in ("current", "max"))
        if (now and most and now < most) or (narrow and wide and narrow < wide):
            sentences.append(
                f"The PCIe link of GPU {gpu} runs at {now:g} GT/s x{narrow:g} under load, and can {most:g} GT/s "
                f"x{wide:g}. Remedy: reseat the card or its riser; see the slot in the firmware's setup."
            )
    return sentences


def _figure(text: Any) -> float:
    match = re.match(r"\d+(\.\d+)?", str(text or ""))
    return float(match[0]) if match else 0.0


def _grouped(pairs: Sequence[PairVerdict]) -> list[tuple[Verdict, str, str | None]]:
    """What is wrong, each once, the worst first."""
    kinds = dict.fromkeys((pair.verdict, pair.reason, pair.remedy) for pair in pairs if pair.verdict != "ok")
    return sorted(kinds, key=lambda kind: _ORDER.index(kind[0]))


def _names(pairs: Sequence[PairVerdict]) -> str:
    """Pairs that are bad in both directions are named once."""
    both = {(pair.source, pair.target) for pair in pairs}
    named = []
    for source, target in sorted(both):
        if (target, source) in both:
            if source < target:
                named.append(f"{source}↔{target}")
        else:
            named.append(f"{source}→{target}")
    return ", ".join(named)


def _table(judged: Judgement) -> list[str]:
    """A row for each card that reaches, a column for each that is reached: verdict, and GB/s where data arrive."""
    cards = sorted({pair.source for pair in judged.pairs} | {pair.target for pair in judged.pairs})
    cells = {
        (pair.source, pair.target): pair.verdict
        + (f" {pair.gb_s:.1f}" if pair.gb_s is not None and pair.verdict in ("ok", "slow") else "")
        for pair in judged.pairs
    }
    width = max([len("from\\to"), *map(len, cells.values())]) + 2
    lines = ["".join(f"{text:<{width}}" for text in ["from\\to", *(f"GPU{card}" for card in cards)]).rstrip()]
    for source in cards:
        row = [f"GPU{source}", *(cells.get((source, target), "-") for target in cards)]
        lines.append("".join(f"{text:<{width}}" for text in row).rstrip())
    return [*lines, "(GB/s of a copy)", *judged.notices, *judged.problems]
