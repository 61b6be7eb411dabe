"""Why something cannot be released, in exact words with the remedy.

What a process waits for is read from /proc; what ails a card is read from the kernel's log, where the driver reports
Xid, and from nvidia-smi's counters of memory errors.
"""

# ruff: noqa: PTH123, PTH208

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

# "NVRM: Xid (PCI:0000:c1:00): 79, pid=1234, name=python3, GPU has fallen off the bus." PID and name may be missing.
_XID = re.compile(r"NVRM: Xid \(PCI:(?P<bus>[0-9A-Fa-f:.]+)\): (?P<code>\d+),? ?(?P<text>.*)")
# What people have to do about them; the driver's documentation has many more, most of them a program's own fault.
_XIDS = {
    48: ("an uncorrectable memory (ECC) error", "reset the GPU; if it comes again, have the card replaced"),
    61: ("the card's microcontroller stopped", "reset the GPU, or reboot the node"),
    62: ("the card's microcontroller halted", "reset the GPU, or reboot the node"),
    63: ("a memory row was remapped (ECC)", "reset the GPU when nobody uses it, so that it takes effect"),
    64: ("a memory row could not be remapped (ECC)", "have the card replaced"),
    74: ("an NVLink error", "reset the GPU; check the bridge"),
    79: ("the GPU has fallen off the bus", "check power, riser and slot; only a reboot of the node brings it back"),
    94: ("a contained memory (ECC) error", "start the program again; reset the GPU when nobody uses it"),
    95: ("an uncontained memory (ECC) error", "reset the GPU before anybody uses it"),
    109: ("a context switch timed out", "reset the GPU, or reboot the node"),
    119: ("the card's firmware (GSP) does not answer", "reset the GPU, or reboot the node"),
    120: ("the card's firmware (GSP) failed", "reset the GPU, or reboot the node"),
    140: ("an unrecovered memory (ECC) error", "reset the GPU"),
    143: ("the card could not be initialised", "reboot the node"),
    154: ("the driver asks for a recovery", "reset the GPU, or reboot the node, as the message says"),
}
ECC_QUERY = (
    "pci.bus_id",
    "ecc.errors.uncorrected.volatile.total",
    "remapped_rows.pending",
    "remapped_rows.failure",
)
_BUS = re.compile(r"[0-9A-Fa-f]+:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}(?:\.\d)?")
_YES = ("Yes", "1")
_IN_DRIVER = "look for Xid in the node's dmesg; when it stays so, only a reboot of the node ends it"


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return ""


def _fields(path: str) -> list[str]:
    """The fields of a stat file from the state on; [] when there is none."""
    return _text(path).rpartition(")")[2].split()


def parent_of(pid: int, proc: str = "/proc") -> tuple[int, str]:
    """PID and name of a process's parent; (0, "") when there is none."""
    fields = _fields(f"{proc}/{pid}/stat")
    parent = int(fields[1]) if len(fields) > 1 else 0
    return parent, _text(f"{proc}/{parent}/comm") if parent else ""


def _threads(pid: int, proc: str) -> list[tuple[str, str]]:
    """(state, what it waits for in the kernel) of each thread."""
    try:
        tasks = os.listdir(f"{proc}/{pid}/task")
    except OSError:
        return []
    found = []
    for task in tasks:
        base = f"{proc}/{pid}/task/{task}"
        if fields := _fields(f"{base}/stat"):
            where = _text(f"{base}/wchan")
            found.append((fields[0], "" if where == "0" else where))
    return found


