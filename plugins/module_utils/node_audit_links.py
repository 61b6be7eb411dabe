"""The part of the audit that is about how the cards are reached: at boot, over PCIe, and from one card to another."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .node_facts import Finding, NodeFacts
from .topology import parse_topology

__all__ = [
    "at_boot",
    "bar1",
    "hmm",
    "links",
    "peer_mapping",
    "peer_status",
    "persistence",
    "power_saving",
    "redirects",
]

# A BAR1 somewhat smaller than the memory still maps nearly all of it; the one without Resizable BAR has 256 MiB.
_BAR1_SHARE = 0.9


def at_boot(facts: NodeFacts) -> Finding:
    """By effect and not by configuration: what was there when this boot's guests began to start?"""
    check, right = "nodes at boot", "the device nodes are there before pve-guests.service starts the guests"
    why = "a guest that starts at boot dies on a missing node, or gets a regular file in its place"
    if facts.boot is None:
        return Finding(check, "unknown", "when this boot's guests were started is not known", right, why)
    late = {name: seconds for name, seconds in facts.boot.items() if seconds > 0}
    if not late:
        return Finding(check, "ok", "they were there before the guests were started", right, why)
    slowest = max(late.values())
    found = f"{', '.join(sorted(late))} made up to {_seconds(slowest)} after the guests were started"
    remedy = (
        "have a unit make them at boot (pve_gpu_host_boot_unit=true); if somebody only made them anew since, "
        "nothing is wrong"
    )
    return Finding(check, "warn", found, right, why, remedy)


def persistence(facts: NodeFacts) -> Finding:
    check, right = "persistence", "persistence mode on every card"
    why = "without it the driver lets a card go with its last user, and every start of a server waits for it again"
    off = [str(n) for n, card in enumerate(facts.details) if card.persistence is False]
    if not facts.details or any(card.persistence is None for card in facts.details):
        return Finding(check, "unknown", "nvidia-smi does not tell", right, why)
    if off:
        remedy = "enable nvidia-persistenced, or let the boot unit do it (pve_gpu_host_boot_unit=true)"
        return Finding(check, "warn", f"off on GPU {', '.join(off)}", right, why, remedy)
    return Finding(check, "ok", f"on for {_cards(len(facts.details))}", right, why)


def links(facts: NodeFacts) -> Finding:
    """An idle card lets its link fall to generation 1, so a generation is judged only where the card works."""
    check, right = "PCIe link", "every card at its full width, and under load at its full generation"
    why = "half a link is half the speed of every copy between cards and to the host"
    known = [card for card in facts.details if card.link_width and card.link_width_max]
    if not known:
        return Finding(check, "unknown", "nvidia-smi does not tell", right, why)
    narrow, slow = [], []
    for number, card in enumerate(facts.details):
        if card.link_width and card.link_width_max and card.link_width < card.link_width_max:
            narrow.append(f"GPU {number} has x{card.link_width} of x{card.link_width_max}")
        working = card.performance_state in ("P0", "P1", "P2")
        if working and card.link_gen and card.link_gen_max and card.link_gen < card.link_gen_max:
            slow.append(f"GPU {number} works at generation {card.link_gen} of {card.link_gen_max}")
    if narrow or slow:
        remedy = (
            "reseat the card or its riser; see the slot's width, bifurcation and generation in the firmware's setup"
        )
        return Finding(check, "warn", "; ".join([*narrow, *slow]), right, why, remedy)
    widths = sorted({f"x{card.link_width}" for card in known})
    now = sorted({str(card.link_gen) for card in known if card.link_gen})
    most = sorted({str(card.link_gen_max) for card in known if card.link_gen_max})
    found = f"{', '.join(widths)}, generation {', '.join(now) or '?'} now and {', '.join(most) or '?'} at most"
    idle = "" if now == most else " (idle cards fall back; the P2P probe looks under load)"
    return Finding(check, "ok", found + idle, right, why)


def bar1(facts: NodeFacts) -> Finding:
    check, right = "BAR1", "as large as the card's memory (Resizable BAR)"
    why = "other cards reach only what BAR1 maps, and with a small one peer-to-peer goes through the host"
    known = [(n, card.bar1_mib, card.memory_mib) for n, card in enumerate(facts.details)]
    sizes = [(n, size, memory) for n, size, memory in known if size is not None and memory]
    if not sizes or len(sizes) < len(known):
        return Finding(check, "unknown", "nvidia-smi does not tell", right, why)
    small = [f"GPU {n} has {size} MiB for {memory} MiB" for n, size, memory in sizes if size < _BAR1_SHARE * memory]
    if small:
        remedy = "switch Above 4G Decoding and Resizable BAR on in the firmware's setup, and CSM off"
        return Finding(check, "warn", "; ".join(small), right, why, remedy)
    return Finding(check, "ok", f"{min(size for _n, size, _memory in sizes)} MiB or more on every card", right, why)


