"""Who holds which card, from /proc. Nothing is cached: a holder that died is gone from the next answer."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from .cards import NODE_RDEV

CONTEXT_MIB = 512
# Tools that open the nodes to look, not to compute.
_LOOKERS = frozenset({"nvidia-smi", "nvidia-persiste"})
# A node may have been unlinked, or its bind mount taken away, while it is held.
_NODE = re.compile(r"/nvidia(\d+)(?: \(deleted\)|//deleted)?$")
_MEMORY = re.compile(r"^/memfd:servelab-gpu(\d+)-(\d+) \(deleted\)$")


@dataclass(frozen=True)
class Holder:
    """A process on a card, as the driver sees it: `pid` is the node's, `mib` what it uses of card `card`."""

    pid: int
    card: int
    mib: int
    name: str


@dataclass
class _Process:
    pid: int
    cards: set[int]
    # (device, inode) of the memfd → card, MiB
    memory: dict[tuple[int, int], tuple[int, int]]


def _look(pid: int, proc: Path, numbers: Mapping[tuple[int, int], int]) -> _Process:
    found = _Process(pid, set(), {})
    directory = proc / str(pid) / "fd"
    for fd in os.listdir(directory):  # noqa: PTH208 - thousands of fds; a Path each would triple the cost
        path = f"{directory}/{fd}"
        try:
            target = os.readlink(path)  # noqa: PTH115
            # Who plays terminals sees the guests of the labs on this machine, too; theirs are other cards.
            if not numbers and (node := _NODE.search(target)):
                if os.stat(path).st_rdev == NODE_RDEV:  # noqa: PTH116
                    found.cards.add(int(node[1]))
            elif numbers and target.startswith("/dev/pts/"):
                status = os.stat(path)  # noqa: PTH116
                # Every container has terminals of the same numbers, in a file system of its own.
                if (card := numbers.get((status.st_dev, status.st_rdev))) is not None:
                    found.cards.add(card)
            elif memory := _MEMORY.match(target):
                status = os.stat(path)  # noqa: PTH116
                found.memory[status.st_dev, status.st_ino] = (int(memory[1]), int(memory[2]))
        except OSError:
            continue  # closed in between
    return found


def _text(path: Path) -> str:
    try:
        return path.read_bytes().decode(errors="replace")
    except OSError:
        return ""


def _name(pid: int, proc: Path) -> str:
    """argv[0] as NVML reports it: what setproctitle wrote where it was used."""
    return _text(proc / str(pid) / "cmdline").split("\0")[0] or _text(proc / str(pid) / "comm").strip()


def _processes(proc: Path, numbers: Mapping[tuple[int, int], int]) -> Iterator[_Process]:
    for pid in sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit()):  # noqa: PTH208
        try:
            found = _look(pid, proc, numbers)
        except OSError:
            continue  # gone, or not ours to look at
        # Who plays the terminals holds them all.
        if (
            found.cards
            and not (numbers and pid == os.getpid())
            and _text(proc / str(pid) / "comm").strip() not in _LOOKERS
        ):
            yield found


def holders(proc: Path = Path("/proc"), numbers: Mapping[tuple[int, int], int] | None = None) -> list[Holder]:
    """Everyone on a card, by pid and card. `numbers` says which card a pseudo-terminal plays (nodes.lay_terminals).

    A card counts as held when its node is open. Memory is that of the memfds named servelab-gpu<card>-<MiB>, and
    512 MiB for who has none. A forked child shares its parent's memfds: it holds the node (fuser lists it) but has no
    memory of its own, so it is not listed, as the real driver does not list it.
    """
    result: list[Holder] = []
    counted: set[tuple[int, int]] = set()
    for process in _processes(proc, numbers or {}):
        name = _name(process.pid, proc)
        for card in sorted(process.cards):
            mine = {key: mib for key, (number, mib) in process.memory.items() if number == card}
            fresh = mine.keys() - counted
            counted |= fresh
            if fresh or not mine:
                result.append(Holder(process.pid, card, sum(mine[key] for key in fresh) if mine else CONTEXT_MIB, name))
    return result
