"""Which simulated cards the schedulers get, and what others already hold there: what CUDA would say."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from servelab_lab.gpu.cards import MEMORY_IDLE_MIB, SOCKET
from servelab_lab.gpu.client import DriverError, look

from .config import NO_GPU
from .memory import StartFailure


@dataclass(frozen=True)
class Seat:
    """One rank's card: the number in /dev/nvidia<minor>, and the MiB that others use of it."""

    minor: int
    used_mib: int


def simulated(environ: Mapping[str, str] = os.environ) -> bool:
    """Say whether there are cards to hold; $SERVELAB_LAB_NO_GPU=1 says there are none to care for."""
    return environ.get(NO_GPU) != "1"


def seats(ranks: int, base: int, step: int, environ: Mapping[str, str] = os.environ) -> list[Seat]:
    """Return a card per rank, as CUDA would number them. Raises StartFailure."""
    if not simulated(environ):
        return [Seat(base + rank * step, 0) for rank in range(ranks)]
    try:
        gpus = look(Path(SOCKET)).gpus
    except DriverError as error:
        text = (
            f"No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available. ({str(error).strip()})"
        )
        raise StartFailure("RuntimeError", text, []) from error
    order = environ.get("CUDA_VISIBLE_DEVICES")
    if order is not None:
        wanted = [int(word) for word in order.split(",") if word.strip().isdigit()]
        gpus = [gpus[index] for index in wanted if index < len(gpus)]
    chosen = [base + rank * step for rank in range(ranks)]
    if max(chosen) >= len(gpus):
        missing = [rank for rank, index in enumerate(chosen) if index >= len(gpus)]
        text = "CUDA error: invalid device ordinal\nGPU device may be out of range, do you have enough GPUs?"
        raise StartFailure("torch.AcceleratorError", text, missing)
    return [Seat(gpus[index].card.minor, gpus[index].used_mib - MEMORY_IDLE_MIB) for index in chosen]
