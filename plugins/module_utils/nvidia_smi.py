"""nvidia-smi: run it with a time limit and read what it prints.

Two habits of the tool shape this file. A value it cannot tell is a sentinel in the table (`[N/A]`, `ERR!`, …): it
becomes None, because "unknown" read as 0 declares a full card clean. And a failure is a sentence on *stdout*, where
the table should be: it becomes a named diagnosis, never a card.
"""

from __future__ import annotations

import contextlib
import csv
import io
import os
import re
import signal
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# nvidia-smi's field → (key in the result, how to read it)
_FIELDS: dict[str, tuple[str, type]] = {
    "index": ("index", int),
    "uuid": ("uuid", str),
    "pci.bus_id": ("bus_id", str),
    "name": ("name", str),
    "driver_version": ("driver_version", str),
    "memory.total": ("memory_total_mib", int),
    "memory.used": ("memory_used_mib", int),
    "utilization.gpu": ("utilization_percent", int),
    "temperature.gpu": ("temperature_c", int),
    "power.draw": ("power_w", float),
    "mig.mode.current": ("mig", bool),
    "compute_mode": ("compute_mode", str),
    "pcie.link.gen.current": ("pcie_link_gen", int),
    "pcie.link.width.current": ("pcie_link_width", int),
    "enforced.power.limit": ("power_limit_w", float),
    "clocks.current.sm": ("clock_sm_mhz", int),
    "clocks.max.sm": ("clock_max_sm_mhz", int),
    "clocks.current.memory": ("clock_memory_mhz", int),
    "clocks.max.memory": ("clock_max_memory_mhz", int),
    "clocks_event_reasons.active": ("throttle_reasons", list),
}
QUERY = tuple(_FIELDS)

# Bits of clocks_event_reasons.active, as nvml.h has them. Until driver 535 they were called clocks_throttle_reasons.
_REASONS = {
    0x001: "gpu_idle",
    0x002: "applications_clocks_setting",
    0x004: "sw_power_cap",
    0x008: "hw_slowdown",
    0x010: "sync_boost",
    0x020: "sw_thermal_slowdown",
    0x040: "hw_thermal_slowdown",
    0x080: "hw_power_brake_slowdown",
    0x100: "display_clock_setting",
}

_HEADER_UNIT = re.compile(r"\s*\[[^\]]*\]$")
_NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Diagnosis:
    """Why there is no table: `name` for programs, `cause` and `remedy` one sentence each for people."""

    name: str
    cause: str
    remedy: str

    def as_dict(self) -> dict[str, str]:
        return {"name": self.name, "cause": self.cause, "remedy": self.remedy}


# First match wins, so the special sentences stand before the general ones.
_DIAGNOSES: tuple[tuple[str, Diagnosis], ...] = (
    (
        r"No devices were found",
        Diagnosis(
            "no_devices",
            "the driver is loaded, but this machine sees none of its GPUs",
            "on the node look for failed cards (dmesg | grep -i xid; lspci -d 10de:); for a guest pass "
            "/dev/nvidia0 … with `pct set VMID --dev0 /dev/nvidia0` and restart it",
        ),
    ),
    (
        r"Driver/library version mismatch",
        Diagnosis(
            "driver_mismatch",
            "the driver's libraries here are of another version than the node's loaded kernel driver",
            "install the libraries of exactly the version in /proc/driver/nvidia/version (role nvidia_userspace); "
            "after a driver upgrade on the node, reload its modules or reboot it",
        ),
    ),
    (
        r"couldn't communicate with the NVIDIA driver|Driver Not Loaded",
        Diagnosis(
            "driver_not_loaded",
            "the kernel driver is not loaded, or its device nodes are missing here",
            "on the node run `modprobe nvidia && nvidia-modprobe -u -c=0`; in a guest check "
            "/proc/driver/nvidia/version and that /dev/nvidiactl is a character device (test -c)",
        ),
    ),
    (
        r"couldn't find libnvidia-ml",
        Diagnosis(
            "library_missing",
            "nvidia-smi is here, but its library libnvidia-ml.so is not",
            "install the driver's userspace completely (role nvidia_userspace)",
        ),
    ),
    (
        r"Insufficient Permissions",
        Diagnosis(
            "permission",
            "the device nodes are there, but this user may not open them (mode, owner, or the guest's id mapping)",
            "pass the nodes with `mode=0666`, or with uid/gid of the service's user; in an unprivileged guest "
            "nodes owned by nobody show a wrong id mapping",
        ),
    ),
    (
        r"Failed to initialize NVML: Unknown Error",
        Diagnosis(
            "cgroup_denied",
            "the device nodes are there, but the container's cgroup denies access to their numbers",
            "pass the devices as dev0, dev1, … (resolved at every start) in place of fixed lxc.cgroup2.devices.allow "
            "majors, then restart the guest",
        ),
    ),
    (
        r"GPU is lost|Unable to determine the device handle",
        Diagnosis(
            "gpu_lost",
            "a GPU has fallen off the bus",
            "look for Xid 79 in the node's dmesg; check power, riser and slot; the node needs a reboot",
        ),
    ),
    (
        r"requires? reset",
        Diagnosis(
            "needs_reset",
            "a GPU must be reset before it can be used",
            "stop everything that uses it, then on the node run `nvidia-smi --gpu-reset -i INDEX`, or reboot",
        ),
    ),
    (
        r"is not a valid field to query",
        Diagnosis(
            "unknown_field",
            "this nvidia-smi does not know one of the values asked for",
            "use a driver of branch 535 or newer",
        ),
    ),
)
NOT_INSTALLED = Diagnosis(
    "not_installed",
    "nvidia-smi is not installed here",
    "install the driver's userspace (role nvidia_userspace on a guest, the driver itself on a node)",
)


