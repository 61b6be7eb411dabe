"""Disks and directories of a container: rootfs and mp[n]."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

from .config import Config
from .errors import PctError
from .node import Node
from .properties import MOUNT, ROOTFS

_NEW = re.compile(r"([^:/\s]+):(\d+(?:\.\d+)?)$")
_VOLUME = re.compile(r"([^:/\s]+):(.+)$")
_DISK = re.compile(r"vm-\d+-disk-(\d+)\.raw$")
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
# ext4 keeps copies of its superblock in groups 1 and powers of 3, 5 and 7.
_GROUP_BLOCKS, _BLOCK = 32768, 4096


def size_in_bytes(text: str) -> int:
    """Bytes of "1536M"."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    if not match:
        raise PctError(f"unable to parse size '{text}'")
    return int(float(match[1]) * _UNITS[match[2]])


def size_as_text(size: int) -> str:
    """The largest unit that divides it."""
    for unit in ("T", "G", "M", "K"):
        if size % _UNITS[unit] == 0:
            return f"{size // _UNITS[unit]}{unit}"
    return str(size)


def kind(volume: str) -> str:
    """bind (a directory of the node), device, or volume (of a storage)."""
    if volume.startswith("/dev/"):
        return "device"
    return "bind" if volume.startswith("/") else "volume"


def disks(config: Config) -> Iterator[tuple[str, dict[str, str]]]:
    """Key and properties of every rootfs, mp[n] and unused[n]."""
    for key, value in config.settings.items():
        if re.fullmatch(r"rootfs|mp\d+|unused\d+", key):
            yield key, (MOUNT if key.startswith("mp") else ROOTFS).parse(value)


def storage_of(node: Node, volume: str) -> str | None:
    """The storage a volume or an allocation names; None for a path. Raises when there is no such storage."""
    match = _NEW.match(volume) or _VOLUME.match(volume)
    if kind(volume) != "volume" or not match:
        return None
    node.require_storage(match[1])
    return match[1]


def _mkfs_words(size: int) -> str:
    blocks = size // _BLOCK
    powers = {base**exponent for base in (3, 5, 7) for exponent in range(12)}
    copies = sorted(group * _GROUP_BLOCKS for group in powers if group * _GROUP_BLOCKS < blocks)
    return (
        f"Creating filesystem with {blocks} 4k blocks and {blocks // 4} inodes\n"
        f"Filesystem UUID: {uuid.uuid4()}\n"
        f"Superblock backups stored on blocks: \n\t{', '.join(map(str, copies))}\n"
    )


def allocate(node: Node, vmid: int, config: Config, volume: str) -> dict[str, str] | None:
    """Give `storage:GiB` a name, telling what mkfs tells; volume and size. None when `volume` asks for nothing new."""
    match = _NEW.match(volume)
    if not match:
        return None
    node.require_storage(match[1])
    size = int(float(match[2]) * _UNITS["G"])
    taken = {int(found[1]) for _, disk in disks(config) if (found := _DISK.search(disk.get("volume", "")))}
    number = next(i for i in range(1000) if i not in taken)
    node.say(_mkfs_words(size))
    return {"volume": f"{match[1]}:{vmid}/vm-{vmid}-disk-{number}.raw", "size": size_as_text(size)}


def set_aside(config: Config, key: str, *, replaced_by: str | None = None) -> None:
    """Keep the volume behind `key` as unused[n] when nothing else uses it."""
    volume = MOUNT.parse(config.settings[key]).get("volume", "")
    if kind(volume) != "volume" or volume == replaced_by:
        return
    if any(other != key and disk.get("volume") == volume for other, disk in disks(config)):
        return
    number = next(i for i in range(256) if f"unused{i}" not in config.settings)
    config.settings[f"unused{number}"] = volume


def mount_value(node: Node, vmid: int, config: Config, value: str) -> str:
    """A new mp[n] as it is stored; a new volume is made for `storage:GiB`."""
    wanted = MOUNT.parse(value)
    if made := allocate(node, vmid, config, wanted["volume"]):
        node.backend.allocate(vmid, made["volume"], config.unprivileged)
        wanted |= made
    elif kind(wanted["volume"]) == "volume":
        known = [disk["size"] for _, disk in disks(config) if disk.get("volume") == wanted["volume"] and "size" in disk]
        if known:
            wanted["size"] = known[0]
    return MOUNT.print(wanted)
