"""`pct create` and `pct destroy`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from . import schema, volumes
from .config import Config
from .edit import check_permission, network_value, require_device
from .errors import PctError
from .life import start
from .node import Node, check_lock
from .properties import DEV, FEATURES, ROOTFS
from .values import as_boolean, split_list

_DEFAULT_SIZE = "4"
_DEFAULTS = {"arch": "amd64", "memory": "512", "swap": "512"}
# From this version on systemd in an unprivileged container wants nesting.
_SYSTEMD_WANTS_NESTING = 232


@dataclass(frozen=True)
class Extras:
    """Options of create that are not kept in the configuration."""

    storage: str = "local"
    password: str | None = None
    keys: str | None = None
    start: bool = False


def _template(node: Node, name: str) -> tuple[str, Path]:
    """The archive's path as it is told, and where it lies."""
    shown = name
    if name.startswith("local:vztmpl/"):
        shown = f"/var/lib/vz/template/cache/{name.removeprefix('local:vztmpl/')}"
    return shown, node.root / shown.lstrip("/")


def create(node: Node, vmid: int, template: str, given: Mapping[str, str], extras: Extras) -> None:
    """Make a container from a template. Nothing is left of it when that fails."""
    stored = schema.verify(given)
    node.require_free(vmid)
    for key, value in sorted(stored.items()):
        if key.startswith("dev"):
            path = DEV.parse(value).get("path")
            if not path:
                raise PctError("Path has to be defined")
            require_device(node, path)
    rootfs = ROOTFS.parse(stored.get("rootfs", f"{extras.storage}:{_DEFAULT_SIZE}"))
    volumes.storage_of(node, rootfs["volume"])
    with node.locked(vmid):
        config = _config(vmid, stored)
        check_permission(node.user, config, given, [])
        warnings = _fill(node, vmid, config, rootfs, template)
        for key in sorted(key for key in config.settings if key.startswith("mp")):
            config.settings[key] = volumes.mount_value(node, vmid, config, config.settings[key])
        try:
            node.backend.set_up_access(vmid, extras.password, extras.keys)
        except PctError as error:
            node.backend.remove(vmid)
            raise PctError(f"unable to create CT {vmid} - {error}") from None
        node.save(vmid, config)
    if extras.start:
        start(node, vmid)
    if warnings:
        node.warn(f"Task finished with {warnings} warning(s)!\n")


def _config(vmid: int, stored: Mapping[str, str]) -> Config:
    settings = _DEFAULTS | {"hostname": f"CT{vmid}", "unprivileged": "1"} | dict(stored)
    if settings["unprivileged"] == "0":
        del settings["unprivileged"]
    for key in list(settings):
        if key.startswith("net"):
            settings[key] = network_value(settings[key])
    for key in {"nameserver", "searchdomain"} & settings.keys():
        settings[key] = " ".join(split_list(settings[key]))
    if "tags" in settings:
        settings["tags"] = ";".join(sorted({tag.lower() for tag in split_list(settings["tags"])}))
    environment = [entry for entry in settings.pop("env", "").split("\0") if entry]
    return Config(settings, environment=environment)


def _fill(node: Node, vmid: int, config: Config, rootfs: dict[str, str], template: str) -> int:
    """Make the root file system; the number of warnings told."""
    if made := volumes.allocate(node, vmid, config, rootfs["volume"]):
        rootfs = rootfs | made
    shown, archive = _template(node, template)
    try:
        if not archive.is_file():
            node.say(f"can't find file '{shown}'\n")
            raise PctError(f"can't find file '{shown}'")
        node.say(f"extracting archive '{shown}'\n")
        unpacked = node.backend.unpack(vmid, archive, config.unprivileged)
    except PctError as error:
        node.backend.remove(vmid)
        raise PctError(f"unable to create CT {vmid} - {error}") from None
    node.say(unpacked.transcript)
    node.say(f"Detected container architecture: {config.settings['arch']}\n")
    config.settings["rootfs"] = ROOTFS.print(rootfs)
    config.settings.setdefault("ostype", unpacked.ostype)
    features = FEATURES.parse(config.settings.get("features", ""))
    nesting = as_boolean(features.get("nesting", "0"))
    if config.unprivileged and unpacked.systemd >= _SYSTEMD_WANTS_NESTING and not nesting:
        node.say(f"WARN: Systemd {unpacked.systemd} detected. You may need to enable nesting.\n")
        return 1
    return 0


def destroy(node: Node, vmid: int, *, force: bool) -> None:
    """Delete a container and its volumes; directories of the node that it mounts stay."""
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        if config.settings.get("protection") == "1":
            raise PctError(f"can't remove CT {vmid} - protection mode enabled")
        if node.running(vmid):
            if not force:
                raise PctError(f"unable to destroy CT {vmid} - container is running")
            node.backend.stop(vmid)
        node.backend.remove(vmid)
        node.erase(vmid)
