"""Who uses an installed stack: the link to the one in use, a unit, or a process that was started from it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path

from .supervision import KINDS, supervisor


def unit_files(prefix: str) -> list[Path]:
    """The units of this machine's modes and router, whichever supervisor keeps them: it may have been another once."""
    places = [supervisor(kind, prefix).unit_file("servelab-any.service").parent for kind in KINDS]
    return sorted(file for place in places for file in place.glob("servelab-*.service") if file.is_file())


def users(
    stacks: Iterable[Path], current: Path | None, units: Iterable[Path], proc: Path = Path("/proc")
) -> dict[Path, list[str]]:
    """Stack → who uses it, in words; empty where nothing does.

    current: the link to the one in use, where there is one. units: unit files that may name a stack.
    """
    stacks = list(stacks)
    texts = [(unit.name, unit.read_bytes()) for unit in units]
    processes: dict[Path, list[str]] = {stack: [] for stack in stacks}
    for process in sorted(proc.glob("[0-9]*"), key=lambda path: int(path.name)):
        said = _said(process)
        for stack in stacks:
            if _names(said, stack):
                processes[stack].append(process.name)
    found = {}
    for stack in stacks:
        linked = current is not None and current.is_symlink() and current.resolve() == stack.resolve()
        found[stack] = [f"{current} names it"] if linked else []
        found[stack] += [f"{name} runs from it" for name, text in texts if _names(text, stack)]
        if pids := processes[stack]:
            found[stack].append(
                f"process {pids[0]} runs from it" if len(pids) == 1 else f"processes {', '.join(pids)} run from it"
            )
    return found


def _names(text: bytes, stack: Path) -> bool:
    """Whether a text names something in a stack. The kernel says the real path, a unit maybe one with links."""
    return any(f"{path}/".encode() in text for path in (stack, stack.resolve()))


def _said(process: Path) -> bytes:
    """All that a process names: its words, its environment, the files it loaded, where it is.

    Each for itself: a server may overwrite its words with a title, a stack may have no library to load, and of another
    user's process only the words can be read.
    """
    parts = []
    for name in ("cmdline", "environ", "maps"):
        with contextlib.suppress(OSError):
            parts.append((process / name).read_bytes())
    with contextlib.suppress(OSError):
        parts.append(f"{(process / 'cwd').readlink()}/".encode())
    return b"\0".join(parts)
