"""The audit of a node: hand-made nodes, each with one thing wrong, and the finding that must come of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servelab.shared.node_audit import Expected, Finding, NodeFacts, audit, overall, table

NODES = dict.fromkeys(("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"), "character device")
CARD = {"index": 0, "uuid": "GPU-a", "name": "NVIDIA RTX PRO 6000 Blackwell", "memory_total_mib": 97887, "health": "ok"}
GOOD = NodeFacts(
    driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x@y)\n",
    nodes=NODES,
    gpus=[CARD, {**CARD, "index": 1, "uuid": "GPU-b"}],
    topology="\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\t X \t8-15\t1\n",
    cmdline="BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet amd_iommu=on iommu=pt",
)
EXPECTED = Expected(gpus=2, uuids=["GPU-a", "GPU-b"])


def finding(facts: NodeFacts, check: str, expected: Expected = EXPECTED) -> Finding:
    return next(f for f in audit(facts, expected) if f.check == check)


def test_a_good_node_is_good_in_every_respect() -> None:
    findings = audit(GOOD, EXPECTED)
    assert [f.status for f in findings] == ["ok"] * 6
    assert overall(findings) == "ok"
    text = "\n".join(table(findings))
    assert "TP=2 crosses NUMA (SYS)" in text
    assert "2 x NVIDIA RTX PRO 6000 Blackwell (97887 MiB)" in text
    assert "remedy" not in text


@pytest.mark.parametrize(
    ("change", "check", "status", "found"),
    [
        ({"driver": None}, "kernel driver", "fail", "no driver is loaded"),
        (
            {"driver": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.124.06  Release Build\n"},
            "kernel driver",
            "fail",
            "570.124.06",
        ),
        (
            {"driver": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.95.05  Sun May 12 19:39:15 UTC 2026\n"},
            "driver flavour",
            "fail",  # the cards are Blackwell
            "proprietary",
        ),
        ({"nodes": {**NODES, "nvidia-uvm": "regular file"}}, "device nodes", "fail", "nvidia-uvm is a regular file"),
        (
            {"nodes": {k: v for k, v in NODES.items() if k != "nvidia-uvm"}},
            "device nodes",
            "fail",
            "missing: nvidia-uvm",
        ),
        ({"gpus": [CARD]}, "GPUs", "fail", "1 x NVIDIA"),
        ({"gpus": [CARD, {**CARD, "uuid": "GPU-c"}]}, "GPUs", "fail", "missing GPU-b; unexpected GPU-c"),
        (
            {"gpus": [CARD, {**CARD, "uuid": "GPU-b", "index": 1, "health": "needs-reset"}]},
            "GPUs",
            "fail",
            "GPU 1: needs-reset",
        ),
        (
            {"gpus": [CARD, {**CARD, "uuid": "GPU-b", "index": 1, "memory_total_mib": None}]},
            "GPUs",
            "warn",
            "GPU 1 tells no memory size",
        ),
        ({"gpus": [], "diagnosis": {"cause": "the driver hangs", "remedy": "reboot"}}, "GPUs", "fail", "driver hangs"),
        ({"topology": None}, "topology", "unknown", "no matrix"),
        ({"cmdline": "quiet intel_iommu=on"}, "IOMMU", "warn", "intel_iommu=on"),
        ({"cmdline": "quiet"}, "IOMMU", "unknown", "no IOMMU option"),
        ({"cmdline": None}, "IOMMU", "unknown", "cannot be read"),
        ({"iommu_types": ["identity", "DMA-FQ"]}, "IOMMU", "warn", "DMA-FQ"),  # by effect, whatever the options say
        ({"cmdline": "quiet", "iommu_types": ["identity"]}, "IOMMU", "ok", "identity"),
    ],
)
def test_one_thing_wrong_gives_its_own_finding(change: dict, check: str, status: str, found: str) -> None:
    wrong = finding(replace(GOOD, **change), check)
    assert wrong.status == status
    assert found in wrong.found
    if status in ("warn", "fail"):
        assert wrong.remedy


def test_the_worst_finding_is_the_verdict_and_is_explained() -> None:
    findings = audit(replace(GOOD, driver=None, cmdline="intel_iommu=on"), EXPECTED)
    assert overall(findings) == "fail"
    lines = table(findings)
    assert sum(line.lstrip().startswith("remedy:") for line in lines) == 2


def test_without_an_expectation_any_number_of_cards_is_right_but_said() -> None:
    assert "pve_gpu_host_expected_gpus is not set" in finding(GOOD, "GPUs", Expected()).found


def test_more_cards_than_expected_are_told_apart_from_fewer() -> None:
    assert "if the cards were added on purpose" in (finding(GOOD, "GPUs", Expected(gpus=1)).remedy or "")
    assert "power cycle" in (finding(GOOD, "GPUs", Expected(gpus=8)).remedy or "")