def timed_out(seconds: float) -> Diagnosis:
    return Diagnosis(
        "timeout",
        f"nvidia-smi did not answer within {seconds:g} s",
        "the driver hangs: look on the node for Xid (dmesg) and processes in state D (ps); it may take a reboot",
    )


@dataclass(frozen=True)
class Report:
    """What nvidia-smi said: cards, and a diagnosis where it said a sentence. No cards always comes with a diagnosis."""

    gpus: list[dict[str, Any]]
    diagnosis: Diagnosis | None


def _is_sentinel(cell: str) -> bool:
    return cell.startswith("[") or cell in ("", "ERR!", "N/A")


def _value(cell: str, kind: type) -> Any:
    if _is_sentinel(cell):
        return None
    if kind is bool:
        return {"enabled": True, "disabled": False}.get(cell.lower())
    if kind is str:
        return cell
    if kind is list:
        return throttle_reasons(cell)
    number = _NUMBER.match(cell)
    return kind(float(number[0])) if number else None


def throttle_reasons(cell: str) -> list[str] | None:
    """The names of what holds the clocks down, from a bit mask in hexadecimal; none: nothing does. None: not told.

    A bit that is not known keeps its number, because newer drivers have more of them.
    """
    try:
        mask = int(cell, 16)
    except ValueError:
        return None
    bits = [1 << bit for bit in range(mask.bit_length()) if mask >> bit & 1]
    return [_REASONS.get(bit, f"{bit:#x}") for bit in bits]


def _health(cells: Iterable[str]) -> str:
    text = " ".join(cells)
    if re.search(r"requires? reset", text, re.I):
        return "needs-reset"
    if "is lost" in text:
        return "lost"
    if "ERR!" in text or "Unknown Error" in text:
        return "error"
    return "ok"


def _gpu(fields: Sequence[str], cells: Sequence[str]) -> dict[str, Any]:
    gpu: dict[str, Any] = dict.fromkeys(key for key, _ in _FIELDS.values())
    # Columns of a row that is longer or shorter than the header cannot be told apart: only those before the first
    # number can be trusted, and they are what names the card.
    trusted = len(cells) == len(fields)
    for field, cell in zip(fields, cells, strict=False):
        if field in _FIELDS and (trusted or field in ("index", "uuid", "name")):
            key, kind = _FIELDS[field]
            gpu[key] = _value(cell, kind)
    gpu["health"] = _health(cells)
    if not trusted and gpu["health"] == "ok":
        gpu["health"] = "error"
    return gpu


def parse_table(text: str, fields: Sequence[str] = QUERY) -> Report:
    """Read the output of `nvidia-smi --query-gpu=FIELDS --format=csv[,noheader][,nounits]`.

    A header row, when there is one, names the columns; else `fields` does. Lines that are no rows are diagnosed.
    """
    gpus: list[dict[str, Any]] = []
    sentences: list[str] = []
    columns = list(fields)
    for line in text.splitlines():
        if not line.strip():
            continue
        cells = [cell.strip() for cell in next(csv.reader(io.StringIO(line)))]
        if cells[0] == "index" or (_HEADER_UNIT.sub("", cells[0]) in _FIELDS and len(cells) > 1):
            columns = [_HEADER_UNIT.sub("", cell) for cell in cells]
        elif cells[0].isdigit() and len(cells) > 1:
            gpus.append(_gpu(columns, cells))
        else:
            sentences.append(line.strip())
    return Report(gpus, diagnose("\n".join(sentences)) if sentences or not gpus else None)


