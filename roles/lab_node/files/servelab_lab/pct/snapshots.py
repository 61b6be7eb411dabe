"""Snapshots in the configuration. Volumes are copied by storages that can; a plain directory cannot."""

from __future__ import annotations

from . import volumes
from .config import Config, Section
from .errors import PctError
from .node import Node, check_lock
from .show import require_snapshot

_CAPABLE = {"btrfs", "zfspool", "lvmthin", "rbd"}
# What belongs to the container itself, not to one of its states.
_NOT_COPIED = {"lock", "parent", "snaptime", "snapstate", "description", "digest", "template"}


def _state(config: Config) -> Section:
    state = config.copy()
    for key in list(state.settings):
        if key in _NOT_COPIED or key.startswith("unused"):
            del state.settings[key]
    return state


def _check_capable(node: Node, config: Config) -> None:
    for key, disk in volumes.disks(config):
        volume = disk.get("volume", "")
        storage = None if key.startswith("unused") else volumes.storage_of(node, volume)
        if not key.startswith("unused") and (storage is None or node.storages()[storage] not in _CAPABLE):
            raise PctError("snapshot feature is not available")


def take(node: Node, vmid: int, name: str, description: str | None) -> None:
    """`pct snapshot`."""
    if name == "current":
        raise PctError("unable to use snapshot name 'current' (reserved name)")
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        if name in config.snapshots:
            raise PctError(f"snapshot name '{name}' already used")
        _check_capable(node, config)
        snapshot = _state(config)
        snapshot.settings["snaptime"] = str(int(node.now()))
        if description is not None:
            snapshot.settings["description"] = description
        if "parent" in config.settings:
            snapshot.settings["parent"] = config.settings["parent"]
        config.snapshots[name] = snapshot
        config.settings["parent"] = name
        node.save(vmid, config)


def roll_back(node: Node, vmid: int, name: str) -> None:
    """`pct rollback`: a running container is stopped for it."""
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        snapshot = require_snapshot(config, name)
        if node.running(vmid):
            node.backend.stop(vmid)
        state = snapshot.copy()
        for key in ("snaptime", "snapstate", "description"):
            state.settings.pop(key, None)
        state.settings["parent"] = name
        kept = {key: value for key, value in config.settings.items() if key.startswith("unused")}
        restored = Config(state.settings | kept, state.raw, state.environment, snapshots=config.snapshots)
        node.save(vmid, restored)


def remove(node: Node, vmid: int, name: str) -> None:
    """`pct delsnapshot`: children move up to the parent."""
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        parent = require_snapshot(config, name).settings.get("parent")
        del config.snapshots[name]
        for section in [config, *config.snapshots.values()]:
            if section.settings.get("parent") == name:
                del section.settings["parent"]
                if parent is not None:
                    section.settings["parent"] = parent
        node.save(vmid, config)
