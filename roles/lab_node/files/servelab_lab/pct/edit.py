"""`pct set`: what is changed at once, what waits for the next start, and what is refused."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence

from . import schema, volumes
from .config import Config
from .errors import BadParameters, PctError
from .node import Node, check_lock
from .properties import DEV, FEATURES, MOUNT, NET, ROOTFS
from .values import split_list

_REQUIRED = ("memory", "rootfs", "ostype")
# What a running container takes at once without being touched.
_AT_ONCE = frozenset(
    {
        *("cores", "cpulimit", "cpuunits", "description", "hookscript", "hostname", "lock", "memory"),
        *("onboot", "protection", "startup", "swap", "tags"),
    }
)


class _Wait(Exception):
    """This change has to wait for the next start."""


def update(
    node: Node,
    vmid: int,
    given: Mapping[str, str],
    deletes: Sequence[str] = (),
    reverts: Sequence[str] = (),
    digest: str | None = None,
) -> None:
    """Change a container's configuration. Raises PctError; something may have been written all the same, as with the
    real one."""
    if not given and not deletes and not reverts:
        raise PctError("no options specified")
    _check_names(given, deletes, reverts)
    stored = schema.verify(given)
    _check_devices(node, given)
    with node.locked(vmid):
        config = node.load(vmid, quiet=True)
        check_permission(node.user, config, given, deletes)
        check_lock(config)
        if digest is not None and digest != config.digest:
            raise PctError("detected modified configuration - file changed by other user? Try again.")
        _queue(node, vmid, config, stored, deletes, reverts)
        touched = {*stored, *deletes}
        if node.running(vmid):
            _apply_running(node, vmid, config, touched)
        else:
            apply_pending(node, vmid, config, touched)
        node.save(vmid, config)
        # The real one reads the file twice more, and complains each time.
        node.load(vmid)
        check_usable(node, node.load(vmid))


def _check_names(given: Mapping[str, str], deletes: Sequence[str], reverts: Sequence[str]) -> None:
    for key in deletes:
        if key in given:
            raise BadParameters({"delete": f"you can't use '-{key}' and -delete {key}' at the same time"})
        if schema.option(key) is None:
            raise BadParameters({"delete": f"unknown option '{key}'"})
    for key in reverts:
        if schema.option(key) is None:
            raise BadParameters({"revert": f"unknown option '{key}'"})


def _check_devices(node: Node, given: Mapping[str, str]) -> None:
    for key, value in sorted(given.items()):
        if key.startswith("dev"):
            path = DEV.parse(value).get("path")
            if not path:
                raise PctError("Path has to be defined")
            require_device(node, path)


def require_device(node: Node, path: str) -> None:
    if node.backend.device(path) is None:
        raise PctError(f"Device {path} does not exist")


def check_permission(user: str, config: Config, given: Mapping[str, str], deletes: Sequence[str]) -> None:
    """Raise for what only root@pam may; a token of root is not root@pam."""
    if user == "root@pam":
        return

    def refuse(what: str) -> None:
        raise PctError(f"403 Permission check failed ({what} is only allowed for root@pam)")

    for key in [*given, *deletes]:
        if key.startswith("dev"):
            refuse("configuring device passthrough")
        if key == "hookscript":
            refuse("changing the hookscript")
    for key, value in given.items():
        if key == "features":
            if not config.unprivileged:
                refuse("changing feature flags for privileged container")
            if FEATURES.parse(value).keys() - {"nesting"}:
                refuse("changing feature flags (except nesting)")
        if key.startswith("mp") and (kind := volumes.kind(MOUNT.parse(value)["volume"])) != "volume":
            refuse(f"mount point type {kind}")


def check_usable(node: Node, config: Config) -> None:
    """What would keep the container from starting: raised after the file was written."""
    if "arch" not in config.settings:
        raise PctError("missing 'arch' - internal error at /usr/share/perl5/PVE/LXC.pm line 729.")
    for key, value in sorted(config.settings.items()):
        if key.startswith("net"):
            bridge = NET.parse(value).get("bridge")
            if bridge and not node.backend.has_bridge(bridge):
                raise PctError(f"bridge '{bridge}' does not exist")
    for key, value in sorted(config.settings.items()):
        if key.startswith("dev"):
            require_device(node, DEV.parse(value)["path"])


def _queue(
    node: Node, vmid: int, config: Config, stored: Mapping[str, str], deletes: Sequence[str], reverts: Sequence[str]
) -> None:
    """Put everything into the pending section first, whether the container runs or not."""
    pending = config.pending.settings
    for key in reverts:
        pending.pop(key, None)
        config.pending_deletes = [other for other in config.pending_deletes if other != key]
    for key in deletes:
        _queue_delete(node, vmid, config, key)
    for key, value in sorted(stored.items()):
        if key == "unprivileged":
            raise PctError("unable to modify read-only option: 'unprivileged'")
        if key == "rootfs" or key.startswith("mp"):
            _check_protection(config, f"can't update CT {vmid} drive '{key}'")
            form = MOUNT if key.startswith("mp") else ROOTFS
            volumes.storage_of(node, form.parse(value)["volume"])
        pending[key] = _normal(key, value)
        config.pending_deletes = [other for other in config.pending_deletes if other != key]
    _clean_up(config)


def _queue_delete(node: Node, vmid: int, config: Config, key: str) -> None:
    present = config.environment if key == "env" else config.settings.get(key)
    if not present and present != "" and key not in config.pending.settings:
        node.warn(f"cannot delete '{key}' - not set in current configuration!\n")
        return
    if key in _REQUIRED:
        raise PctError(f"unable to delete required option '{key}'")
    if key.startswith(("mp", "unused")):
        _check_protection(config, f"can't remove CT {vmid} drive '{key}'")
    if key == "unprivileged":
        raise PctError(f"unable to delete read-only option: '{key}'")
    config.pending_deletes = [*config.pending_deletes, key]


def _check_protection(config: Config, what: str) -> None:
    if config.settings.get("protection") == "1":
        raise PctError(f"{what} - protection mode enabled")


def _normal(key: str, value: str) -> str:
    """The values that Proxmox rewrites before it stores them."""
    if key in {"nameserver", "searchdomain"}:
        return " ".join(split_list(value))
    if key == "tags":
        return ";".join(sorted({tag.lower() for tag in split_list(value)}))
    if key == "cpuunits":
        return str(max(2, int(value)))
    return value


def _clean_up(config: Config) -> None:
    """Drop pending changes that change nothing."""
    pending = config.pending.settings
    for key in [key for key in pending if key != "delete" and config.settings.get(key) == pending[key]]:
        del pending[key]
    config.pending_deletes = [
        key for key in config.pending_deletes if key in config.settings or (key == "env" and config.environment)
    ]


def apply_pending(node: Node, vmid: int, config: Config, only: set[str] | None = None) -> None:
    """Make the pending changes of a stopped container current: all, or those of the keys in `only`."""

    def wanted(key: str) -> bool:
        return only is None or key in only

    for key in sorted(filter(wanted, config.pending_deletes)):
        _delete(config, key)
    _clean_up(config)
    pending = config.pending.settings
    for key in sorted(key for key in pending if key != "delete" and wanted(key)):
        value = pending.pop(key)
        if key.startswith("mp"):
            value = volumes.mount_value(node, vmid, config, value)
            if key in config.settings:
                volumes.set_aside(config, key, replaced_by=MOUNT.parse(value)["volume"])
        _store(config, key, network_value(value) if key.startswith("net") else value)


def _delete(config: Config, key: str) -> None:
    if key == "env":
        config.environment = []
    elif key in config.settings:
        if key.startswith("mp"):
            volumes.set_aside(config, key)
        del config.settings[key]
    config.pending_deletes = [other for other in config.pending_deletes if other != key]


def _store(config: Config, key: str, value: str) -> None:
    if key == "env":
        config.environment = [entry for entry in value.split("\0") if entry]
    else:
        config.settings[key] = value


def network_value(value: str, octets: Callable[[], int] = lambda: random.randrange(256)) -> str:
    """A net[n] as it is stored: with a new hardware address each time none is given."""
    properties = NET.parse(value)
    properties.setdefault("hwaddr", "BC:24:11:" + ":".join(f"{octets():02X}" for _ in range(3)))
    properties.setdefault("type", "veth")
    return NET.print(properties)


def _apply_running(node: Node, vmid: int, config: Config, touched: set[str]) -> None:
    """Hot-plug what can be; the rest stays pending. An error means that nothing is written."""
    for key in sorted(touched & set(config.pending_deletes)):
        if key in _AT_ONCE:
            _delete(config, key)
    wrong: dict[str, str] = {}
    pending = config.pending.settings
    for key in sorted(touched & (pending.keys() - {"delete"})):
        try:
            value = _plug(node, vmid, config, key, pending[key])
        except _Wait:
            continue
        except PctError as error:
            wrong[key] = f"unable to hotplug {key}: {error}"
            continue
        del pending[key]
        _store(config, key, value)
    if wrong:
        raise BadParameters(wrong)


def _plug(node: Node, vmid: int, config: Config, key: str, value: str) -> str:
    if key in _AT_ONCE:
        return value
    member = schema.family(key)
    # Nothing is plugged over something that is there. (Networks could be; here they wait.)
    if member is None or member[0] not in {"dev", "mp"} or key in config.settings:
        raise _Wait
    if member[0] == "dev":
        node.backend.add_device(vmid, config, DEV.parse(value))
        return value
    source = MOUNT.parse(value)["volume"]
    if volumes.kind(source) == "bind" and not node.backend.has_directory(source):
        raise PctError(f"directory '{source}' does not exist")
    stored = volumes.mount_value(node, vmid, config, value)
    node.backend.add_mount(vmid, config, MOUNT.parse(stored))
    return stored
