"""What `pct` shows: config, pending, list, status, listsnapshot."""

from __future__ import annotations

import os
import time

from . import schema, volumes
from .config import Config, Section, encode
from .errors import BadParameters, PctError, UsageError
from .node import Node
from .properties import ROOTFS


def _shown(key: str, value: str) -> str:
    return encode(value) if key == "description" else value


def _section(section: Section) -> str:
    lines = [f"{key}: {_shown(key, value)}" for key, value in sorted(section.settings.items()) if key != "snapstate"]
    lines += [f"{key}: {value}" for key, value in section.raw]
    return "".join(f"{line}\n" for line in lines)


def config(node: Node, vmid: int, *, current: bool, snapshot: str | None) -> None:
    """`pct config`: as it will be after the next start, as it is, or as it was in a snapshot."""
    if current and snapshot is not None:
        message = "cannot use 'snapshot' parameter with 'current'"
        raise BadParameters({"current": message, "snapshot": message})
    loaded = node.load(vmid)
    if snapshot is not None:
        node.say(_section(require_snapshot(loaded, snapshot)))
        return
    view = loaded.copy()
    if not current:
        view.settings |= {key: value for key, value in loaded.pending.settings.items() if key != "delete"}
        for key in loaded.pending_deletes:
            # Perl takes "0" for nothing: a key with that value survives in this view.
            if view.settings.get(key) not in {None, "", "0"}:
                del view.settings[key]
    wrong = _unfit(view)
    if wrong:
        raise UsageError(f"400 Result verification failed\n{wrong}")
    node.say(_section(view))


def _unfit(section: Section) -> str:
    lines = ""
    for key, value in sorted(section.settings.items()):
        try:
            schema.in_file(key, value)
        except ValueError as error:
            if schema.option(key) is not None:
                lines += f"{key}: {error}\n"
    return lines


def require_snapshot(loaded: Config, name: str) -> Section:
    try:
        return loaded.snapshots[name]
    except KeyError:
        raise PctError(f"snapshot '{name}' does not exist") from None


def pending(node: Node, vmid: int) -> None:
    """`pct pending`: cur, new and del lines; no lxc.* lines."""
    loaded = node.load(vmid)
    changes, deletes = loaded.pending.settings, set(loaded.pending_deletes)
    for key in sorted(loaded.settings.keys() | changes.keys() - {"delete"}):
        now = loaded.settings.get(key)
        if key in deletes and now is not None:
            node.say(f"del {key}: {_shown(key, now)}\n")
            continue
        if now is not None:
            node.say(f"cur {key}: {_shown(key, now)}\n")
        if key in changes:
            node.say(f"new {key}: {_shown(key, changes[key])}\n")


def list_all(node: Node) -> None:
    """`pct list`: nothing at all when there is no container."""
    rows = []
    for vmid in node.vmids():
        loaded = node.load(vmid)
        state = "running" if node.running(vmid) else "stopped"
        rows.append((str(vmid), state, loaded.settings.get("lock", ""), loaded.settings.get("hostname", f"CT{vmid}")))
    for row in [("VMID", "Status", "Lock", "Name"), *rows] if rows else []:
        node.say("{:<10} {:<10} {:<12} {:<20}\n".format(*row))


def status(node: Node, vmid: int, *, verbose: bool) -> None:
    """`pct status`."""
    loaded = node.load(vmid)
    state = "running" if node.running(vmid) else "stopped"
    if not verbose:
        node.say(f"status: {state}\n")
        return
    settings = loaded.settings
    rootfs = ROOTFS.parse(settings.get("rootfs", ""))
    counters = ("disk", "diskread", "diskwrite", "mem", "netin", "netout", "swap", "uptime")
    values: dict[str, object] = dict.fromkeys(counters, 0)
    values |= {
        "cpus": min(int(settings.get("cores") or os.cpu_count() or 1), os.cpu_count() or 1),
        "maxdisk": volumes.size_in_bytes(rootfs.get("size", "0")),
        "maxmem": int(settings.get("memory", "512")) << 20,
        "maxswap": int(settings.get("swap", "512")) << 20,
        "name": settings.get("hostname", f"CT{vmid}"),
        "status": state,
        "type": "lxc",
        "vmid": vmid,
    }
    if "tags" in settings:
        values["tags"] = settings["tags"]
    if (pid := node.backend.init_pid(vmid)) is not None:
        values["pid"] = pid
    for key, value in sorted(values.items()):
        node.say(f"{key}: {value}\n")


def snapshots(node: Node, vmid: int) -> None:
    """`pct listsnapshot`: the tree, oldest first, ending where the container is now."""
    loaded = node.load(vmid)
    children: dict[str | None, list[str]] = {}
    for name, section in loaded.snapshots.items():
        parent = section.settings.get("parent")
        children.setdefault(parent if parent in loaded.snapshots else None, []).append(name)

    def show(name: str, depth: int) -> None:
        section = loaded.snapshots[name]
        taken = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(int(section.settings.get("snaptime", "0"))))
        first = section.settings.get("description", "").split("\n")[0] or "no-description"
        node.say(f"{' ' * depth + '`-> ' + name:<31} {taken:<23} {first}\n")
        below(name, depth + 1)

    def below(name: str | None, depth: int) -> None:
        ordered = sorted(children.get(name, []), key=lambda n: int(loaded.snapshots[n].settings.get("snaptime", "0")))
        for child in ordered:
            show(child, depth)
        at = loaded.settings.get("parent")
        if name == (at if at in loaded.snapshots else None):
            node.say(f"{' ' * depth + '`-> current':<31} {'':<23} You are here!\n")

    below(None, 0)
