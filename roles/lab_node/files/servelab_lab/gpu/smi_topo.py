"""nvidia-smi topo: how the cards are joined. The header is underlined even in a pipe, as the real tool does it."""

from __future__ import annotations

from .client import Gpu, State

_UNDERLINE, _RESET = "\x1b[4m", "\x1b[0m"
_LINKS = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
_P2P = """
Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""
# Reads, writes, atomics and PCIe work between cards of this kind; NVLink does not exist.
_CAPABILITIES = {"r": "OK", "w": "OK", "a": "OK", "p": "OK", "n": "NS"}


def _link(a: Gpu, b: Gpu) -> str:
    if a.index == b.index:
        return " X "
    return "NODE" if a.card.numa == b.card.numa else "SYS"


def matrix(state: State) -> str:
    """topo -m."""
    names = "\t".join(f"GPU{gpu.index}" for gpu in state.gpus)
    lines = [f"\t{_UNDERLINE}{names}\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID{_RESET}"]
    for gpu in state.gpus:
        links = "\t".join(_link(gpu, other) for other in state.gpus)
        lines.append(f"GPU{gpu.index}\t{links}\t{gpu.card.cpus}\t{gpu.card.numa}\t\tN/A")
    return "\n".join(lines) + "\n" + _LINKS


def peers(state: State, capability: str) -> str:
    """topo -p2p r|w|n|a|p. Raises KeyError for another capability."""
    status = _CAPABILITIES[capability]
    names = "\t".join(f"GPU{gpu.index}" for gpu in state.gpus)
    lines = [f" \t{_UNDERLINE}{names}\t{_RESET}"]
    for gpu in state.gpus:
        cells = "\t".join("X" if other is gpu else status for other in state.gpus)
        lines.append(f" GPU{gpu.index}\t{cells}\t")
    return "\n".join(lines) + "\n" + _P2P
