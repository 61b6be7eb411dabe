"""Which processes hold a GPU, read from /proc.

A holder is a process with an open file (or a mapping) whose device number is that of an NVIDIA device node. The number
is what counts, not the path: `fuser /dev/nvidia0` compares inodes, so on a node it misses a holder inside a guest,
whose /dev/nvidia0 is another inode. Where a number says too little (the lab gives all its nodes one harmless number)
the name behind the descriptor decides.
"""

# A scan looks at up to a million descriptors; a Path object for each would triple its time.
# ruff: noqa: PTH115, PTH119, PTH123, PTH208

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import pwd
import re
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .open_files import CharacterDevice, character_device, character_devices
from .redact import redact, redact_value
from .supervision import SuperviseError, Supervisor, Systemd, supervisor

# Programs that open GPU nodes without computing, or that a person would not forgive us for killing. Shell patterns.
PROTECT = (
    "nvidia-persistenced",
    "nvidia-fabricmanager",
    "nv-fabricmanager",
    "nv-hostengine",
    "nvidia-smi",
    "nvidia_gpu_exporter",
    "nvidia_gpu_prometheus_exporter",
    "dcgm-exporter",
    "dcgmi",
    "netdata",
    "telegraf",
    "zabbix_agent*",
    "nvtop",
    "nvitop",
    "Xorg",
    "Xwayland",
    "gnome-shell",
    "gnome-session*",
    "kwin_wayland",
    "kwin_x11",
    "plasmashell",
    "sway",
    "weston",
    "systemd",
    "systemd-*",
    "(sd-pam)",
    "init",
    "sshd",
    "sshd-session",
    "sshd-auth",
)
# What unit_owners() says of a unit of ours that is not running while processes of its are still there.
STOPPED = "stopped"
LISTED = "on the protect list"
OWN = "part of this connection"
INIT = "the machine's first process"

# Processes for each worker of a scan, below which another one costs more than it brings; and how many there may be.
SHARE, MAX_WORKERS = 400, 16

# A command line longer than this helps nobody in a table.
COMMAND_LENGTH = 400
_COMM_LENGTH = 15  # the kernel cuts the name of a task here
_DELETED = " (deleted)"
_CAPS = ("nvidia-caps", "nvidia-caps-imex-channels")
_GPU_NODE = re.compile(r"nvidia(\d+)")
_DRIVER = re.compile(r"nvidia(?:ctl|-[a-z-]+)?")
_GUEST = re.compile(r"(?:^|/)lxc(?:\.payload\.|/)(\d+)(?=/|$)")
_OUR_UNIT = re.compile(r"servelab-[^/]+\.service")
_UNIT = re.compile(r"[^/]+\.(?:service|scope)")
_MAPPED = re.compile(rb"^([0-9a-f]+-[0-9a-f]+) \S+ \S+ \S+ \S+ +(\S*/nvidia[^/\n]*)$", re.M)


@dataclass
class Nodes:
    """The NVIDIA device nodes of this machine, by number and by inode."""

    paths: list[str] = field(default_factory=list)
    # A regular file under a node's name: what a bind mount with create=file leaves when the node was missing.
    not_devices: list[str] = field(default_factory=list)
    by_number: dict[int, set[str]] = field(default_factory=dict)
    by_inode: dict[tuple[int, int], str] = field(default_factory=dict)
    # Majors that belong to the NVIDIA driver, from /proc/devices (they change from boot to boot).
    majors: dict[int, str] = field(default_factory=dict)

    @property
    def gpus(self) -> list[int]:
        """Numbers N of the nodes /dev/nvidiaN: minors, the same on node and guest, unlike nvidia-smi's index."""
        return sorted(int(m[1]) for path in self.paths if (m := _GPU_NODE.fullmatch(os.path.basename(path))))


