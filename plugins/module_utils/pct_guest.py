"""From the inventory's description of a guest to options in Proxmox's names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["GUEST_KEYS", "NET_KEYS", "guest_options", "raw_lines"]

# Keys of the description that are Proxmox options of the same name and meaning.
_SAME = (
    "hostname", "ostype", "cores", "cpulimit", "cpuunits", "memory", "swap", "rootfs", "features", "onboot",
    "startup", "protection", "nameserver", "searchdomain", "tags", "timezone",
)  # fmt: skip
GUEST_KEYS = frozenset(
    {
        *_SAME, "vmid", "unprivileged", "template", "net", "mounts", "gpus", "gpu_device", "gpu_raw_lines", "memlock",
        "shm_size", "hugepages", "delete",
    }
)  # fmt: skip
NET_KEYS = frozenset({"name", "bridge", "ip", "gw", "ip6", "gw6", "hwaddr", "firewall", "tag", "mtu", "rate"})


def guest_options(guest: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `pct_config` for a guest. What the description leaves out is left out here too, but for
    `unprivileged`, which is wanted unless the description says otherwise.
    """
    options: dict[str, Any] = {key: guest[key] for key in _SAME if guest.get(key) is not None}
    options["unprivileged"] = guest.get("unprivileged", True)
    for number, net in enumerate(guest.get("net") or []):
        options[f"net{number}"] = {key: value for key, value in net.items() if value is not None}
    return options


def raw_lines(guest: Mapping[str, Any]) -> list[dict[str, str]]:
    """The lxc.* lines of a guest that have no option in Proxmox.

    /dev/shm: a size set in the guest is gone at its next start, so LXC mounts it with its size before systemd looks.
    Huge pages: the node's own mount is shown, as only the node's root may mount them.
    """
    memlock, shm, hugepages = guest.get("memlock"), guest.get("shm_size"), guest.get("hugepages")
    lines = []
    if memlock is not None:
        lines.append(("lxc.prlimit.memlock", str(memlock)))
    if shm is not None:
        lines.append(("lxc.mount.entry", f"tmpfs dev/shm tmpfs rw,nosuid,nodev,mode=1777,size={shm},create=dir 0 0"))
    if hugepages:
        lines.append(("lxc.mount.entry", f"{hugepages} dev/hugepages none bind,create=dir 0 0"))
    return [{"key": key, "value": value} for key, value in lines]
