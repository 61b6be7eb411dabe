"""The audit of a node: hand-made nodes, each with one thing wrong, and the finding that must come of it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from servelab.shared.node_audit import audit, overall, table
from servelab.shared.node_facts import Expected, Finding, NodeFacts, Port
from servelab.shared.nvidia_smi_report import GpuDetail

NODES = dict.fromkeys(("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"), "character device")
CARD = {"index": 0, "uuid": "GPU-a", "name": "NVIDIA RTX PRO 6000 Blackwell", "memory_total_mib": 97887, "health": "ok"}
DETAIL = GpuDetail("00000000:01:00.0", True, 131072, 97887, 1, 5, 16, 16, "P8")
PEERS = {(0, 1): "OK", (1, 0): "OK"}
FORCED = "ForceP2P=0x11;RMForceP2PType=1;RMPcieP2PType=2"
GOOD = NodeFacts(
    driver="NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (x@y)\n",
    nodes=NODES,
    gpus=[CARD, {**CARD, "index": 1, "uuid": "GPU-b"}],
    topology="\tGPU0\tGPU1\tCPU Affinity\tNUMA Affinity\nGPU0\t X \tSYS\t0-7\t0\nGPU1\tSYS\t X \t8-15\t1\n",
    cmdline="BOOT_IMAGE=/vmlinuz root=/dev/sda1 quiet amd_iommu=on iommu=pt",
    details=[DETAIL, DETAIL],
    peers={"r": PEERS, "w": PEERS},
    ports=[Port("0000:00:01.1", [], "off"), Port("0000:40:01.1", None, None)],
    cards=[Port("0000:01:00.0", None, "off")],
    hmm_disabled=True,
    registry=FORCED,
    boot={"nvidia0": -12.0, "nvidia-uvm": -11.9},
)
EXPECTED = Expected(gpus=2, uuids=["GPU-a", "GPU-b"])


def finding(facts: NodeFacts, check: str, expected: Expected = EXPECTED) -> Finding:
    return next(f for f in audit(facts, expected) if f.check == check)


def test_a_good_node_is_good_in_every_respect() -> None:
    findings = audit(GOOD, EXPECTED)
    assert [f.status for f in findings] == ["ok"] * 15
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
        # nvidia-smi worked at boot, and nobody had asked for nvidia-uvm.
        ({"boot": {"nvidia0": -3.0, "nvidia-uvm": 41.0}}, "nodes at boot", "warn", "nvidia-uvm made up to 41 s after"),
        ({"boot": {"nvidia0": 86400.0}}, "nodes at boot", "warn", "24 h after"),
        ({"boot": None}, "nodes at boot", "unknown", "not known"),
        ({"details": [DETAIL, replace(DETAIL, persistence=False)]}, "persistence", "warn", "off on GPU 1"),
        ({"details": [DETAIL, replace(DETAIL, persistence=None)]}, "persistence", "unknown", "does not tell"),
        ({"details": []}, "persistence", "unknown", "does not tell"),
        ({"details": [DETAIL, replace(DETAIL, link_width=8)]}, "PCIe link", "warn", "GPU 1 has x8 of x16"),
        # Idle, generation 1 says nothing (P8); at work it does.
        (
            {"details": [replace(DETAIL, performance_state="P0", link_gen=4), DETAIL]},
            "PCIe link",
            "warn",
            "GPU 0 works at generation 4 of 5",
        ),
        ({"details": [DETAIL]}, "PCIe link", "ok", "x16, generation 1 now and 5 at most (idle cards fall back"),
        ({"details": [replace(DETAIL, link_width=None)]}, "PCIe link", "unknown", "does not tell"),
        ({"details": [replace(DETAIL, bar1_mib=256), DETAIL]}, "BAR1", "warn", "GPU 0 has 256 MiB for 97887 MiB"),
        ({"details": [DETAIL, replace(DETAIL, bar1_mib=None)]}, "BAR1", "unknown", "does not tell"),
        (
            {"peers": {"r": PEERS, "w": {(0, 1): "CNS", (1, 0): "OK"}}},
            "P2P status",
            "warn",
            "CNS for writes 0→1",
        ),
        ({"peers": {}}, "P2P status", "unknown", "no matrix"),
        ({"peers": {}, "gpus": [CARD]}, "P2P status", "ok", "one card only"),
        ({"registry": ""}, "peer mapping", "warn", "no RegistryDwords"),
        ({"registry": "EnableResizableBar=1"}, "peer mapping", "warn", "EnableResizableBar=1"),
        ({"registry": None}, "peer mapping", "unknown", "cannot be read"),
        (
            {"registry": "", "topology": "\tGPU0\tGPU1\nGPU0\t X \tNV12\nGPU1\tNV12\t X \n"},
            "peer mapping",
            "ok",
            "not needed",
        ),
        ({"registry": "", "topology": "\tGPU0\tGPU1\nGPU0\t X \tPIX\nGPU1\tPIX\t X \n"}, "peer mapping", "ok", "not"),
        (
            {"ports": [Port("0000:00:01.1", ["ReqRedir", "CmpltRedir"]), Port("0000:40:01.1", [])]},
            "ACS",
            "warn",
            "on at 0000:00:01.1 (ReqRedir, CmpltRedir)",
        ),
        ({"ports": []}, "ACS", "unknown", "no port above the cards is to be seen"),
        ({"ports": [Port("0000:00:01.1")]}, "ACS", "ok", "no port above the cards shows ACS"),
        ({"hmm_disabled": False}, "HMM", "warn", "on"),
        ({"hmm_disabled": None}, "HMM", "unknown", "uvm_disable_hmm cannot be read"),
        ({"cards": [Port("0000:01:00.0", None, "L1")]}, "ASPM", "warn", "on at 0000:01:00.0 (L1)"),
        ({"cards": [], "ports": [], "aspm_policy": "[default] performance powersave"}, "ASPM", "unknown", "is default"),
        ({"cards": [], "ports": [], "cmdline": "pcie_aspm=off"}, "ASPM", "ok", "command line"),
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
    # What could not be looked at needs no lecture.
    assert sum(line.lstrip().startswith("why:") for line in lines) == 2


def test_without_an_expectation_any_number_of_cards_is_right_but_said() -> None:
    assert "pve_gpu_host_expected_gpus is not set" in finding(GOOD, "GPUs", Expected()).found


def test_more_cards_than_expected_are_told_apart_from_fewer() -> None:
    assert "if the cards were added on purpose" in (finding(GOOD, "GPUs", Expected(gpus=1)).remedy or "")
    assert "power cycle" in (finding(GOOD, "GPUs", Expected(gpus=8)).remedy or "")