def nvidia_majors(proc_devices: str) -> dict[int, str]:
    """Character majors of the NVIDIA driver in the text of /proc/devices. Lines may share a major (195 has three)."""
    majors: dict[int, str] = {}
    for line in proc_devices.partition("Block devices:")[0].splitlines():
        number, _, name = line.strip().partition(" ")
        if number.isdigit() and _DRIVER.fullmatch(name):
            # "nvidia" names the cards themselves, so it wins over nvidiactl and nvidia-modeset on the same major.
            majors[int(number)] = "nvidia" if "nvidia" in (name, majors.get(int(number))) else name
    return majors


def find_nodes(device_dir: str = "/dev", proc: str = "/proc") -> Nodes:
    """Every NVIDIA device node below `device_dir`."""
    found = Nodes(majors=nvidia_majors(_text(f"{proc}/devices")))
    for directory in (Path(device_dir), *(Path(device_dir, caps) for caps in _CAPS)):
        for path in sorted(directory.glob("nvidia*")):
            try:
                status = path.stat()
            except OSError:
                continue
            if stat.S_ISCHR(status.st_mode):
                found.paths.append(str(path))
                found.by_number.setdefault(status.st_rdev, set()).add(path.name)
                found.by_inode[status.st_dev, status.st_ino] = path.name
            elif not stat.S_ISDIR(status.st_mode):
                found.not_devices.append(str(path))
    return found


def _node_behind(nodes: Nodes, device: CharacterDevice, path: str, place: int | None = None) -> str | None:
    """The name of the node behind a link of /proc (an open file or a mapping), or None when it is no NVIDIA device."""
    names = nodes.by_number.get(device.number, set())
    major = os.major(device.number)
    if major in nodes.majors:
        if len(names) == 1:
            return next(iter(names))
        if not names:  # the driver's number without a node here: deleted, or only in another namespace
            minor = os.minor(device.number)
            return f"nvidia{minor}" if nodes.majors[major] == "nvidia" and minor < 254 else f"{major}:{minor}"
    if not names:
        return None
    # The number is shared, by several nodes or with a foreign device such as /dev/full: then the name decides.
    if name := nodes.by_inode.get(device.inode):
        return name
    name = os.path.basename(os.readlink(path, dir_fd=place).removesuffix(_DELETED))
    return name if name in names else None


def _fd_directories(pid_dir: str) -> Iterator[str]:
    yield f"{pid_dir}/fd"
    # Threads share the descriptors, except that a dead first thread (state Z) has lost them while the others live.
    stat_fields = _text(f"{pid_dir}/stat").rpartition(")")[2].split()
    if stat_fields[:1] == ["Z"] and int(stat_fields[17]) > 1:
        for task in os.listdir(f"{pid_dir}/task"):
            yield f"{pid_dir}/task/{task}/fd"


def _open_nodes(nodes: Nodes, pid_dir: str) -> set[str]:
    """Names of the nodes a process holds open. Raises PermissionError when it may not be looked at."""
    held: set[str] = set()
    for directory in _fd_directories(pid_dir):
        # Names relative to an open directory: a tenth of the time is the kernel's way from / down to it.
        place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
        try:
            descriptors = os.listdir(place)
            for descriptor, device in character_devices(place, descriptors):
                if name := _node_opened(nodes, place, descriptor, device):
                    held.add(name)
        finally:
            os.close(place)
        if descriptors:
            break  # the ordinary case: no need to look at single threads
    return held


def _node_opened(nodes: Nodes, place: int, descriptor: str, device: CharacterDevice | OSError) -> str | None:
    """The name of the node behind one descriptor; None when it is none, or closed by now."""
    with contextlib.suppress(FileNotFoundError):
        if isinstance(device, CharacterDevice):
            return _node_behind(nodes, device, descriptor, place)
        # Seen on files of a user's FUSE mount. No device can be opened there, so only a node's name alarms.
        if os.path.basename(os.readlink(descriptor, dir_fd=place)).startswith("nvidia"):
            raise device
    return None


