"""Read and edit the configuration file of a Proxmox container, /etc/pve/lxc/<vmid>.conf.

The file holds the running configuration first, then what waits for a restart under [pve:pending], then one
section for each snapshot. Sections repeat the running keys, so a line-wise "last one wins" reads a snapshot, and an
appended line lands inside one. Everything here keeps the sections apart.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["GuestConf", "RawLine", "edit_raw", "parse_conf"]

RawLine = tuple[str, str]
"""One low-level LXC line of the running section: its key (lxc.prlimit.memlock) and its value."""

_SECTION = re.compile(r"^\[\s*(.+?)\s*\]\s*$")
_RAW = re.compile(r"^(lxc\.[a-z0-9_\-.]+)(?::|\s*=)\s*(.*?)\s*$")
_OPTION = re.compile(r"^([a-z][a-z_]*\d*):\s*(.*?)\s*$")

# Keys of which LXC accepts many lines. For all others one line is the value, and a second would contradict it.
_REPEATABLE = re.compile(
    r"^lxc\.(mount\.entry|cgroup2?\.devices\.(allow|deny)|hook\..+|environment(\..+)?|idmap|cap\.(drop|keep)|include)$"
)


@dataclass(frozen=True)
class GuestConf:
    """A parsed configuration file.

    current: options that are in force; raw: lxc.* lines of the running section, in order;
    pending, pending_delete: what the next restart will set and remove; snapshots: their names;
    digest: what `pct set --digest` expects, the SHA-1 of the file.
    """

    current: dict[str, str] = field(default_factory=dict)
    raw: list[RawLine] = field(default_factory=list)
    pending: dict[str, str] = field(default_factory=dict)
    pending_delete: list[str] = field(default_factory=list)
    snapshots: list[str] = field(default_factory=list)
    digest: str = ""

    @property
    def planned(self) -> dict[str, str]:
        """The options after the next restart. Where a key is both pending and to be deleted, Proxmox sets it."""
        kept = {key: value for key, value in self.current.items() if key not in self.pending_delete}
        return {**kept, **self.pending}


def parse_conf(text: str) -> GuestConf:
    """Parse the text of a configuration file. Lines that Proxmox itself would not understand are passed over."""
    current: dict[str, str] = {}
    raw: list[RawLine] = []
    pending: dict[str, str] = {}
    pending_delete: list[str] = []
    snapshots: list[str] = []
    section: str | None = None
    for line in text.splitlines():
        if line.startswith("#"):
            continue  # the description, URL-encoded; it may look like an option
        if header := _SECTION.match(line):
            section = header[1]
            if section.lower() != "pve:pending":
                snapshots.append(section)
            continue
        if section is None and (match := _RAW.match(line)):
            raw.append((match[1], match[2]))
        elif section is None and (match := _OPTION.match(line)):
            current[match[1]] = match[2]
        elif section is not None and section.lower() == "pve:pending" and (match := _OPTION.match(line)):
            if match[1] == "delete":
                pending_delete += [name.lstrip("!") for name in re.split(r"[,;\s]+", match[2]) if name]
            else:
                pending[match[1]] = match[2]
    # pct keeps the digest of the bytes on disk; surrogateescape keeps what is not UTF-8 as it was.
    digest = hashlib.sha1(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()
    return GuestConf(current, raw, pending, pending_delete, snapshots, digest)


def edit_raw(text: str, wanted: Iterable[RawLine]) -> str:
    """Return `text` with the wanted lxc.* lines in its running section; everything else stays byte for byte.

    A repeatable key gains the line if it is missing; any other ends with just the wanted value. A lxc.mount.entry takes
    the place of one with the same target: what is mounted there twice is hidden, and /dev/shm would keep its old size.
    """
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if _SECTION.match(line)), len(lines))
    running, rest = lines[:end], lines[end:]
    for key, value in wanted:
        rendered = f"{key}: {value}\n"
        same_key = [i for i, line in enumerate(running) if _key_of(line) == key]
        has_value = [i for i in same_key if _value_of(running[i]) == value]
        if key == "lxc.mount.entry":
            same_key = [i for i in same_key if _target(_value_of(running[i])) == _target(value)]
        elif _REPEATABLE.match(key):
            if not has_value:
                _append(running, rendered)
            continue
        if not same_key:
            _append(running, rendered)
            continue
        keep = has_value[0] if has_value else same_key[0]
        if not has_value:
            running[keep] = rendered
        running = [line for i, line in enumerate(running) if i == keep or i not in same_key]
    return "".join(running + rest)


def _append(running: list[str], rendered: str) -> None:
    """Put a line at the end of the running section, before the blank lines that part it from what follows."""
    last = len(running)
    while last and not running[last - 1].strip():
        last -= 1
    if last and not running[last - 1].endswith("\n"):
        running[last - 1] += "\n"
    running.insert(last, rendered)


def _target(entry: str | None) -> str:
    """Where a mount entry mounts: its second field, with or without the leading slash."""
    fields = (entry or "").split()
    return fields[1].strip("/") if len(fields) > 1 else ""


def _key_of(line: str) -> str | None:
    match = _RAW.match(line)
    return match[1] if match else None


def _value_of(line: str) -> str | None:
    match = _RAW.match(line)
    return match[2] if match else None
