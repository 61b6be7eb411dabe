"""nvidia-smi --query-gpu and --query-compute-apps."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from .cards import MEMORY_RESERVED_MIB, MEMORY_TOTAL_MIB, MODEL
from .client import Gpu, State
from .scan import Holder

TEMPERATURE_C = 31
POWER_CAP_W = 600
COMPUTE_CAPABILITY = "12.0"
# An idle card lets its clocks and its PCIe link fall: a link generation read on an idle card says nothing.
IDLE_CLOCK_MHZ, BUSY_CLOCK_MHZ, MAX_CLOCK_MHZ = 180, 2430, 2430
IDLE_MEMORY_MHZ, BUSY_MEMORY_MHZ = 405, 12481
LINK_GENERATION, LINK_WIDTH = 5, 16


class QueryError(ValueError):
    """A field that nvidia-smi does not know."""


def power_w(gpu: Gpu) -> float:
    return (84.0 if gpu.busy else 33.1) + gpu.card.minor * 0.25


def temperature_c(gpu: Gpu) -> int:
    return TEMPERATURE_C + gpu.card.minor % 4 + (9 if gpu.busy else 0)


def pstate(gpu: Gpu) -> str:
    return "P1" if gpu.busy else "P8"


def _timestamp() -> str:
    return time.strftime("%Y/%m/%d %H:%M:%S") + f".{time.time_ns() // 10**6 % 1000:03d}"


@dataclass(frozen=True)
class Field:
    """`name` is what the header shows, `unit` follows it in brackets and follows every number."""

    name: str
    value: Callable[[State, Gpu], object]
    unit: str = ""


def _fixed(name: str, value: object, unit: str = "") -> Field:
    return Field(name, lambda state, gpu: value, unit)


def _clock(name: str, idle: int, busy: int) -> Field:
    return Field(name, lambda state, gpu: busy if gpu.busy else idle, "MHz")


_GPU = [
    Field("timestamp", lambda state, gpu: _timestamp()),
    Field("count", lambda state, gpu: len(state.gpus)),
    Field("index", lambda state, gpu: gpu.index),
    _fixed("name", MODEL),
    Field("uuid", lambda state, gpu: gpu.card.uuid),
    Field("serial", lambda state, gpu: gpu.card.serial),
    Field("driver_version", lambda state, gpu: state.driver_version),
    _fixed("vbios_version", "98.02.55.00.01"),
    Field("pci.bus_id", lambda state, gpu: gpu.card.bus_id),
    _fixed("pci.domain", "0x0000"),
    Field("pci.bus", lambda state, gpu: f"0x{gpu.card.bus:02X}"),
    _fixed("pci.device", "0x00"),
    _fixed("pci.device_id", "0x2BB510DE"),
    _fixed("pci.sub_device_id", "0x204E10DE"),
    _fixed("memory.total", MEMORY_TOTAL_MIB, "MiB"),
    _fixed("memory.reserved", MEMORY_RESERVED_MIB, "MiB"),
    Field("memory.used", lambda state, gpu: gpu.used_mib, "MiB"),
    Field("memory.free", lambda state, gpu: max(0, MEMORY_TOTAL_MIB - MEMORY_RESERVED_MIB - gpu.used_mib), "MiB"),
    _fixed("utilization.gpu", 0, "%"),
    _fixed("utilization.memory", 0, "%"),
    _fixed("fan.speed", "[N/A]", "%"),
    Field("temperature.gpu", lambda state, gpu: temperature_c(gpu)),
    _fixed("temperature.memory", "N/A"),
    Field("power.draw", lambda state, gpu: f"{power_w(gpu):.2f}", "W"),
    Field("power.draw.average", lambda state, gpu: f"{power_w(gpu):.2f}", "W"),
    Field("power.draw.instant", lambda state, gpu: f"{power_w(gpu):.2f}", "W"),
    *(
        _fixed(f"{kind}", f"{POWER_CAP_W:.2f}", "W")
        for kind in ("power.limit", "enforced.power.limit", "power.default_limit", "power.max_limit")
    ),
    _fixed("power.min_limit", "300.00", "W"),
    _clock("clocks.current.sm", IDLE_CLOCK_MHZ, BUSY_CLOCK_MHZ),
    _clock("clocks.current.graphics", IDLE_CLOCK_MHZ, BUSY_CLOCK_MHZ),
    _clock("clocks.current.memory", IDLE_MEMORY_MHZ, BUSY_MEMORY_MHZ),
    _fixed("clocks.max.sm", MAX_CLOCK_MHZ, "MHz"),
    _fixed("clocks.max.graphics", MAX_CLOCK_MHZ, "MHz"),
    _fixed("clocks.max.memory", BUSY_MEMORY_MHZ, "MHz"),
    Field("pcie.link.gen.current", lambda state, gpu: LINK_GENERATION if gpu.busy else 1),
    Field("pcie.link.gen.gpucurrent", lambda state, gpu: LINK_GENERATION if gpu.busy else 1),
    _fixed("pcie.link.gen.max", LINK_GENERATION),
    _fixed("pcie.link.gen.gpumax", LINK_GENERATION),
    _fixed("pcie.link.gen.hostmax", LINK_GENERATION),
    _fixed("pcie.link.width.current", LINK_WIDTH),
    _fixed("pcie.link.width.max", LINK_WIDTH),
    Field("pstate", lambda state, gpu: pstate(gpu)),
    Field("persistence_mode", lambda state, gpu: "Enabled" if gpu.persistent else "Disabled"),
    _fixed("compute_mode", "Default"),
    _fixed("compute_cap", COMPUTE_CAPABILITY),
    _fixed("display_active", "Disabled"),
    _fixed("display_attached", "No"),
    _fixed("accounting.mode", "Disabled"),
    _fixed("addressing_mode", "HMM"),
    _fixed("ecc.mode.current", "Enabled"),
    _fixed("ecc.mode.pending", "Enabled"),
    *(
        _fixed(f"ecc.errors.{kind}.{when}.total", 0)
        for kind in ("corrected", "uncorrected")
        for when in ("volatile", "aggregate")
    ),
    _fixed("mig.mode.current", "Disabled"),
    _fixed("mig.mode.pending", "Disabled"),
    # Idle, or nothing that holds the clocks down.
    Field("clocks_event_reasons.active", lambda state, gpu: f"0x{0 if gpu.busy else 1:016X}"),
]
_GPU_FIELDS = {field.name: field for field in _GPU}
_GPU_ALIASES = {
    "gpu_name": "name",
    "gpu_uuid": "uuid",
    "gpu_serial": "serial",
    "gpu_bus_id": "pci.bus_id",
    "clocks.sm": "clocks.current.sm",
    "clocks.gr": "clocks.current.graphics",
    "clocks.mem": "clocks.current.memory",
    "clocks.max.gr": "clocks.max.graphics",
    "clocks.max.mem": "clocks.max.memory",
    "clocks_throttle_reasons.active": "clocks_event_reasons.active",
}

_APP_FIELDS: dict[str, tuple[Callable[[Gpu, Holder], object], str]] = {
    "timestamp": (lambda gpu, app: _timestamp(), ""),
    "gpu_name": (lambda gpu, app: MODEL, ""),
    "gpu_bus_id": (lambda gpu, app: gpu.card.bus_id, ""),
    "gpu_serial": (lambda gpu, app: gpu.card.serial, ""),
    "gpu_uuid": (lambda gpu, app: gpu.card.uuid, ""),
    "pid": (lambda gpu, app: app.pid, ""),
    "process_name": (lambda gpu, app: app.name, ""),
    "used_gpu_memory": (lambda gpu, app: app.mib, "MiB"),
}
_APP_ALIASES = {"name": "process_name", "used_memory": "used_gpu_memory"}


def _resolve(wanted: str, known: set[str], aliases: dict[str, str]) -> list[str]:
    names = []
    for asked in (part.strip() for part in wanted.split(",")):
        name = aliases.get(asked, asked)
        if name not in known:
            raise QueryError(f'Field "{asked}" is not a valid field to query.\n\n')
        names.append(name)
    return names


def _value(value: object, unit: str, units: bool) -> str:
    text = str(value)
    # A sentinel such as [N/A] stands alone, whatever the unit.
    bare = not units or not unit or text.startswith("[") or not text[0].isdigit()
    return text if bare else f"{text} {unit}"


def _csv(header: list[tuple[str, str]], rows: list[list[str]], style: set[str]) -> str:
    lines = [", ".join(row) for row in rows]
    if "noheader" not in style:
        # The header keeps its units under nounits too.
        lines.insert(0, ", ".join(f"{name} [{unit}]" if unit else name for name, unit in header))
    return "".join(f"{line}\n" for line in lines)


def query_gpu(state: State, wanted: str, style: set[str]) -> str:
    """CSV of the fields named in `wanted`, one line a card. `style` may hold noheader and nounits."""
    names = _resolve(wanted, set(_GPU_FIELDS), _GPU_ALIASES)
    fields = [_GPU_FIELDS[name] for name in names]
    units = "nounits" not in style
    rows = [[_value(gpu.values.get(f.name, f.value(state, gpu)), f.unit, units) for f in fields] for gpu in state.gpus]
    return _csv([(f.name, f.unit) for f in fields], rows, style)


def query_apps(state: State, wanted: str, style: set[str]) -> str:
    """CSV of the processes on the cards, in the order of the cards."""
    names = _resolve(wanted, set(_APP_FIELDS), _APP_ALIASES)
    units = "nounits" not in style
    rows = [
        [_value(_APP_FIELDS[name][0](gpu, app), _APP_FIELDS[name][1], units) for name in names]
        for gpu in state.gpus
        for app in gpu.processes
    ]
    return _csv([(name, _APP_FIELDS[name][1]) for name in names], rows, style)
