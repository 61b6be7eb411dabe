"""Read `nvidia-smi topo -m`: how the GPUs of a node are joined."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["Topology", "parse_topology"]

_ANSI = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_GPU = re.compile(r"^GPU(\d+)$")
_NVLINK = re.compile(r"^NV\d+$")
# Links that stay within one socket. NV# says nothing about sockets, SYS leaves them.
_WITHIN = {"NODE", "PHB", "PXB", "PIX"}


@dataclass(frozen=True)
class Topology:
    """The GPUs and what joins them.

    links: (lower, higher GPU number) → SYS, NODE, PHB, PXB, PIX or NV#;
    numa: GPU → NUMA node, None where the tool does not say; cpus: GPU → CPU list.
    """

    gpus: list[int] = field(default_factory=list)
    links: dict[tuple[int, int], str] = field(default_factory=dict)
    numa: dict[int, int | None] = field(default_factory=dict)
    cpus: dict[int, str] = field(default_factory=dict)

    @property
    def nvlink(self) -> bool:
        return any(_NVLINK.match(link) for link in self.links.values())

    @property
    def islands(self) -> list[list[int]]:
        """GPUs that reach each other without leaving their socket, each island sorted.

        A GPU of unknown NUMA node belongs where its links say.
        """
        island = {gpu: gpu for gpu in self.gpus}
        for (a, b), link in self.links.items():
            same_node = self.numa.get(a) is not None and self.numa.get(a) == self.numa.get(b)
            if link in _WITHIN or same_node:
                old, new = island[b], island[a]
                island = {gpu: new if root == old else root for gpu, root in island.items()}
        return sorted(sorted(g for g in self.gpus if island[g] == root) for root in set(island.values()))

    def crossing(self, tp_size: int) -> str | None:
        """What a tensor-parallel group of the first `tp_size` GPUs crosses, as a phrase; None if nothing."""
        group = self.gpus[:tp_size]
        worst = {self.links.get((a, b)) for a in group for b in group if a < b}
        return f"TP={tp_size} crosses NUMA (SYS)" if "SYS" in worst else None

    def describe(self) -> str:
        """One line for a person: count, NVLink, islands, what the whole machine as one group crosses."""
        islands = "; ".join(_ranges(island) for island in self.islands)
        parts = [
            f"{len(self.gpus)} GPUs",
            "NVLink" if self.nvlink else "no NVLink",
            f"{len(self.islands)} NUMA island{'s' if len(self.islands) != 1 else ''} ({islands})",
        ]
        return ", ".join([*parts, *filter(None, [self.crossing(len(self.gpus))])])


def parse_topology(text: str) -> Topology:
    """Parse the matrix. The header stays underlined in a pipe, cells are parted by tabs and may be empty, NICs
    have rows and columns too, and a legend follows. A text without a matrix gives a Topology without GPUs.
    """
    lines = [_ANSI.sub("", line) for line in text.splitlines()]
    header: list[str] | None = None
    rows: dict[int, list[str]] = {}
    for line in lines:
        cells = [cell.strip() for cell in line.split("\t")]
        if header is None:
            if any(_GPU.match(cell) for cell in cells[1:]):
                header = cells
        elif line.startswith("Legend"):
            break
        elif match := _GPU.match(cells[0]):
            rows[int(match[1])] = cells
    if header is None:
        return Topology()
    columns = {name: position for position, name in enumerate(header) if name}
    topology = Topology(gpus=sorted(rows))
    for gpu, cells in rows.items():
        topology.numa[gpu] = _integer(_cell(cells, columns.get("NUMA Affinity")))
        if cpus := _cell(cells, columns.get("CPU Affinity")):
            topology.cpus[gpu] = cpus
        for other in rows:
            link = _cell(cells, columns.get(f"GPU{other}"))
            if gpu < other and link:
                topology.links[gpu, other] = link
    return topology


def _cell(cells: list[str], position: int | None) -> str:
    return cells[position] if position is not None and position < len(cells) else ""


def _integer(text: str) -> int | None:
    return int(text) if text.isdigit() else None


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] → "0-2, 5"."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