def _mapped_nodes(nodes: Nodes, pid_dir: str) -> set[str]:
    """Names of the nodes a process maps; it may have closed the descriptor."""
    try:
        with open(f"{pid_dir}/maps", "rb") as file:
            maps = file.read()
    except (FileNotFoundError, ProcessLookupError):
        return set()
    held = set()
    for match in _MAPPED.finditer(maps) if b"/nvidia" in maps else ():
        mapped = f"{pid_dir}/map_files/{match[1].decode()}"
        try:
            device = character_device(mapped)
            name = _node_behind(nodes, device, mapped) if device else None
        except OSError:  # map_files needs more rights than maps
            base = os.path.basename(os.fsdecode(match[2]).removesuffix(_DELETED))
            name = base if any(base in names for names in nodes.by_number.values()) else None
        if name:
            held.add(name)
    return held


def _text(path: str) -> str:
    try:
        with open(path, "rb") as file:
            return file.read().decode(errors="replace")
    except OSError:
        return ""


def guests_of(cgroup: str) -> list[int]:
    """The guests of a cgroup path as the node sees it (/lxc/129/ns/…, /lxc.payload.129/…), the outermost first: more
    than one where guests carry guests, none for the node's own."""
    return [int(vmid) for vmid in _GUEST.findall(cgroup)]


def guest_of(cgroup: str) -> int | None:
    """The node's guest of a cgroup path; None: the node's own."""
    return next(iter(guests_of(cgroup)), None)


def inside_guest(cgroup: str) -> str:
    """A cgroup path without the part that says which guest: what the guest itself sees of it, or nearly (/ns/…)."""
    return cgroup[found.end() :] if (found := _GUEST.search(cgroup)) else cgroup


def unit_of(cgroup: str) -> str | None:
    """The systemd unit of a cgroup path: the system manager's, so that no user unit can pass for one of ours."""
    unit = _UNIT.search(inside_guest(cgroup))
    return unit[0] if unit else None


def cgroup_of(text: str) -> str:
    """The telling path in the text of /proc/PID/cgroup: cgroup2's, or systemd's own tree on a machine with both."""
    paths = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        paths[controllers] = path
    unified, own = paths.get("", ""), paths.get("name=systemd", "")
    return own if own.strip("/") and not unified.strip("/") else unified or own


def start_time(pid: int, proc: str = "/proc") -> int | None:
    """When a process started, in clock ticks since boot (identifies it, with its PID); None: no such process."""
    fields = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
    return int(fields[19]) if len(fields) > 19 else None


def ancestors(pid: int, proc: str = "/proc") -> set[int]:
    """`pid` and all its parents but the first process: what must live for this very connection to live."""
    line: set[int] = set()
    while pid > 1 and pid not in line:
        line.add(pid)
        fields = _text(f"{proc}/{pid}/stat").rpartition(")")[2].split()
        pid = int(fields[1]) if len(fields) > 1 else 0
    return line


def is_listed(names: Iterable[str], patterns: Iterable[str]) -> str | None:
    """The first pattern that matches one of a process's names. A name may have been cut to 15 characters."""
    names = [name for name in names if name]
    for pattern in patterns:
        if any(
            fnmatch.fnmatchcase(name, pattern) or (len(name) == _COMM_LENGTH and pattern[:_COMM_LENGTH] == name)
            for name in names
        ):
            return pattern
    return None


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)  # a guest's user, seen from the node


