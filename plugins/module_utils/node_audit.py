"""What is right and wrong with a node that gives its GPUs away.

Facts are gathered elsewhere and only judged here. Each finding says what was found, what is right, why it matters
and the one remedy. What could not be looked at is "unknown", never "ok".
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from .driver_version import parse_kernel_driver, version_tuple
from .node_audit_links import at_boot, bar1, hmm, links, peer_mapping, peer_status, persistence, power_saving, redirects
from .node_facts import Expected, Finding, NodeFacts, Status
from .topology import parse_topology

__all__ = ["Expected", "Finding", "NodeFacts", "audit", "overall", "table"]

CONTROL_NODES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")


def audit(facts: NodeFacts, expected: Expected) -> list[Finding]:
    """Judge the node. Always the same checks in the same order."""
    return [
        _driver(facts, expected),
        _flavour(facts),
        _device_nodes(facts),
        at_boot(facts),
        _gpus(facts, expected),
        persistence(facts),
        links(facts),
        bar1(facts),
        _topology(facts),
        peer_status(facts),
        peer_mapping(facts),
        _iommu(facts),
        redirects(facts),
        hmm(facts),
        power_saving(facts),
    ]


def overall(findings: Sequence[Finding]) -> Status:
    """The worst status; "unknown" counts as little as "ok" as long as something else is known."""
    seen = {finding.status for finding in findings}
    return "fail" if "fail" in seen else "warn" if "warn" in seen else "ok" if "ok" in seen else "unknown"


def table(findings: Sequence[Finding]) -> list[str]:
    """Lines for a person: one per finding, and below what is not well what is right, why, and the remedy."""
    width = max((len(finding.check) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.status.upper():<8}{finding.check:<{width}}  {finding.found}")
        if finding.status in ("warn", "fail"):
            indent = " " * (8 + width + 2)
            lines += [f"{indent}right:  {finding.right}", f"{indent}why:    {finding.why}"]
            if finding.remedy:
                lines.append(f"{indent}remedy: {finding.remedy}")
    return lines


def as_dicts(findings: Sequence[Finding]) -> list[dict[str, Any]]:
    return [asdict(finding) for finding in findings]


def _driver(facts: NodeFacts, expected: Expected) -> Finding:
    right = f"{expected.minimum_driver} or newer"
    why = "an older kernel driver cannot run programs of the CUDA 13.0 toolchain"
    driver = parse_kernel_driver(facts.driver or "")
    if driver is None:
        found = "no driver is loaded (/proc/driver/nvidia/version is missing or names no version)"
        return Finding(
            "kernel driver", "fail", found, right, why, "install the driver on the node, then `modprobe nvidia`"
        )
    if version_tuple(driver.version) < version_tuple(expected.minimum_driver):
        remedy = (
            f"install the driver {expected.minimum_driver} or newer on the node, and the same version in its guests"
        )
        return Finding("kernel driver", "fail", driver.version, right, why, remedy)
    return Finding("kernel driver", "ok", driver.version, right, why)


def _flavour(facts: NodeFacts) -> Finding:
    right = "open kernel modules"
    why = "Blackwell cards work with the open modules only"
    driver = parse_kernel_driver(facts.driver or "")
    if driver is None:
        return Finding("driver flavour", "unknown", "no driver is loaded", right, why)
    if driver.open_flavour:
        return Finding("driver flavour", "ok", "open kernel modules", right, why)
    blackwell = any("blackwell" in str(gpu.get("name", "")).lower() for gpu in facts.gpus)
    remedy = "install the open flavour of the same version (`--kernel-module-type=open`)"
    return Finding("driver flavour", "fail" if blackwell else "warn", "proprietary kernel modules", right, why, remedy)


def _device_nodes(facts: NodeFacts) -> Finding:
    right = "nvidia0…, nvidiactl, nvidia-uvm and nvidia-uvm-tools are character devices before any guest starts"
    why = (
        "a guest's start dies on a missing node, and without nvidia-uvm CUDA gives error 999 although nvidia-smi works"
    )
    remedy = (
        "run `nvidia-modprobe -c=0 -u` on the node, and have a unit ordered before pve-guests.service do it at boot"
    )
    cards = [name for name, kind in facts.nodes.items() if re.fullmatch(r"nvidia\d+", name) and _is_device(kind)]
    missing = [name for name in CONTROL_NODES if name not in facts.nodes]
    if not cards:
        missing.insert(0, "nvidia0")
    wrong = [f"{name} is a {kind}" for name, kind in sorted(facts.nodes.items()) if not _is_device(kind)]
    if wrong:
        remedy = "delete what is no device, then " + remedy
    if missing or wrong:
        found = "; ".join([f"missing: {', '.join(missing)}"] * bool(missing) + wrong)
        return Finding("device nodes", "fail", found, right, why, remedy)
    return Finding("device nodes", "ok", f"{len(cards)} cards and {', '.join(CONTROL_NODES)}", right, why)


def _gpus(facts: NodeFacts, expected: Expected) -> Finding:
    right = "as many as the inventory says" if expected.gpus is None else f"{expected.gpus} GPUs"
    why = "a card that fell off the bus changes every result, and a tensor-parallel server does not start without it"
    if facts.diagnosis is not None and not facts.gpus:
        cause = facts.diagnosis.get("cause", "nvidia-smi gave no table")
        return Finding("GPUs", "fail", cause, right, why, facts.diagnosis.get("remedy"))
    found = _count_by_kind(facts.gpus)
    remedy = (
        "look for Xid messages in `dmesg` and for the card in `lspci -d 10de:`; a power cycle brings back a lost one"
    )
    if expected.gpus is not None and len(facts.gpus) != expected.gpus:
        if len(facts.gpus) > expected.gpus:
            remedy = f"set pve_gpu_host_expected_gpus to {len(facts.gpus)} if the cards were added on purpose"
        return Finding("GPUs", "fail", found, right, why, remedy)
    if expected.uuids is not None:
        present = {str(gpu.get("uuid")) for gpu in facts.gpus}
        gone, new = sorted(set(expected.uuids) - present), sorted(present - set(expected.uuids))
        if gone or new:
            parts = [f"missing {', '.join(gone)}"] * bool(gone) + [f"unexpected {', '.join(new)}"] * bool(new)
            remedy = "correct pve_gpu_host_expected_uuids if cards were exchanged on purpose"
            return Finding("GPUs", "fail", f"{found}; {'; '.join(parts)}", "the UUIDs of the inventory", why, remedy)
    ill = [f"GPU {gpu.get('index')}: {gpu['health']}" for gpu in facts.gpus if gpu.get("health") not in (None, "ok")]
    if ill:
        remedy = (
            "look for Xid messages in `dmesg`; reset the card (`nvidia-smi --gpu-reset -i N`) while nothing uses it"
        )
        return Finding("GPUs", "fail", f"{found}; {', '.join(ill)}", right, why, remedy)
    unknown = [str(gpu.get("index")) for gpu in facts.gpus if gpu.get("memory_total_mib") is None]
    if unknown:
        remedy = "look at `nvidia-smi -q` for the card; it may need a reset (`nvidia-smi --gpu-reset -i N`)"
        return Finding("GPUs", "warn", f"{found}; GPU {', '.join(unknown)} tells no memory size", right, why, remedy)
    if expected.gpus is None:
        return Finding("GPUs", "ok", f"{found} (pve_gpu_host_expected_gpus is not set)", right, why)
    return Finding("GPUs", "ok", found, right, why)


def _topology(facts: NodeFacts) -> Finding:
    right = "known, so that results of other machines are not expected of this one"
    why = "a tensor-parallel group that crosses sockets without NVLink pays for it in every all-reduce"
    topology = parse_topology(facts.topology or "")
    if not topology.gpus:
        return Finding("topology", "unknown", "`nvidia-smi topo -m` shows no matrix", right, why)
    return Finding("topology", "ok", topology.describe(), right, why)


def _iommu(facts: NodeFacts) -> Finding:
    right = "iommu=pt, or the IOMMU off"
    why = "with translation on, peer-to-peer copies between cards detour through the root complex, or hang NCCL"
    remedy = "add iommu=pt to the kernel command line and reboot, then test P2P; or run with NCCL_P2P_DISABLE=1"
    if facts.iommu_types:
        translated = sorted({kind for kind in facts.iommu_types if kind != "identity"})
        if translated:
            found = f"the cards' IOMMU groups are of type {', '.join(translated)}"
            return Finding("IOMMU", "warn", found, right, why, remedy)
        return Finding("IOMMU", "ok", "the cards' IOMMU groups pass through (identity)", right, why)
    if facts.cmdline is None:
        return Finding("IOMMU", "unknown", "/proc/cmdline cannot be read", right, why)
    words = facts.cmdline.split()
    options = [
        word for word in words if re.match(r"^(iommu|intel_iommu|amd_iommu|pcie_acs_override)=|^pci=.*acs", word)
    ]
    shown = " ".join(options) or "no IOMMU option on the kernel command line"
    if "iommu=pt" in words or {"iommu=off", "intel_iommu=off", "amd_iommu=off"} & set(words):
        return Finding("IOMMU", "ok", shown, right, why)
    if "intel_iommu=on" in words or "amd_iommu=on" in words:
        return Finding("IOMMU", "warn", shown, right, why, remedy)
    # Whether it is on by default depends on the CPU and the firmware, and there is no IOMMU group to ask.
    return Finding("IOMMU", "unknown", f"{shown}, and the cards show no IOMMU group", right, why)


def _is_device(kind: str) -> bool:
    return kind == "character device"


def _count_by_kind(gpus: Sequence[Mapping[str, Any]]) -> str:
    kinds = Counter((str(gpu.get("name") or "unknown name"), gpu.get("memory_total_mib")) for gpu in gpus)
    named = [f"{n} x {name}" + (f" ({memory} MiB)" if memory else "") for (name, memory), n in kinds.items()]
    return ", ".join(named) or "none"
