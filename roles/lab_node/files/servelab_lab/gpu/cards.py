"""The machine the lab pretends to be: eight PCIe cards on two sockets, four behind each, no NVLink."""

from __future__ import annotations

import os
import uuid
import zlib
from dataclasses import dataclass

DRIVER_VERSION = "580.95.05"
CUDA_VERSION = "13.0"
MODEL = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
MEMORY_TOTAL_MIB = 97887
MEMORY_RESERVED_MIB = 637
# What a real card of this kind reports as used when nothing runs: "clean" never means 0.
MEMORY_IDLE_MIB = 4
CARDS = 8
# Every simulated node is /dev/full under another name: it can be opened and held without a kernel driver.
NODE_RDEV = os.makedev(1, 7)
# Both are elsewhere where there are no containers and nobody may make device nodes (nodes.py, lay_terminals).
SOCKET = os.environ.get("SERVELAB_GPU_SOCKET", "/run/servelab-gpu/driver.sock")
DEV = os.environ.get("SERVELAB_GPU_DEV", "/dev")

_BUSES = (0x01, 0x21, 0x41, 0x61, 0x81, 0xA1, 0xC1, 0xE1)
_SOCKET_CPUS = ("0-31,64-95", "32-63,96-127")


@dataclass(frozen=True)
class Card:
    """One card. `minor` is the number in /dev/nvidia<minor>; the same everywhere, unlike nvidia-smi's index.

    `machine` names a second node: no two nodes have the same cards. The first has none.
    """

    minor: int
    machine: str = ""

    @property
    def uuid(self) -> str:
        """GPU-…, the same in every lab, so that results of two labs can be compared."""
        name = ".".join(filter(None, (f"card{self.minor}", self.machine, "gpu.servelab")))
        return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, name)}"

    @property
    def serial(self) -> str:
        return str(1790025000001 + self.minor + 10 * zlib.crc32(self.machine.encode()))

    @property
    def bus(self) -> int:
        return _BUSES[self.minor]

    @property
    def bus_id(self) -> str:
        return f"00000000:{self.bus:02X}:00.0"

    @property
    def numa(self) -> int:
        return 0 if self.minor < CARDS // 2 else 1

    @property
    def cpus(self) -> str:
        return _SOCKET_CPUS[self.numa]


def cards(count: int = CARDS) -> list[Card]:
    """The first `count` cards (at most 8)."""
    if not 0 <= count <= CARDS:
        raise ValueError(f"the simulated machine has up to {CARDS} cards, not {count}")
    return [Card(minor) for minor in range(count)]
