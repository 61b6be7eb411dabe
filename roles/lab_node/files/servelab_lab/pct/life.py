"""start, stop, shutdown, reboot, unlock, resize and exec."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence

from . import volumes
from .config import Config
from .edit import apply_pending, check_usable
from .errors import PctError
from .node import Node, check_lock
from .properties import DEV, MOUNT, ROOTFS
from .values import as_boolean


def start(node: Node, vmid: int) -> None:
    """Apply what is pending, then start. Device nodes are looked up now: a missing one stops the start."""
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        if node.running(vmid):
            raise PctError(f"CT {vmid} already running")
        _start(node, vmid, config)


def _start(node: Node, vmid: int, config: Config) -> None:
    before = config.whole()
    apply_pending(node, vmid, config)
    if config.whole() != before:
        node.save(vmid, config)
    check_usable(node, config)
    _check_startable(node, vmid, config)
    node.backend.prepare(vmid, config)
    node.backend.start(vmid, config)


def _check_startable(node: Node, vmid: int, config: Config) -> None:
    if config.unprivileged and as_boolean(ROOTFS.parse(config.settings.get("rootfs", "")).get("quota", "0")):
        raise PctError("Quotas are not supported by unprivileged containers.")
    paths = [DEV.parse(value)["path"] for key, value in config.settings.items() if key.startswith("dev")]
    missing = [
        source
        for key, value in sorted(config.settings.items())
        if key.startswith("mp")
        and volumes.kind(source := MOUNT.parse(value)["volume"]) == "bind"
        and not node.backend.has_directory(source)
    ]
    if missing:
        node.warn(f"directory '{missing[0]}' does not exist\n")
    if missing or len(set(paths)) != len(paths):
        raise PctError(f"startup for container '{vmid}' failed")


def start_all(node: Node) -> bool:
    """Start every container with `onboot`, in the order of `startup`: what a node does at boot. Whether all came up;
    one that does not is told and holds up no other."""
    wanted = []
    for vmid in node.vmids():
        settings = node.load(vmid).settings
        order = re.match(r"(?:order=)?(\d+)", settings.get("startup", ""))
        if settings.get("onboot") == "1" and not node.running(vmid):
            # Those without an order come last, by number.
            wanted.append((int(order[1]) if order else sys.maxsize, vmid))
    good = True
    for _, vmid in sorted(wanted):
        try:
            start(node, vmid)
        except PctError as error:
            node.warn(f"CT {vmid}: {error}")
            good = False
    return good


def stop(node: Node, vmid: int) -> None:
    """Kill the container."""
    with node.locked(vmid):
        if not node.running(vmid):
            raise PctError(f"CT {vmid} not running")
        check_lock(node.load(vmid))
        node.backend.stop(vmid)


def shut_down(node: Node, vmid: int, *, timeout: int, force: bool) -> None:
    """Ask the container to go; with `force` it is killed when it has not gone after `timeout` seconds."""
    with node.locked(vmid):
        if not node.running(vmid):
            raise PctError(f"CT {vmid} not running")
        check_lock(node.load(vmid))
        _shut_down(node, vmid, timeout, force)


def _shut_down(node: Node, vmid: int, timeout: int, force: bool) -> None:
    if node.backend.shut_down(vmid, timeout):
        return
    if not force:
        raise PctError(f"command 'lxc-stop -n {vmid} --nokill --timeout {timeout}' failed: exit code 1")
    node.backend.stop(vmid)


def reboot(node: Node, vmid: int, *, timeout: int) -> None:
    """Down and up again, with what is pending."""
    with node.locked(vmid):
        if not node.running(vmid):
            raise PctError(f"VM {vmid} not running")
        config = node.load(vmid)
        check_lock(config)
        _shut_down(node, vmid, timeout, force=True)
        _start(node, vmid, config)


def unlock(node: Node, vmid: int) -> None:
    """Remove the mark of a job that died."""
    with node.locked(vmid):
        config = node.load(vmid)
        if "lock" not in config.settings:
            raise PctError("no lock found trying to remove any lock")
        del config.settings["lock"]
        node.save(vmid, config)


def resize(node: Node, vmid: int, disk: str, wanted: str) -> None:
    """Grow rootfs or mp[n] in the configuration; the lab's volumes are directories without a size of their own."""
    with node.locked(vmid):
        config = node.load(vmid)
        check_lock(config)
        if disk not in config.settings:
            raise PctError(f"no such mount point '{disk}'")
        form = ROOTFS if disk == "rootfs" else MOUNT
        properties = form.parse(config.settings[disk])
        now = volumes.size_in_bytes(properties.get("size", "0"))
        size = volumes.size_in_bytes(wanted.lstrip("+")) + (now if wanted.startswith("+") else 0)
        if size < now:
            raise PctError("unable to shrink disk size")
        config.settings[disk] = form.print(properties | {"size": volumes.size_as_text(size)})
        node.save(vmid, config)


def run_inside(node: Node, vmid: int, command: Sequence[str], *, keep_environment: bool) -> int:
    """`pct exec`: the command's own status. A signal gives 128 plus its number, a missing binary 127."""
    node.load(vmid)
    if not node.running(vmid):
        raise PctError(f"container '{vmid}' not running!")
    return node.backend.attach(vmid, command, keep_environment)
