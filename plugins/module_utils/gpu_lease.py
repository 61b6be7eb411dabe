"""Leases: who works on which GPUs, so that two campaigns never clean each other away.

Advisory, and kept on the node, as that is where the guests meet: one small file per owner and guest below /run, which
a reboot empties. A lease says who has it (a process on a controller), for which guest, which cards, and when its owner
last gave a sign of life. It ends when it is released, or is stale when its owner is known to be dead (only the owner's
own machine can tell), when the node was booted since, or when it has expired and nobody of its guest is on its cards.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "servelab.lease/1"
DIRECTORY = "/run/servelab/leases"


class Leased(Exception):
    """The cards are somebody else's; `reasons` has a sentence for each lease in the way."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(" ".join(reasons))
        self.reasons = reasons


@dataclass(frozen=True)
class Owner:
    """A process on a controller, identified by `machine` (boot and PID namespace), `pid` and `start_time` (ticks)."""

    machine: str
    pid: int
    start_time: int
    who: str
    purpose: str

    @property
    def key(self) -> str:
        return f"{self.machine}:{self.pid}:{self.start_time}"


@dataclass(frozen=True)
class Lease:
    """`taken` in seconds since 1970, for people; `renewed` in seconds since the node's boot; `ttl` in seconds."""

    owner: Owner
    vmid: int | None
    gpus: list[int]
    taken: float
    renewed: float
    ttl: float
    boot_id: str
    schema: str = field(default=SCHEMA)

    @property
    def name(self) -> str:
        """The name of its file: one per owner and guest, so that taking it again renews it."""
        return hashlib.sha256(f"{self.owner.key}:{self.vmid}".encode()).hexdigest()[:16] + ".json"


def boot_id(proc: str = "/proc") -> str:
    return Path(proc, "sys/kernel/random/boot_id").read_text().strip()


def machine(proc: str = "/proc") -> str:
    """This boot and PID namespace: only within one do PIDs mean the same."""
    return f"{boot_id(proc)}/{os.readlink(f'{proc}/self/ns/pid')}"  # noqa: PTH115


def _now() -> float:
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def _parse(text: str) -> Lease | None:
    try:
        content = json.loads(text)
        owner = Owner(**content.pop("owner"))
        lease = Lease(owner=owner, **content)
    except (ValueError, TypeError, KeyError, AttributeError):
        return None
    return lease if lease.schema == SCHEMA else None


def _files(directory: str) -> dict[Path, Lease]:
    leases = {}
    for path in sorted(Path(directory).glob("*.json")):
        with contextlib.suppress(OSError):
            if lease := _parse(path.read_text()):
                leases[path] = lease
    return leases


def read(directory: str = DIRECTORY) -> list[Lease]:
    """Every lease that can be read, the oldest first. What is no lease is passed over: it can bind nobody."""
    return sorted(_files(directory).values(), key=lambda lease: lease.taken)


def stale(lease: Lease, dead: Iterable[str], holders: Iterable[Mapping[str, Any]], boot: str, now: float) -> str | None:
    """Why a lease binds nobody any more, or None.

    `dead`: keys of owners known to be dead; `holders`: what gpu_holders found on the node.
    """
    if lease.owner.key in set(dead):
        return "its owner is dead"
    if lease.boot_id != boot:
        return "the node was booted since"
    if now - lease.renewed <= lease.ttl:
        return None
    on_cards = [h for h in holders if h["vmid"] == lease.vmid and set(h["gpus"]) & set(lease.gpus)]
    return (
        None
        if on_cards
        else f"no sign of life for {now - lease.renewed:.0f} s, and nobody of its guest is on its cards"
    )


def describe(lease: Lease, now: float | None = None) -> str:
    """One line about a lease: what for, who, which guest, since when."""
    age = (_now() if now is None else now) - lease.renewed
    guest = f", for guest {lease.vmid}" if lease.vmid is not None else ""
    taken = time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(lease.taken))
    return (
        f"{lease.owner.purpose}, by {lease.owner.who} (PID {lease.owner.pid} there){guest}, taken {taken} UTC, "
        f"last sign of life {age:.0f} s ago"
    )


@contextlib.contextmanager
def _locked(directory: str) -> Iterator[Path]:
    """The directory, with nobody else changing it. The lock goes with the process, whatever becomes of it."""
    place = Path(directory)
    place.mkdir(parents=True, exist_ok=True)
    with (place / ".lock").open("a") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield place


def _numbers(gpus: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(gpus)))


def take(
    gpus: Iterable[int],
    owner: Owner,
    vmid: int | None,
    ttl: float,
    *,
    dead: Iterable[str] = (),
    holders: Iterable[Mapping[str, Any]] = (),
    by_force: bool = False,
    dry_run: bool = False,
    directory: str = DIRECTORY,
) -> dict[str, Any]:
    """Take the cards, or renew what this owner has for this guest. Leases of one owner do not exclude each other.

    → {"renewed": whether it was had before, "notes": [a sentence for each lease that was set aside]}.
    Raises Leased while others have one of the cards. `by_force` sets their leases aside too.
    """
    wanted, dead, holders = sorted(set(gpus)), list(dead), list(holders)
    boot, now = boot_id(), _now()
    mine = Lease(owner, vmid, wanted, time.time(), now, ttl, boot)
    notes: list[str] = []
    reasons: list[str] = []
    with contextlib.nullcontext(Path(directory)) if dry_run else _locked(directory) as place:
        renewed = False
        for path, other in _files(directory).items():
            if other.owner.key == owner.key:
                renewed = renewed or other.vmid == vmid
                if other.vmid == vmid:
                    mine = Lease(owner, vmid, wanted, other.taken, now, ttl, boot)
                continue
            common = set(other.gpus) & set(wanted)
            if not common:
                continue
            why = stale(other, dead, holders, boot, now) or ("it was to be broken" if by_force else None)
            if why is None:
                reasons.append(f"GPU {_numbers(common)} is leased: {describe(other, now)}.")
                continue
            notes.append(f"a lease on GPU {_numbers(common)} was set aside, as {why}: {describe(other, now)}")
            if not dry_run:
                path.unlink(missing_ok=True)
        if reasons:
            raise Leased(reasons)
        if not dry_run:
            half = place / f".{mine.name}.half"
            half.write_text(json.dumps(asdict(mine)) + "\n")
            half.replace(place / mine.name)
    return {"renewed": renewed, "notes": notes}


def release(owner: Owner, vmid: int | None, *, dry_run: bool = False, directory: str = DIRECTORY) -> bool:
    """Give back what this owner has for this guest; whether there was anything."""
    had = [path for path, one in _files(directory).items() if one.owner.key == owner.key and one.vmid == vmid]
    if had and not dry_run:
        with _locked(directory):
            for path in had:
                path.unlink(missing_ok=True)
    return bool(had)
