"""nvidia-smi -q: the sections that anyone reads from it."""

from __future__ import annotations

import time

from .cards import MEMORY_RESERVED_MIB, MEMORY_TOTAL_MIB, MODEL
from .client import Gpu, State
from .smi_query import LINK_GENERATION, LINK_WIDTH, temperature_c

# The whole memory is visible through BAR1: what large transfers between cards need.
_BAR1_TOTAL_MIB = 131072
Line = tuple[int, str, object | None]


def _identity(gpu: Gpu) -> list[Line]:
    return [
        (1, "Product Name", MODEL),
        (1, "Product Brand", "NVIDIA RTX"),
        (1, "Product Architecture", "Blackwell"),
        (1, "Persistence Mode", "Enabled" if gpu.persistent else "Disabled"),
        (1, "Addressing Mode", "HMM"),
        (1, "MIG Mode", None),
        (2, "Current", "Disabled"),
        (2, "Pending", "Disabled"),
        (1, "Serial Number", gpu.card.serial),
        (1, "GPU UUID", gpu.card.uuid),
        (1, "Minor Number", gpu.card.minor),
        (1, "VBIOS Version", "98.02.55.00.01"),
    ]


def _pci(gpu: Gpu) -> list[Line]:
    return [
        (1, "PCI", None),
        (2, "Bus", f"0x{gpu.card.bus:02X}"),
        (2, "Device", "0x00"),
        (2, "Domain", "0x0000"),
        (2, "Device Id", "0x2BB510DE"),
        (2, "Bus Id", gpu.card.bus_id),
        (2, "GPU Link Info", None),
        (3, "PCIe Generation", None),
        (4, "Max", LINK_GENERATION),
        (4, "Current", LINK_GENERATION if gpu.busy else 1),
        (3, "Link Width", None),
        (4, "Max", f"{LINK_WIDTH}x"),
        (4, "Current", f"{LINK_WIDTH}x"),
    ]


def _memory(gpu: Gpu) -> list[Line]:
    return [
        (1, "FB Memory Usage", None),
        (2, "Total", f"{MEMORY_TOTAL_MIB} MiB"),
        (2, "Reserved", f"{MEMORY_RESERVED_MIB} MiB"),
        (2, "Used", f"{gpu.used_mib} MiB"),
        (2, "Free", f"{max(0, MEMORY_TOTAL_MIB - MEMORY_RESERVED_MIB - gpu.used_mib)} MiB"),
        (1, "BAR1 Memory Usage", None),
        (2, "Total", f"{_BAR1_TOTAL_MIB} MiB"),
        (2, "Used", "1 MiB"),
        (2, "Free", f"{_BAR1_TOTAL_MIB - 1} MiB"),
    ]


def _health(gpu: Gpu) -> list[Line]:
    return [
        (1, "Compute Mode", "Default"),
        (1, "ECC Mode", None),
        (2, "Current", "Enabled"),
        (2, "Pending", "Enabled"),
        (1, "Temperature", None),
        (2, "GPU Current Temp", f"{temperature_c(gpu)} C"),
    ]


def _processes(gpu: Gpu) -> list[Line]:
    if not gpu.processes:
        return [(1, "Processes", "None")]
    lines: list[Line] = [(1, "Processes", None)]
    for process in gpu.processes:
        lines += [
            (2, "GPU instance ID", "N/A"),
            (2, "Compute instance ID", "N/A"),
            (2, "Process ID", process.pid),
            (3, "Type", "C"),
            (3, "Name", process.name),
            (3, "Used GPU Memory", f"{process.mib} MiB"),
        ]
    return lines


def _text(lines: list[Line]) -> str:
    texts = []
    for depth, name, value in lines:
        label = f"{'    ' * depth}{name}"
        texts.append(label if value is None else f"{label:<55}: {value}")
    return "\n".join(texts) + "\n"


def report(state: State) -> str:
    """Every card in full."""
    head: list[Line] = [
        (0, "Timestamp", time.strftime("%a %b %e %H:%M:%S %Y")),
        (0, "Driver Version", state.driver_version),
        (0, "CUDA Version", state.cuda_version),
    ]
    text = (
        "\n==============NVSMI LOG==============\n\n"
        + _text(head)
        + "\n"
        + _text([(0, "Attached GPUs", len(state.gpus))])
    )
    for gpu in state.gpus:
        sections = _identity(gpu) + _pci(gpu) + _memory(gpu) + _health(gpu) + _processes(gpu)
        text += f"GPU {gpu.card.bus_id}\n" + _text(sections) + "\n"
    return text
