"""Ask the driver, from node or guest, and see only the cards whose nodes this machine may open."""

from __future__ import annotations

import errno
import json
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cards import DEV, DRIVER_VERSION, MEMORY_IDLE_MIB, Card
from .scan import Holder

NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)
MISMATCH = (
    "Failed to initialize NVML: Driver/library version mismatch\n"
    f"NVML library version: {DRIVER_VERSION.rpartition('.')[0]}\n"
)

LOST = "Unable to determine the device handle for GPU{}: {}: GPU is lost.  Reboot the system to recover this GPU\n"


class DriverError(Exception):
    """nvidia-smi cannot work: `str()` is what it prints on stdout, `code` its exit status."""

    def __init__(self, text: str, code: int) -> None:
        super().__init__(text)
        self.code = code


@dataclass(frozen=True)
class Gpu:
    """A card as nvidia-smi shows it here: `index` counts the cards visible on this machine."""

    index: int
    card: Card
    processes: list[Holder]
    values: dict[str, str] = field(default_factory=dict)
    # Fallen off the bus: the driver still counts it, and can say nothing else about it.
    lost: bool = False

    @property
    def used_mib(self) -> int:
        return MEMORY_IDLE_MIB + sum(process.mib for process in self.processes)

    @property
    def busy(self) -> bool:
        return bool(self.processes)

    @property
    def persistent(self) -> bool:
        return self.values.get("persistence_mode") != "Disabled"


@dataclass(frozen=True)
class State:
    driver_version: str
    cuda_version: str
    gpus: list[Gpu]


def _ask(path: Path) -> dict[str, Any]:
    with socket.socket(socket.AF_UNIX) as connection:
        try:
            connection.connect(str(path))
            text = b"".join(iter(lambda: connection.recv(65536), b""))
        except OSError:
            raise DriverError(NO_DRIVER, 9) from None
    if not text:
        raise DriverError(NO_DRIVER, 9)
    said: dict[str, Any] = json.loads(text)
    return said


def _may_open(node: Path) -> bool:
    """Whether the node is there and opens. Mode and device filter refuse differently, and NVML tells them apart."""
    try:
        os.close(os.open(node, os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY))
    except OSError as error:
        if error.errno == errno.EACCES:
            raise DriverError("Failed to initialize NVML: Insufficient Permissions\n", 4) from None
        if error.errno == errno.EPERM:
            raise DriverError("Failed to initialize NVML: Unknown Error\n", 255) from None
        return False
    return True


def look(sock: Path, dev: Path = Path(DEV), proc: Path = Path("/proc")) -> State:
    """The cards of this machine and who uses them. Raises DriverError with the real tool's sentence and exit status."""
    said = _ask(sock)
    if not _may_open(dev / "nvidiactl"):
        raise DriverError(NO_DRIVER, 9)
    if said["fault"] == "mismatch":
        raise DriverError(MISMATCH, 18)
    visible = [minor for minor in said["cards"] if said["fault"] != "no_devices" and _may_open(dev / f"nvidia{minor}")]
    if not visible:
        raise DriverError("No devices were found\n", 6)
    # Pids are the node's everywhere; another pid namespace cannot name the processes behind them.
    named = os.readlink(proc / "self/ns/pid") == said["pid_namespace"]  # noqa: PTH115
    processes = [
        Holder(p["pid"], p["card"], p["mib"], p["name"] if named else "[Not Found]") for p in said["processes"]
    ]
    gpus = [
        Gpu(
            index,
            Card(minor, said["machine"]),
            [p for p in processes if p.card == minor],
            said["values"].get(str(minor), {}),
            minor in said["lost"],
        )
        for index, minor in enumerate(visible)
    ]
    return State(said["driver_version"], said["cuda_version"], gpus)