def peer_status(facts: NodeFacts) -> Finding:
    """What the driver says about P2P. It says OK where P2P hangs, too: that is the probe's to find."""
    check, right = "P2P status", "OK for reads and writes between all cards (`nvidia-smi topo -p2p r`, `w`)"
    why = "without it the cards exchange everything through host memory; with it, it still has to be proved"
    if not facts.peers.get("r") or not facts.peers.get("w"):
        alone = len(facts.gpus) == 1
        found = "there is one card only" if alone else "`nvidia-smi topo -p2p` shows no matrix"
        return Finding(check, "ok" if alone else "unknown", found, right, why)
    bad = [
        f"{word} for {kind} {_pairs(pairs)}"
        for kind, matrix in (("reads", facts.peers["r"]), ("writes", facts.peers["w"]))
        for word, pairs in _by_word(matrix).items()
    ]
    if bad:
        remedy = "switch Resizable BAR on, try pve_gpu_host_force_p2p=true, or serve with NCCL_P2P_DISABLE=1"
        return Finding(check, "warn", "; ".join(bad), right, why, remedy)
    found = "OK between all cards (says the driver; playbooks/validate.yml --tags p2p proves it)"
    return Finding(check, "ok", found, right, why)


def peer_mapping(facts: NodeFacts) -> Finding:
    check = "peer mapping"
    right = "ForceP2P in the driver's RegistryDwords, where cards without NVLink hang on different ports of the host"
    why = "kernels that reach into other cards (custom all-reduce) may otherwise go through host memory, far slower"
    topology = parse_topology(facts.topology or "")
    if topology.gpus and (topology.nvlink or not {"NODE", "PHB", "SYS"} & set(topology.links.values())):
        return Finding(check, "ok", "not needed between these cards", right, why)
    if facts.registry is None:
        return Finding(check, "unknown", "/proc/driver/nvidia/params cannot be read", right, why)
    if "ForceP2P=" in facts.registry:
        return Finding(check, "ok", facts.registry, right, why)
    remedy = "if the P2P probe finds pairs slow (playbooks/validate.yml --tags p2p), set pve_gpu_host_force_p2p=true"
    return Finding(check, "warn", facts.registry or "no RegistryDwords", right, why, remedy)


def redirects(facts: NodeFacts) -> Finding:
    check, right = "ACS", "no request or completion redirect on root and switch ports above the cards"
    why = "redirected peer traffic detours through the root complex, and hangs or is lost where the IOMMU translates it"
    known = [port for port in facts.ports if port.redirects is not None]
    if not facts.ports or not known:
        found = "no port above the cards is to be seen" if not facts.ports else "no port above the cards shows ACS"
        return Finding(check, "unknown" if not facts.ports else "ok", found, right, why)
    on = [f"{port.address} ({', '.join(port.redirects or ())})" for port in known if port.redirects]
    if on:
        shown = ", ".join(on[:4]) + (f" and {len(on) - 4} more" if len(on) > 4 else "")
        remedy = "let a unit clear them at every boot (pve_gpu_host_acs=true)"
        return Finding(check, "warn", f"on at {shown}", right, why, remedy)
    return Finding(check, "ok", f"off on all {len(known)} ports that have it", right, why)


def hmm(facts: NodeFacts) -> Finding:
    check, right = "HMM", "off (nvidia_uvm's parameter uvm_disable_hmm=1)"
    why = "with it the driver takes part in the kernel's memory management, reported to slow or hang peer-to-peer"
    if facts.hmm_disabled is None:
        return Finding(check, "unknown", "/sys/module/nvidia_uvm/parameters/uvm_disable_hmm cannot be read", right, why)
    if facts.hmm_disabled:
        return Finding(check, "ok", "off", right, why)
    return Finding(check, "warn", "on", right, why, "set pve_gpu_host_disable_hmm=true")


def power_saving(facts: NodeFacts) -> Finding:
    check, right = "ASPM", "off on the cards' links and the ports above them"
    why = "a link that wakes up first adds its time to every small transfer"
    seen = [port for port in [*facts.cards, *facts.ports] if port.aspm is not None]
    on = [f"{port.address} ({port.aspm})" for port in seen if port.aspm != "off"]
    remedy = "add pcie_aspm=off to pve_gpu_host_kernel_options"
    if on:
        shown = ", ".join(on[:4]) + (f" and {len(on) - 4} more" if len(on) > 4 else "")
        return Finding(check, "warn", f"on at {shown}", right, why, remedy)
    if seen:
        return Finding(check, "ok", f"off on {len(seen)} devices", right, why)
    if "pcie_aspm=off" in (facts.cmdline or "").split():
        return Finding(check, "ok", "pcie_aspm=off on the kernel command line", right, why)
    match = re.search(r"\[(\w+)\]", facts.aspm_policy or "")
    found = f"no link is to be seen; the kernel's policy is {match[1]}" if match else "no link is to be seen"
    return Finding(check, "unknown", found, right, why)


def _by_word(matrix: Mapping[tuple[int, int], str]) -> dict[str, list[tuple[int, int]]]:
    words: dict[str, list[tuple[int, int]]] = {}
    for pair, word in sorted(matrix.items()):
        if word != "OK":
            words.setdefault(word, []).append(pair)
    return words


def _pairs(pairs: Sequence[tuple[int, int]]) -> str:
    shown = ", ".join(f"{a}→{b}" for a, b in pairs[:6])
    return shown + (f" and {len(pairs) - 6} more" if len(pairs) > 6 else "")


def _cards(count: int) -> str:
    return "the card" if count == 1 else f"all {count} cards"


def _seconds(seconds: float) -> str:
    return (
        f"{seconds:.0f} s"
        if seconds < 120
        else f"{seconds / 60:.0f} min"
        if seconds < 7200
        else f"{seconds / 3600:.0f} h"
    )
