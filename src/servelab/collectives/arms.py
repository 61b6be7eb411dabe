"""The arms of a collectives run: a way to reduce and the environment that belongs to it.

Where a mode sets the same thing, the arm has the mode's values (tests/unit/test_collectives.py compares them), so that
a latency here belongs to a mode there. NCCL reads its variables once per process: every arm has processes of its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_FORCED = {
    "SGLANG_FORCE_CUSTOM_AR_PCIE": "1",
    "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0",
    "SGLANG_CUSTOM_ALLREDUCE_ALGO": "1stage",
}
# Variables of the calling shell that would make one arm into another; an arm sets what it needs itself.
OWNED = ("NCCL_", *_FORCED, "SGLANG_CUSTOM_AR_PCIE_MAX_BYTES", "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE")
KEPT = ("NCCL_DEBUG", "NCCL_DEBUG_FILE", "NCCL_DEBUG_SUBSYS", "NCCL_NVLS_ENABLE", "NCCL_CUMEM_ENABLE")


@dataclass(frozen=True)
class Arm:
    """`backend` is a name of the worker's; `mode` is the mode that reduces this way, if there is one."""

    name: str
    backend: str
    what: str
    env: Mapping[str, str] = field(default_factory=dict)
    mode: str | None = None


DEFAULT = "nccl"

ARMS = {
    arm.name: arm
    for arm in (
        Arm("nccl", "nccl", "NCCL as it comes"),
        Arm("nccl_ring_ll", "nccl", "NCCL, Ring and LL", {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}, "baseline"),
        Arm("nccl_no_p2p", "nccl", "NCCL through host memory", {"NCCL_P2P_DISABLE": "1"}),
        Arm(
            "nccl_low_latency",
            "nccl",
            "NCCL, P2P everywhere, LL, at least 8 channels",
            {
                "NCCL_ALGO": "Ring",
                "NCCL_PROTO": "LL",
                "NCCL_P2P_LEVEL": "SYS",
                "NCCL_IB_DISABLE": "1",
                "NCCL_MIN_NCHANNELS": "8",
                "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1",
            },
            "nccl_low_latency",
        ),
        Arm(
            "nccl_throughput",
            "nccl",
            "NCCL through host memory, 16 to 32 channels",
            {
                "NCCL_P2P_DISABLE": "1",
                "NCCL_MIN_NCHANNELS": "16",
                "NCCL_MAX_NCHANNELS": "32",
                "NCCL_BUFFSIZE": "33554432",
            },
            "nccl_throughput",
        ),
        Arm(
            "nccl_fewer_channels",
            "nccl",
            "NCCL, one channel",
            {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_MAX_NCHANNELS": "1", "NCCL_BUFFSIZE": "1048576"},
            "nccl_fewer_channels",
        ),
        Arm("custom_ar_unforced", "custom_ar", "SGLang's custom allreduce where SGLang lets it"),
        Arm("custom_ar_pcie", "custom_ar", "SGLang's custom allreduce, forced", _FORCED, "custom_ar_pcie"),
        Arm("custom_ar_v2", "custom_ar_v2", "SGLang's custom allreduce, version 2"),
        Arm("pcie_ipc", "pcie_ipc", "FlashInfer's PCIe-IPC", {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, "pcie_ipc"),
    )
}


def environment(arm: Arm, base: Mapping[str, str]) -> dict[str, str]:
    """`base` without what belongs to other arms, and with what belongs to this one."""
    kept = {name: value for name, value in base.items() if not name.startswith(OWNED) or name in KEPT}
    return {**kept, **arm.env}
