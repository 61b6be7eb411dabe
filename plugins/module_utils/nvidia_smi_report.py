"""Read `nvidia-smi -q`: what the table of `--query-gpu` does not have, or only newer drivers' has."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

__all__ = ["GpuDetail", "parse_peers", "parse_report"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_CARD = re.compile(r"^GPU ([0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d)$")
_PEER = re.compile(r"^GPU(\d+)$")


@dataclass(frozen=True)
class GpuDetail:
    """One card, in the order of nvidia-smi. Sizes in MiB; None where the tool does not tell."""

    bus_id: str
    persistence: bool | None = None
    bar1_mib: int | None = None
    memory_mib: int | None = None
    link_gen: int | None = None
    link_gen_max: int | None = None
    link_width: int | None = None
    link_width_max: int | None = None
    performance_state: str | None = None


def parse_report(text: str) -> list[GpuDetail]:
    """Parse the report; the sections are told apart by their indentation. A text without cards gives an empty list."""
    cards: list[tuple[str, dict[tuple[str, ...], str]]] = []
    path: list[tuple[int, str]] = []
    for line in text.splitlines():
        if match := _CARD.match(line.strip()):
            cards.append((match[1], {}))
            path = []
            continue
        if not cards or not line.strip():
            continue
        indent = len(line) - len(line.lstrip())
        name, colon, value = line.strip().partition(" : ")
        while path and path[-1][0] >= indent:
            path.pop()
        key = name.strip().rstrip(":").strip()
        if colon:
            cards[-1][1][(*(part for _indent, part in path), key)] = value.strip()
        else:
            path.append((indent, key))
    return [_detail(bus_id, values) for bus_id, values in cards]


def parse_peers(text: str) -> dict[tuple[int, int], str]:
    """Parse `nvidia-smi topo -p2p r|w`: (reader or writer, other) → OK, CNS, GNS, TNS, NS, U or another word."""
    header: list[str] | None = None
    found: dict[tuple[int, int], str] = {}
    for line in (_ANSI.sub("", line) for line in text.splitlines()):
        cells = [cell.strip() for cell in line.split("\t")]
        if header is None:
            if any(_PEER.match(cell) for cell in cells[1:]):
                header = cells
        elif line.startswith("Legend"):
            break
        elif match := _PEER.match(cells[0]):
            for name, cell in zip(header, cells, strict=False):
                if (other := _PEER.match(name)) and cell and cell != "X":
                    found[int(match[1]), int(other[1])] = cell
    return found


def _detail(bus_id: str, values: dict[tuple[str, ...], str]) -> GpuDetail:
    link = ("PCI", "GPU Link Info")
    return GpuDetail(
        bus_id=bus_id,
        persistence={"enabled": True, "disabled": False}.get(values.get(("Persistence Mode",), "").lower()),
        bar1_mib=_number(values.get(("BAR1 Memory Usage", "Total"))),
        memory_mib=_number(values.get(("FB Memory Usage", "Total"))),
        link_gen=_number(values.get((*link, "PCIe Generation", "Current"))),
        link_gen_max=_number(values.get((*link, "PCIe Generation", "Max"))),
        link_width=_number(values.get((*link, "Link Width", "Current"))),
        link_width_max=_number(values.get((*link, "Link Width", "Max"))),
        performance_state=values.get(("Performance State",)),
    )


def _number(text: Any) -> int | None:
    match = re.match(r"^(\d+)", text or "")
    return int(match[1]) if match else None