def stuck(pid: int, proc: str = "/proc") -> str:
    """Why a process that got SIGKILL is still there, as a sentence without its PID."""
    threads = _threads(pid, proc)
    states = [state for state, _ in threads]
    waiting = sorted({where for state, where in threads if state == "D" and where})
    if "D" in states:
        where = f" ({', '.join(waiting)})" if waiting else ""
        count = f"{states.count('D')} of its {len(states)} thread(s)"
        return f"state D: {count} wait in the kernel{where} and cannot be killed: {_IN_DRIVER}"
    if states and set(states) == {"Z"}:
        parent, name = parent_of(pid, proc)
        return (
            f"it is dead and holds nothing, but its parent PID {parent} ({name}) does not collect it: stop the parent"
        )
    if "Z" in states:
        return f"its first thread is dead and {len(states) - states.count('Z')} other(s) still end"
    if set(states) & {"T", "t"}:
        return "it is stopped by a debugger: end that"
    return f"state {''.join(sorted(set(states))) or '?'}: it was killed and has not ended yet: run again"


def zombies(proc: str = "/proc", limit: int = 20) -> list[dict[str, Any]]:
    """The dead that their parents do not collect, at most `limit`: pid, name, ppid, parent. They hold nothing."""
    found: list[dict[str, Any]] = []
    for entry in os.listdir(proc):
        fields = _fields(f"{proc}/{entry}/stat") if entry.isdigit() else []
        if len(fields) > 17 and fields[0] == "Z" and fields[17] == "1":
            parent, name = parent_of(int(entry), proc)
            found.append({"pid": int(entry), "name": _text(f"{proc}/{entry}/comm"), "ppid": parent, "parent": name})
    return sorted(found, key=lambda one: int(one["pid"]))[:limit]


def xids(log: str, limit: int = 10) -> list[dict[str, Any]]:
    """The last Xid reports in the text of the kernel's log: bus_id, code, text, cause and remedy (a sentence each)."""
    found = []
    for match in _XID.finditer(log):
        code = int(match["code"])
        cause, remedy = _XIDS.get(
            code, ("a program's error or a driver's, see NVIDIA's list of Xids", "start it again")
        )
        found.append(
            {
                "bus_id": match["bus"].lower(),
                "code": code,
                "text": match["text"].strip(),
                "cause": f"Xid {code}: {cause}",
                "remedy": remedy,
            }
        )
    return found[-limit:]


def _is_card(bus: str) -> bool:
    return _BUS.fullmatch(bus) is not None


def memory_errors(table: str) -> list[dict[str, Any]]:
    """Cards with memory errors, from `nvidia-smi --query-gpu=ECC_QUERY --format=csv,noheader,nounits`.

    → [{bus_id, cause, remedy}]. What a card cannot tell ([N/A], an old driver's sentence) is no error.
    """
    found = []
    for line in table.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) != len(ECC_QUERY) or not _is_card(cells[0]):
            continue
        uncorrected, pending, failed = cells[1:]
        if uncorrected.isdigit() and int(uncorrected):
            cause = f"{uncorrected} uncorrected memory (ECC) error(s) since the driver was loaded"
            remedy = "reset the GPU"
        elif failed in _YES:
            cause, remedy = "a memory row could not be remapped", "have the card replaced"
        elif pending in _YES:
            cause, remedy = "a memory row waits to be remapped", "reset the GPU when nobody uses it"
        else:
            continue
        found.append({"bus_id": cells[0].lower(), "cause": cause, "remedy": remedy})
    return found


def respawned(holders: Iterable[Mapping[str, Any]], released: Iterable[Mapping[str, Any]]) -> list[str]:
    """A sentence for each holder that took the place of one that was released: somebody starts it again."""
    gone = {str(row["command"]): row["pid"] for row in released if row["outcome"] in ("exited", "killed")}
    said = []
    for holder in holders:
        before = gone.get(str(holder["command"]))
        number = holder["pid"] or holder.get("node_pid")
        if before is None or before == number:
            continue
        unit, parent = holder["unit"], holder.get("parent") or {}
        who = (
            f"`systemctl stop {unit}`"
            if unit and str(unit).endswith(".service") and parent.get("pid") in (0, 1, None)
            else f"stop its parent, PID {parent.get('pid')} ({parent.get('name')})"
        )
        said.append(f"PID {number} is PID {before}, which was released, started again: {who} first")
    return said