def diagnose(text: str) -> Diagnosis:
    """Name what nvidia-smi said in place of a table."""
    for pattern, diagnosis in _DIAGNOSES:
        if re.search(pattern, text, re.I):
            return diagnosis
    said = text.strip().splitlines()
    return Diagnosis(
        "unrecognised",
        f'nvidia-smi printed "{said[0][:200]}"' if said else "nvidia-smi printed nothing",
        "run `nvidia-smi` by hand on this machine and read the node's dmesg",
    )


def run_bounded(argv: Sequence[str], timeout: float) -> tuple[int, str, str] | None:
    """Run a command; (exit status, stdout, stderr), or None when it takes longer than `timeout` seconds.

    A process that hangs in the driver (state D) outlives SIGKILL, and subprocess.run() would wait for it for ever after
    its own time-out: it is killed and abandoned.

    Raises FileNotFoundError when there is no such program.
    """
    process = subprocess.Popen(
        list(argv),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        start_new_session=True,
        env={**os.environ, "LC_ALL": "C"},
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        return None
    return process.returncode, out, err


def query(timeout: float = 20.0, executable: str = "nvidia-smi") -> Report:
    """Ask nvidia-smi about every GPU. Never raises for what the driver does: that is in the report's diagnosis."""
    argv = [executable, f"--query-gpu={','.join(QUERY)}", "--format=csv,nounits"]
    try:
        answer = run_bounded(argv, timeout)
    except (FileNotFoundError, PermissionError):
        return Report([], NOT_INSTALLED)
    if answer is None:
        return Report([], timed_out(timeout))
    status, out, err = answer
    report = parse_table(out)
    if status and report.diagnosis is None:
        # A table and a failing exit status: some card did not answer, and that must not pass for a clean machine.
        return Report(report.gpus, diagnose(err or f"exit status {status}"))
    if report.diagnosis and report.diagnosis.name == "unrecognised" and err.strip():
        return Report(report.gpus, diagnose(f"{out.strip()}\n{err}".strip()))
    return report


_SICK = {
    "needs-reset": "must be reset: gpu_clean_reset_ok=true lets this role do it where nobody holds it; so does a boot",
    "lost": "is lost, it has fallen off the bus: check power, riser and slot; only a reboot of the node brings it back",
}


def memory_verdict(report: Mapping[str, Any], threshold_mib: int, uuids: Iterable[str] | None = None) -> dict[str, Any]:
    """Are the cards empty? `report` is what the module `nvidia_smi` returned; `uuids` narrows it to some cards.

    → {"clean": True, False or None (cannot be known), "reasons": [sentence, …],
       "gpus": [{index, uuid, memory_used_mib}], "dirty": [uuid of each card that is full or must be reset]}.
    A skipped, failed or empty report is None: nothing was seen, so nothing is proved.
    """
    if report.get("skipped") or report.get("failed") or "gpus" not in report:
        not_asked = "nvidia-smi was not asked, so memory use is unknown"
        return {"clean": None, "reasons": [not_asked], "gpus": [], "dirty": []}
    reasons: list[str] = []
    dirty: list[str] = []
    unknown = full = False
    diagnosis = report.get("diagnosis")
    if diagnosis:
        unknown = True
        reasons.append(f"{diagnosis['cause']}; {diagnosis['remedy']}")
    wanted = None if uuids is None else list(uuids)
    gpus = [gpu for gpu in report["gpus"] if wanted is None or gpu["uuid"] in wanted]
    for gpu in gpus:
        used = gpu["memory_used_mib"]
        if used is not None and used > threshold_mib:
            full = True
            dirty.append(gpu["uuid"])
            reasons.append(f"GPU {gpu['index']} has {used} MiB in use, more than {threshold_mib} MiB")
        elif gpu["health"] in ("needs-reset", "lost"):
            unknown = True
            dirty += [gpu["uuid"]] if gpu["health"] == "needs-reset" else []
            reasons.append(f"GPU {gpu['index']} {_SICK[gpu['health']]}")
        elif used is None:
            unknown = True
            reasons.append(f"GPU {gpu['index']} does not tell how much memory is in use")
    missing = sorted(set(wanted or ()) - {gpu["uuid"] for gpu in gpus})
    if missing or not gpus:
        unknown = True
        reasons.append(f"not seen: {', '.join(missing)}" if missing else "no GPU was seen")
    return {
        "clean": False if full else None if unknown else True,
        "reasons": reasons,
        "gpus": [{key: gpu[key] for key in ("index", "uuid", "memory_used_mib")} for gpu in gpus],
        "dirty": dirty,
    }