def describe(pid: int, proc: str, held: set[str]) -> dict[str, Any] | None:
    """Everything about one holder but its protection; None when it has exited meanwhile."""
    base = f"{proc}/{pid}"
    status = dict(line.split(":", 1) for line in _text(f"{base}/status").splitlines() if ":" in line)
    started = start_time(pid, proc)
    if not status or started is None:
        return None
    words = [word for word in _text(f"{base}/cmdline").split("\0") if word]
    namespaces = [int(number) for number in status.get("NSpid", str(pid)).split()]
    cgroup = cgroup_of(_text(f"{base}/cgroup"))
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - started / os.sysconf("SC_CLK_TCK")
    return {
        "pid": pid,
        "ns_pid": namespaces[-1],
        "ns_pids": namespaces,
        "ppid": int(status["PPid"]),
        "parent": {"pid": int(status["PPid"]), "name": _text(f"{proc}/{status['PPid'].strip()}/comm").strip()},
        "start_time": started,
        "since": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(time.time() - age)),
        "vmid": guest_of(cgroup),
        "unit": unit_of(cgroup),
        "cgroup": cgroup,
        "user": _user(int(status["Uid"].split()[1])),
        "name": status["Name"].strip(),
        "command": redact(" ".join(redact_value(words)))[:COMMAND_LENGTH] or f"[{status['Name'].strip()}]",
        "devices": sorted(held),
        "gpus": sorted(int(m[1]) for name in held if (m := _GPU_NODE.fullmatch(name))),
        "state": status["State"].split()[0],
    }


def names_of(pid: int, proc: str, holder: dict[str, Any]) -> list[str]:
    try:
        program = os.path.basename(os.readlink(f"{proc}/{pid}/exe")).removesuffix(_DELETED)
    except OSError:
        program = ""
    return [holder["name"], program, os.path.basename(holder["command"].split(" ", 1)[0])]


def protection(
    process: dict[str, Any], names: list[str], own: set[int], protect: Iterable[str], unprotect: Iterable[str]
) -> str | None:
    """Why a process must not be signalled, or None. `own`: this connection's PIDs."""
    if process["pid"] in own:
        return OWN
    if process["pid"] == 1:
        return INIT
    if not is_listed(names, unprotect) and (pattern := is_listed(names, protect)):
        return f"{LISTED}: {pattern}"
    return None


def _look_at(nodes: Nodes, proc: str, pids: Iterable[int]) -> list[tuple[int, list[str] | None]]:
    """(PID, names of the nodes it has, or None when it may not be looked at) for those that have any."""
    found: list[tuple[int, list[str] | None]] = []
    for pid in pids:
        base = f"{proc}/{pid}"
        try:
            held = _open_nodes(nodes, base) | _mapped_nodes(nodes, base)
        except (FileNotFoundError, ProcessLookupError):
            continue  # exited in between
        except OSError:
            found.append((pid, None))
            continue
        if held:
            found.append((pid, sorted(held)))
    return found


