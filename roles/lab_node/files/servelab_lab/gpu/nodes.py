"""The device nodes that loading the driver makes, and what can be wrong with them after a boot."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from .cards import NODE_RDEV, cards

UVM_NODES = ("nvidia-uvm", "nvidia-uvm-tools")
HELPER_NODES = ("nvidiactl", *UVM_NODES)
# What may be wrong with a node: it is not there, it has another number than before, or somebody's redirection or bind
# mount made a regular file in its place.
MISSING, MOVED, FILE = "missing", "moved", "file"
# A driver's dynamic major is another one after a boot. /dev/autofs can be opened without any effect and, unlike
# /dev/null and its kin, by no container that is not allowed to. The last resort, /dev/urandom, has another minor only.
_OTHER_NUMBERS = (os.makedev(10, 235), os.makedev(1, 9))


def lay_terminals(count: int, dev: Path) -> dict[tuple[int, int], int]:
    """Nodes for who may not make any: pseudo-terminals that this process holds. (File system, device number) → card.

    The names are links to this process's descriptors, so that they lead nowhere when it is gone, and never to a
    terminal that somebody else got meanwhile.
    """
    dev.mkdir(parents=True, exist_ok=True)
    numbers: dict[tuple[int, int], int] = {}
    for name in [f"nvidia{card.minor}" for card in cards(count)] + list(HELPER_NODES):
        _master, slave = os.openpty()
        half = dev / f".{name}.half"
        half.unlink(missing_ok=True)
        half.symlink_to(f"/proc/{os.getpid()}/fd/{slave}")
        half.replace(dev / name)
        if found := re.fullmatch(r"nvidia(\d+)", name):
            status = os.fstat(slave)
            numbers[status.st_dev, status.st_rdev] = int(found[1])
    return numbers


def _opens(dev: Path, number: int) -> bool:
    trial = dev / f".servelab-trial-{os.getpid()}"
    try:
        os.mknod(trial, stat.S_IFCHR | 0o600, number)
        os.close(os.open(trial, os.O_RDWR))
    except OSError:
        return False
    finally:
        trial.unlink(missing_ok=True)
    return True


def other_number(dev: Path = Path("/dev")) -> int:
    """A device number other than the usual one that can be opened on this machine."""
    return next((number for number in _OTHER_NUMBERS if _opens(dev, number)), _OTHER_NUMBERS[-1])


def _is(path: Path, number: int | None) -> bool:
    """Whether there is a character device of this number, or with None a regular file."""
    try:
        found = path.lstat()
    except OSError:
        return False
    if number is None:
        return stat.S_ISREG(found.st_mode)
    return stat.S_ISCHR(found.st_mode) and found.st_rdev == number and stat.S_IMODE(found.st_mode) == 0o666


def lay(count: int, dev: Path, wrong: Mapping[str, str]) -> list[str]:
    """Bring the nodes of `count` cards to what the driver makes, `wrong` (name → MISSING, MOVED or FILE) included.

    The names of those that had to be changed. 0666, as the real driver's udev rules have it. Who holds a node that is
    replaced goes on holding it, and a guest keeps its own until it is started again.
    """
    changed = []
    for name in [f"nvidia{card.minor}" for card in cards(count)] + list(HELPER_NODES):
        node, how = dev / name, wrong.get(name)
        if how == MISSING:
            if node.exists():
                node.unlink()
                changed.append(name)
            continue
        number = None if how == FILE else other_number(dev) if how == MOVED else NODE_RDEV
        if _is(node, number):
            continue
        half = dev / f".{name}.half"
        half.unlink(missing_ok=True)
        if number is None:
            half.touch(mode=0o644)
        else:
            os.mknod(half, stat.S_IFCHR | 0o666, number)
            half.chmod(0o666)
        half.replace(node)
        changed.append(name)
    return changed
