"""What was seen on a node, what the inventory says about it, and one finding: the words that the audit speaks in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from .driver_version import CUDA_13_0_DRIVER
from .nvidia_smi_report import GpuDetail

__all__ = ["Expected", "Finding", "NodeFacts", "Port", "Status"]

Status = Literal["ok", "warn", "fail", "unknown"]


@dataclass(frozen=True)
class Port:
    """A root or switch port above a card, or a card: its address, ACS redirects that are on (None: it has no ACS, or it
    is not to be seen), and its link's power saving ("off", "L0s", "L1", "L0s L1" or None).
    """

    address: str
    redirects: Sequence[str] | None = None
    aspm: str | None = None


@dataclass(frozen=True)
class NodeFacts:
    """What was seen on the node. None where it could not be read.

    driver: /proc/driver/nvidia/version; nodes: name under /dev → "character device", "regular file", …;
    gpus: as the module nvidia_smi returns them; diagnosis: its {"cause", "remedy"} where there are none;
    details: `nvidia-smi -q`; topology: `nvidia-smi topo -m`; peers: "r" and "w" → `topo -p2p`, parsed;
    cmdline: /proc/cmdline; iommu_types: types of the cards' IOMMU groups ("DMA", "identity", …);
    ports: root and switch ports above the cards; cards: the cards themselves; aspm_policy: the kernel's;
    hmm_disabled: nvidia_uvm's parameter; registry: the driver's RegistryDwords; boot: path → seconds between the start
    of the guests at this boot and the making of that device node (negative: it was there first).
    """

    driver: str | None = None
    nodes: Mapping[str, str] = field(default_factory=dict)
    gpus: Sequence[Mapping[str, Any]] = ()
    diagnosis: Mapping[str, str] | None = None
    details: Sequence[GpuDetail] = ()
    topology: str | None = None
    peers: Mapping[str, Mapping[tuple[int, int], str]] = field(default_factory=dict)
    cmdline: str | None = None
    iommu_types: Sequence[str] | None = None
    ports: Sequence[Port] = ()
    cards: Sequence[Port] = ()
    aspm_policy: str | None = None
    hmm_disabled: bool | None = None
    registry: str | None = None
    boot: Mapping[str, float] | None = None


@dataclass(frozen=True)
class Expected:
    """What the inventory says about the node. None where it says nothing."""

    gpus: int | None = None
    uuids: Sequence[str] | None = None
    minimum_driver: str = CUDA_13_0_DRIVER


@dataclass(frozen=True)
class Finding:
    check: str
    status: Status
    found: str
    right: str
    why: str
    remedy: str | None = None
