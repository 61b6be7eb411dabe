"""What dead servers leave beside the GPUs: shared memory, sockets, locks, and processes without a card.

Nothing with a living owner is touched: a file goes only when its name is one that these servers make, when nobody on
this machine has it open or mapped (by inode, so other mount namespaces count), when a PID in its name is nobody's, and
when it is not quite new. Where one process may not be looked at, nothing goes.
"""

# As in gpu_holders: many descriptors, so no Path objects.
# ruff: noqa: PTH115, PTH119, PTH123, PTH207, PTH208

from __future__ import annotations

import glob
import os
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .gpu_holders import (
    PROTECT,
    ancestors,
    cgroup_of,
    describe,
    guests_of,
    names_of,
    protection,
    stopped_units,
    unit_of,
)
from .gpu_policy import is_disposable
from .open_files import inode_of
from .ports import listening
from .supervision import Supervisor

# Seen in /dev/shm after servers had been killed. Python's own psm_* and sem.mp-* are not here: any program may have
# made them, and may still want them though it has them open no more.
SHARED_MEMORY = (
    re.compile(r"sgl_shm_mq_(?P<pid>\d+)_[0-9a-f]+"),  # the schedulers' message queue, 24 MiB
    re.compile(r"sglang_loads_[0-9a-f]+_[0-9a-f]+\.shm"),
    re.compile(r"sem\.loky-(?P<pid>\d+)-\w+"),  # compile workers
    re.compile(r"torch_(?P<pid>\d+)_\d+_\d+"),  # tensors and CUDA IPC counters of torch.multiprocessing
    re.compile(r"nccl-\w{6}"),
    re.compile(r"cuda\.shm\.[0-9a-f.]+"),
)
# ZeroMQ's ipc:// endpoints of SGLang have the names of temporary files.
_SOCKET = re.compile(r"tmp[a-z0-9_]{8}")
# torch's extension builder waits for ever for a lock whose file is there: only its existence counts.
JIT_LOCKS = ("/root/.cache/torch_extensions/*/*/lock", "/home/*/.cache/torch_extensions/*/*/lock")

OUR_PREFIX = "servelab-"
SHM, SOCKET, LOCK = "shared memory", "socket", "build lock"


@dataclass
class Leftover:
    """One file: `path`, `kind`, `bytes`; `kept`: why it must stay, or None."""

    path: str
    kind: str
    bytes: int
    key: tuple[int, int]
    kept: str | None = None

    def as_dict(self) -> dict[str, Any]:
        return {"path": self.path, "kind": self.kind, "bytes": self.bytes, "kept": self.kept}


@dataclass
class _Used:
    """What living processes have: inodes open or mapped, paths of bound sockets, and whether all could be looked at."""

    inodes: dict[tuple[int, int], int] = field(default_factory=dict)
    sockets: set[str] = field(default_factory=set)
    unreadable: list[int] = field(default_factory=list)


def _candidates(shm_dir: str, tmp_dir: str, jit_locks: Sequence[str], proc: str, min_age: float) -> Iterator[Leftover]:
    places = [(f"{shm_dir}/{name}", SHM) for name in _listed(shm_dir)]
    places += [(f"{tmp_dir}/{name}", SOCKET) for name in _listed(tmp_dir) if _SOCKET.fullmatch(name)]
    places += [(path, LOCK) for pattern in jit_locks for path in sorted(glob.glob(pattern))]
    for path, kind in places:
        made = None
        if kind == SHM:
            made = next((found for shape in SHARED_MEMORY if (found := shape.fullmatch(os.path.basename(path)))), None)
            if made is None:
                continue
        try:
            status = os.lstat(path)
        except OSError:
            continue
        if not (stat.S_ISSOCK if kind == SOCKET else stat.S_ISREG)(status.st_mode):
            continue
        one = Leftover(path, kind, status.st_size, (status.st_dev, status.st_ino))
        pid = (made.groupdict() if made else {}).get("pid")
        if pid and os.path.exists(f"{proc}/{pid}"):  # noqa: PTH110
            one.kept = f"PID {pid} lives"
        elif time.time() - status.st_ctime < min_age:
            one.kept = f"it is younger than {min_age:g} s"
        yield one


def _listed(directory: str) -> list[str]:
    try:
        return sorted(os.listdir(directory))
    except OSError:
        return []


def pids(proc: str = "/proc") -> list[int]:
    """Every process of this machine that can be seen."""
    return sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit())


def _bound(text: str) -> set[str]:
    """Paths of the sockets in the text of /proc/net/unix."""
    return {
        line.split(maxsplit=7)[7] for line in text.splitlines()[1:] if line.count(" ") >= 7 and len(line.split()) > 7
    }