def _look_at_all(nodes: Nodes, proc: str, pids: list[int]) -> list[tuple[int, list[str] | None]]:
    """The same, by several processes where there are many to look at: nearly all of the time is the kernel's."""
    count = min(len(os.sched_getaffinity(0)), MAX_WORKERS, len(pids) // SHARE)
    if count < 2:
        return _look_at(nodes, proc, pids)
    # Neighbours are alike (the workers of one server), so each gets every n-th.
    shares = [pids[number::count] for number in range(count)]
    workers = []
    for share in shares[1:]:
        reading, writing = os.pipe()
        worker = os.fork()
        if worker == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.close(reading)
                with os.fdopen(writing, "w") as pipe:
                    json.dump(_look_at(nodes, proc, share), pipe)
                status = 0
            os._exit(status)
        os.close(writing)
        workers.append((worker, reading, share))
    found = _look_at(nodes, proc, shares[0])
    for worker, reading, share in workers:
        with os.fdopen(reading) as pipe:
            answer = pipe.read()
        _, status = os.waitpid(worker, 0)
        # A worker that failed has seen nobody, which is not "nobody".
        found += [(pid, held) for pid, held in json.loads(answer)] if status == 0 else _look_at(nodes, proc, share)
    return sorted(found, key=lambda one: one[0])


def in_container() -> bool:
    """Whether this machine is a container, and so sees its own processes only."""
    return Path("/run/systemd/container").exists() or b"container=" in _text("/proc/1/environ").encode()


def scan(
    device_dir: str = "/dev",
    proc: str = "/proc",
    view: str = "auto",
    protect: Iterable[str] = PROTECT,
    unprotect: Iterable[str] = (),
) -> dict[str, Any]:
    """Everyone who holds an NVIDIA device node on this machine.

    `view` is "node" (all processes of all guests are visible), "guest" (only this namespace's) or "auto".
    → {"holders": [...], "complete": False when some process could not be looked at, "unreadable", "view",
       "partial": True in a guest, "nodes": [path, …], "gpus": [N of /dev/nvidiaN, …], "not_devices": [path, …]};
    "unreadable" is [{"pid", "name"}, …]. A process that exits during the scan is no holder. PIDs are those of this
    machine's namespace.
    """
    nodes = find_nodes(device_dir, proc)
    protect, unprotect = list(protect), list(unprotect)
    own = ancestors(os.getpid(), proc)
    holders: list[dict[str, Any]] = []
    unreadable: list[dict[str, Any]] = []
    for pid, held in _look_at_all(nodes, proc, sorted(int(entry) for entry in os.listdir(proc) if entry.isdigit())):
        if held is None:
            # Root may be kept from an init that has more rights. Who is on the list may hold a card, so nothing is lost
            # by not seeing whether it does: its memory would be seen.
            name = _text(f"{proc}/{pid}/comm").strip()
            if is_listed([name], unprotect) or not is_listed([name], protect):
                unreadable.append({"pid": pid, "name": name})
            continue
        holder = describe(pid, proc, set(held))
        if holder is None:
            continue
        holder["protected"] = protection(holder, names_of(pid, proc, holder), own, protect, unprotect)
        holders.append(holder)
    view = view if view != "auto" else "guest" if in_container() else "node"
    return {
        "holders": holders,
        "complete": not unreadable,
        "unreadable": unreadable,
        "view": view,
        "partial": view == "guest",
        "nodes": nodes.paths,
        "gpus": nodes.gpus,
        "not_devices": nodes.not_devices,
    }


def attribute(holders: Iterable[dict[str, Any]], keeper: Supervisor) -> None:
    """Say of each holder (as scan() gives them) how its unit is stopped, and name the unit where no cgroup does."""
    holders = list(holders)
    known = keeper.units_of([holder["pid"] for holder in holders])
    for holder in holders:
        holder["supervised"] = holder["pid"] in known
        holder["unit"] = known.get(holder["pid"], holder["unit"])
        ours = holder["supervised"] or isinstance(keeper, Systemd)
        holder["stop"] = keeper.stop_hint(holder["unit"]) if holder["unit"] and ours else None


def unit_owners(
    directory: str = "/run/servelab", holders: Iterable[dict[str, Any]] = (), keeper: Supervisor | None = None
) -> dict[str, str]:
    """Who started our units: {"servelab-baseline.service": "bench", "prove" or "serve"}, from <mode>.owner files.

    Such a note goes with the unit. So a holder in a unit of ours without one is looked up: when the supervisor (by
    default systemd) says that the unit does not run, its owner is "stopped", and what is there survived its server.
    """
    keeper = keeper or supervisor("systemd")
    owners = {
        f"servelab-{path.stem}.service": _text(str(path)).strip() for path in sorted(Path(directory).glob("*.owner"))
    }
    return owners | stopped_units(holders, owners, keeper)


def stopped_units(
    processes: Iterable[dict[str, Any]], known: Iterable[str] = (), keeper: Supervisor | None = None
) -> dict[str, str]:
    """{unit: "stopped"} for each unit of ours that these processes are in and that does not run, but the `known`."""
    keeper = keeper or supervisor("systemd")
    units = sorted({str(process["unit"]) for process in processes} - set(known))
    return {unit: STOPPED for unit in units if _OUR_UNIT.fullmatch(unit) and not _runs(unit, keeper)}


def _runs(unit: str, keeper: Supervisor) -> bool:
    """Whether a unit runs. Where nobody can be asked, yes: that harms nobody."""
    try:
        return keeper.show(unit).get("ActiveState") not in ("inactive", "failed")
    except (OSError, SuperviseError):
        return True
