"""The LXC configuration that Proxmox would generate for a container, fitted to a node that is a container itself.

It differs from the real one in what that node cannot do or does not need: no AppArmor profile and no seccomp rules of
Proxmox's own, LXC's common.conf in place of Proxmox's, mount entries for devices and mount points instead of hooks, the
bridge as LXC's link instead of a script, and the limits only where the host's cgroups allow them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from . import volumes
from .backend import Device
from .config import Config
from .properties import DEV, FEATURES, MOUNT, NET
from .values import as_boolean

FIRST_ID, IDS = 100000, 65536
_INCLUDES = Path("/usr/share/lxc/config")
# The include for unprivileged containers clears the filter's rules; a rule for a card alone would shut /dev/null out.
_ALWAYS = (
    "c *:* m",
    "b *:* m",
    *(f"c {n} rwm" for n in ["1:3", "1:5", "1:7", "1:8", "1:9", "5:0", "5:1", "5:2", "10:229", "136:*"]),
)
# What the lab's driver shows to every guest with a card: its version, and the socket nvidia-smi asks.
_DRIVER_PROC, _DRIVER_SOCKET = "/proc/driver", "/run/servelab-gpu"


@dataclass(frozen=True)
class Host:
    """What the node has: the container's directory, cgroup controllers, device numbers by path, and whether the guest
    sets up its own network (`guest_network`; otherwise LXC does)."""

    directory: Path
    controllers: frozenset[str] = frozenset()
    devices: Mapping[str, Device] = field(default_factory=dict)
    guest_network: bool = True
    driver: bool = False


def numbered(config: Config, kind: str) -> Iterator[tuple[int, str]]:
    """Number and value of every `kind`[n], by number."""
    found = [(int(key[len(kind) :]), value) for key, value in config.settings.items() if _is(key, kind)]
    yield from sorted(found)


def _is(key: str, kind: str) -> bool:
    return key.startswith(kind) and key[len(kind) :].isdigit()


def escape(path: str) -> str:
    """A path for lxc.mount.entry, which separates fields by blanks."""
    return path.replace("\\", "\\134").replace(" ", "\\040").replace("\t", "\\011")


def bind(source: str, target: str, kind: str, options: str = "bind") -> str:
    """A line that shows `source` as `target` in the guest; `kind` (file or dir) is made there when missing."""
    return f"lxc.mount.entry = {escape(source)} {escape(target.lstrip('/'))} none {options},create={kind} 0 0"


def lines(vmid: int, config: Config, host: Host) -> list[str]:
    """The whole configuration, one entry a line."""
    settings = config.settings
    features = FEATURES.parse(settings.get("features", ""))
    result = [
        "lxc.cgroup.relative = 0",
        f"lxc.cgroup.dir.monitor = lxc.monitor/{vmid}",
        f"lxc.cgroup.dir.container = lxc/{vmid}",
        "lxc.cgroup.dir.container.inner = ns",
        f"lxc.arch = {settings['arch']}",
        f"lxc.include = {_INCLUDES}/common.conf",
    ]
    if config.unprivileged:
        result.append(f"lxc.include = {_INCLUDES}/userns.conf")
        result += [f"lxc.idmap = {kind} 0 {FIRST_ID} {IDS}" for kind in "ug"]
        result += [f"lxc.cgroup2.devices.allow = {rule}" for rule in _ALWAYS]
    if as_boolean(features.get("nesting", "0")):
        result.append(f"lxc.include = {_INCLUDES}/nesting.conf")
    result += [
        # The node is a container: its AppArmor has no profiles to switch to.
        "lxc.apparmor.profile = unconfined",
        "lxc.tty.max = 2",
        "lxc.environment = TERM=linux",
        f"lxc.uts.name = {settings['hostname'].split('.')[0]}",
        *_limits(config, host),
        f"lxc.rootfs.path = dir:{host.directory}/rootfs",
    ]
    result += _networks(vmid, config, host)
    if as_boolean(features.get("fuse", "0")):
        # A lab on a kernel without fuse does without.
        result.append(bind("/dev/fuse", "dev/fuse", "file", "bind,optional"))
    result += _devices(config, host)
    result += _mounts(vmid, config, host)
    result += [f"lxc.environment.runtime = {entry}" for entry in config.environment]
    result += [f"{key} = {value}" for key, value in config.raw]
    return result


def _limits(config: Config, host: Host) -> Iterator[str]:
    settings = config.settings
    if "memory" in host.controllers:
        limit = int(settings.get("memory", "512")) << 20
        yield f"lxc.cgroup2.memory.max = {limit}"
        # Proxmox slows the container down shortly before it is at its limit.
        yield f"lxc.cgroup2.memory.high = {int(limit * 1016 / 1024)}"
    if "memory.swap" in host.controllers:
        yield f"lxc.cgroup2.memory.swap.max = {int(settings.get('swap', '512')) << 20}"
    if "cpu" in host.controllers:
        if "cpulimit" in settings and float(settings["cpulimit"]):
            yield f"lxc.cgroup2.cpu.max = {int(float(settings['cpulimit']) * 100000)} 100000"
        if "cpuunits" in settings:
            yield f"lxc.cgroup2.cpu.weight = {min(10000, int(settings['cpuunits']))}"


def _networks(vmid: int, config: Config, host: Host) -> Iterator[str]:
    for number, value in numbered(config, "net"):
        net = NET.parse(value)
        prefix = f"lxc.net.{number}"
        yield f"{prefix}.type = veth"
        yield f"{prefix}.veth.pair = veth{vmid}i{number}"
        yield f"{prefix}.hwaddr = {net['hwaddr']}"
        yield f"{prefix}.name = {net['name']}"
        if "bridge" in net:
            yield f"{prefix}.link = {net['bridge']}"
        if "mtu" in net:
            yield f"{prefix}.mtu = {net['mtu']}"
        if not as_boolean(net.get("link_down", "0")):
            yield f"{prefix}.flags = up"
        if not host.guest_network:
            if "/" in net.get("ip", ""):
                yield f"{prefix}.ipv4.address = {net['ip']}"
            if "gw" in net:
                yield f"{prefix}.ipv4.gateway = {net['gw']}"


def _devices(config: Config, host: Host) -> Iterator[str]:
    """Numbers are those of the nodes now; the nodes themselves are made beside the rootfs and bound in."""
    for _, value in numbered(config, "dev"):
        wanted = DEV.parse(value)
        device = host.devices[wanted["path"]]
        numbers = f"{device.kind} {device.major}:{device.minor}"
        if as_boolean(wanted.get("deny-write", "0")):
            yield f"lxc.cgroup2.devices.allow = {numbers} r"
            yield f"lxc.cgroup2.devices.deny = {numbers} w"
        else:
            yield f"lxc.cgroup2.devices.allow = {numbers} rw"
        yield bind(f"{host.directory}/passthrough{wanted['path']}", wanted["path"], "file")
    if host.driver and any(DEV.parse(value)["path"].startswith("/dev/nvidia") for _, value in numbered(config, "dev")):
        yield f"lxc.mount.entry = {_DRIVER_PROC} proc/driver none bind,optional 0 0"
        # systemd mounts a fresh /run over everything in it, unless there is one already.
        yield "lxc.mount.entry = none run tmpfs rw,nosuid,nodev,mode=755,size=64m,create=dir 0 0"
        yield bind(_DRIVER_SOCKET, _DRIVER_SOCKET, "dir")


def _mounts(vmid: int, config: Config, host: Host) -> Iterator[str]:
    for _, value in numbered(config, "mp"):
        mount = MOUNT.parse(value)
        options = "bind,ro" if as_boolean(mount.get("ro", "0")) else "bind"
        yield bind(volume_path(host.directory, mount["volume"]), mount["mp"], "dir", options)


def volume_path(directory: Path, volume: str) -> str:
    """Where a mount point's content lies on the node."""
    if volumes.kind(volume) == "volume":
        return f"{directory}/volumes/{volume.rpartition('/')[2]}"
    return volume