def _used(proc: str, wanted: set[tuple[int, int]]) -> _Used:
    """Who of the living has the wanted inodes."""
    used, networks = _Used(), set()
    by_number = {f"{os.major(device):02x}:{os.minor(device):02x} {inode}": (device, inode) for device, inode in wanted}
    for pid in pids(proc):
        base = f"{proc}/{pid}"
        try:
            for descriptor in os.listdir(f"{base}/fd"):
                try:
                    if os.readlink(f"{base}/fd/{descriptor}")[:1] != "/":
                        continue
                    opened = inode_of(f"{base}/fd/{descriptor}")
                except FileNotFoundError:
                    continue
                if opened in wanted:
                    used.inodes[opened] = pid
            with open(f"{base}/maps", encoding="utf-8", errors="replace") as file:
                for line in file:
                    words = line.split(maxsplit=5)
                    if len(words) > 4 and (key := by_number.get(f"{words[3]} {words[4]}")):
                        used.inodes[key] = pid
            network = os.readlink(f"{base}/ns/net")
            if network not in networks:
                with open(f"{base}/net/unix", encoding="utf-8", errors="replace") as file:
                    used.sockets |= _bound(file.read())
                networks.add(network)
        except (FileNotFoundError, ProcessLookupError):
            continue  # exited in between
        except OSError:
            used.unreadable.append(pid)
    return used


def find(
    shm_dir: str = "/dev/shm",
    tmp_dir: str = "/tmp",
    jit_locks: Sequence[str] = JIT_LOCKS,
    proc: str = "/proc",
    min_age: float = 10.0,
) -> list[Leftover]:
    """Every file that such servers make; those with `kept` must stay, and it says why."""
    found = list(_candidates(shm_dir, tmp_dir, jit_locks, proc, min_age))
    if not any(one.kept is None for one in found):
        return found
    used = _used(proc, {one.key for one in found})
    for one in found:
        if one.kept:
            continue
        if one.key in used.inodes:
            one.kept = f"PID {used.inodes[one.key]} has it"
        elif one.kind == SOCKET and one.path in used.sockets:
            one.kept = "somebody listens on it"
        elif used.unreadable:
            one.kept = f"PID {used.unreadable[0]} could not be looked at"
    return found


def remove(found: Iterable[Leftover]) -> list[Leftover]:
    """Delete what need not be kept; those deleted. One whose inode is another by now is left."""
    gone = []
    for one in found:
        if one.kept:
            continue
        try:
            status = os.lstat(one.path)
            if (status.st_dev, status.st_ino) == one.key:
                os.unlink(one.path)  # noqa: PTH108
                gone.append(one)
        except FileNotFoundError:
            continue
        except OSError as error:
            one.kept = f"it cannot be deleted: {error.strerror}"
    return gone


def survivors(
    owners: Mapping[str, str],
    proc: str = "/proc",
    protect: Iterable[str] = PROTECT,
    unprotect: Iterable[str] = (),
    known: Mapping[int, str] | None = None,
    keeper: Supervisor | None = None,
) -> list[dict[str, Any]]:
    """Processes of units that nobody uses, GPU or not, in the form of a holder (without devices).

    `keeper` is the supervisor, by default systemd; `known`: the units that another than systemd knows, by pid; else the
    cgroup tells. A launcher that survived holds no card, but the port of the next server.
    """
    protect, unprotect, known = list(protect), list(unprotect), known or {}
    own, found = ancestors(os.getpid(), proc), []
    here = guests_of(_cgroup(proc, "self") or "")
    for pid in pids(proc):
        cgroup = _cgroup(proc, pid)
        # A node sees its guests' processes too. Their units are called as ours are, but only they know what runs there.
        if cgroup is None or guests_of(cgroup) != here:
            continue
        unit = known.get(pid) or unit_of(cgroup)
        if not str(unit).startswith(OUR_PREFIX):
            continue
        process = describe(pid, proc, set())
        if process is None or process["state"] == "Z":
            continue
        process |= {"unit": unit, "supervised": pid in known}
        process["protected"] = protection(process, names_of(pid, proc, process), own, protect, unprotect)
        if process["protected"] is None:
            found.append(process)
    # The note about who started a unit is gone when it was stopped in order; then the supervisor is asked.
    everyone = {**owners, **stopped_units(found, owners, keeper)}
    return [process for process in found if is_disposable(process, everyone)]


def _cgroup(proc: str, pid: int | str) -> str | None:
    try:
        with open(f"{proc}/{pid}/cgroup", encoding="utf-8", errors="replace") as file:
            return cgroup_of(file.read())
    except OSError:
        return None


def listeners(ports: Iterable[int], proc: str = "/proc") -> list[dict[str, Any]]:
    """Who listens on these TCP ports: processes in the form of a holder, with `port`. A listener that belongs to nobody
    visible has pid None."""
    sockets = {inode: port for inode, (port, _) in listening(set(ports), proc).items()}
    if not sockets:
        return []
    found: list[dict[str, Any]] = []
    seen: set[int] = set()
    for pid in pids(proc):
        for descriptor in _listed(f"{proc}/{pid}/fd"):
            try:
                target = os.readlink(f"{proc}/{pid}/fd/{descriptor}")
            except OSError:
                continue
            port = sockets.get(target.removeprefix("socket:[").removesuffix("]"))
            if port is not None and (process := describe(pid, proc, set())):
                found.append(process | {"port": port})
                seen.add(port)
                break
    found += [{"pid": None, "port": port, "command": "", "unit": None} for port in sorted(set(sockets.values()) - seen)]
    return found
