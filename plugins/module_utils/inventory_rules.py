"""What an inventory must say, checked before any machine is touched.

Every problem is one sentence with the host, the value, the rule and the remedy, and all of them are found at once.
"""

from __future__ import annotations

import difflib
import ipaddress
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from .pct_guest import GUEST_KEYS, NET_KEYS
from .router import is_loopback
from .stack_install import lock_refusals, release_refusal

__all__ = ["UNKNOWN", "Catalogue", "check_inventory"]

Vars = Mapping[str, Any]

UNKNOWN: Any = object()
"""The value of a variable whose template cannot be evaluated: a problem of its own, after which no rule is applied."""

_FEATURES = {"nesting", "keyctl", "fuse", "mount", "mknod", "force_rw_sys"}
_LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]*[A-Za-z0-9])?"
_HOSTNAME = re.compile(rf"^{_LABEL}(\.{_LABEL})*$")
_MAC = re.compile(r"^[0-9A-Fa-f][02468ACEace](:[0-9A-Fa-f]{2}){5}$")
_VOLUME = re.compile(r"^[^/:\s]+:\S+$")
_HIGHEST_VMID = 999_999_999
# Facts that roles set for others; they look like settings of their role, and are none.
_OUTPUTS = {"pve_gpu_host_audit"}


@dataclass(frozen=True)
class Catalogue:
    """What the collection knows.

    variables: role → the variables it takes; defaults: variable → its default, where that is a plain value;
    modes: the names of the modes; releases: of SGLang. Empty where unknown: then nothing is said about it.
    locks: path → text of the locks of one's own that the inventory names; a file that is not there is not in it.
    """

    variables: Mapping[str, Iterable[str]] = field(default_factory=dict)
    defaults: Vars = field(default_factory=dict)
    modes: Sequence[str] = ()
    releases: Sequence[str] = ()
    locks: Mapping[str, str] = field(default_factory=dict)


def check_inventory(hosts: Mapping[str, Vars], groups: Mapping[str, Sequence[str]], catalogue: Catalogue) -> list[str]:
    """Return one sentence for each problem, host by host; an empty list if there is none.

    hosts: host → its variables, evaluated; groups: group → its hosts.
    """
    guests = list(groups.get("gpu_guests", []))
    nodes = list(groups.get("pve_nodes", []))
    routers = list(groups.get("sglang_routers", []))
    if not guests:
        return ["The group gpu_guests has no host, so there is nothing to serve from; name the guest in the inventory."]
    problems: list[str] = []
    for host in dict.fromkeys([*nodes, *guests, *routers]):
        said = _misspelt(hosts.get(host, {}), catalogue)
        if host in nodes:
            said += _node(hosts.get(host, {}))
        if host in guests:
            said += _guest(hosts.get(host, {}), nodes, hosts)
            said += _serving(hosts.get(host, {}), hosts, catalogue)
        problems += [f"{host}: {sentence}" for sentence in dict.fromkeys(said)]
    return problems + _between_guests(guests, hosts)


def _misspelt(given: Vars, catalogue: Catalogue) -> list[str]:
    """Variables that carry a role's name and that the role does not know: they would silently do nothing."""
    known = {name for names in catalogue.variables.values() for name in names} | _OUTPUTS
    roles = sorted(catalogue.variables, key=len, reverse=True)
    said = []
    for name in sorted(given):
        role = next((role for role in roles if name.startswith(f"{role}_")), None)
        if role is not None and name not in known:
            said.append(f"{name} is no variable of the role {role}{_suggest(name, catalogue.variables[role])}")
    return said


def _node(given: Vars) -> list[str]:
    said = []
    expected = given.get("pve_gpu_host_expected_gpus")
    if expected is not None and expected is not UNKNOWN and not _whole(expected, 0):
        said.append(f"pve_gpu_host_expected_gpus is {expected!r}; it must be a whole number of GPUs, or be left out.")
    return said


def _guest(given: Vars, nodes: Sequence[str], hosts: Mapping[str, Vars]) -> list[str]:
    node, guest = given.get("pve_node"), given.get("pve_container_guest")
    if (node is None and guest is None) or node is UNKNOWN:
        return []  # a machine of its own: bare metal, a VM
    said = []
    if node is None:
        said.append(
            f"pve_node is not set, so nobody knows where the container is; set it to a host of pve_nodes "
            f"({_names(nodes)}), or remove pve_container_guest if this is no container."
        )
    elif node not in nodes:
        said.append(
            f"pve_node is {node!r}, which is no host of the group pve_nodes ({_names(nodes)}); correct it, or add "
            "the node to that group."
        )
    if guest is UNKNOWN:
        return said
    if guest is None:
        return [
            *said,
            "pve_container_guest is not set; describe the container (vmid, hostname), or remove pve_node.",
        ]
    if not isinstance(guest, Mapping):
        return [*said, f"pve_container_guest is {guest!r}; it must be a mapping with vmid, hostname and so on."]
    said += [
        f"pve_container_guest.{key} is unknown{_suggest(str(key), GUEST_KEYS)}"
        for key in guest
        if key not in GUEST_KEYS
    ]
    said += _identity(guest) + _resources(guest) + _features(guest)
    said += _nets(guest.get("net")) + _mounts(guest.get("mounts"))
    return said + _gpus(guest.get("gpus"), hosts.get(str(node), {}), str(node))


def _identity(guest: Vars) -> list[str]:
    said = []
    vmid, hostname = guest.get("vmid"), guest.get("hostname")
    if vmid is None:
        said.append("pve_container_guest.vmid is missing; give the container's number on its node, such as 129.")
    elif not _whole(vmid, 100, _HIGHEST_VMID):
        said.append(f"pve_container_guest.vmid is {vmid!r}; Proxmox takes whole numbers from 100 to {_HIGHEST_VMID}.")
    if hostname is None:
        said.append("pve_container_guest.hostname is missing; give the container's name, such as gpu1.")
    elif not _HOSTNAME.match(str(hostname)):
        said.append(
            f"pve_container_guest.hostname is {hostname!r}; only letters, digits and hyphens (and dots between labels) "
            "are allowed, and no hyphen at an end."
        )
    template = guest.get("template")
    if template is not None and not (_VOLUME.match(str(template)) or str(template).startswith("/")):
        said.append(
            f"pve_container_guest.template is {template!r}; write it as Proxmox does, such as "
            "local:vztmpl/debian-13-standard_13.1-1_amd64.tar.zst (`pveam list local`)."
        )
    return said


def _resources(guest: Vars) -> list[str]:
    said = []
    for key, least, unit in (("cores", 1, "cores"), ("memory", 16, "MiB"), ("swap", 0, "MiB")):
        value = guest.get(key)
        if value is not None and not _whole(value, least):
            said.append(
                f"pve_container_guest.{key} is {value!r}; it must be a whole number of {unit}, at least {least}."
            )
    shm, hugepages = guest.get("shm_size"), guest.get("hugepages")
    if shm is not None and not re.fullmatch(r"[1-9]\d*[KMGkmg]|[1-9]\d?%", str(shm)):
        said.append(f"pve_container_guest.shm_size is {shm!r}; write a size with its unit, such as 64G.")
    if hugepages is not None and not re.fullmatch(r"/\S+", str(hugepages)):
        said.append(
            f"pve_container_guest.hugepages is {hugepages!r}; give the node's directory with the huge pages, such as "
            "/dev/hugepages."
        )
    rootfs = guest.get("rootfs")
    if rootfs is not None and not _VOLUME.match(str(rootfs)):
        said.append(f"pve_container_guest.rootfs is {rootfs!r}; write storage:size-in-GiB, such as local-zfs:200.")
    startup = guest.get("startup")
    if startup is not None and not re.fullmatch(r"\d+|(order|up|down)=\d+(,(order|up|down)=\d+)*", str(startup)):
        said.append(f"pve_container_guest.startup is {startup!r}; write it as order=2,up=30,down=60.")
    return said


def _features(guest: Vars) -> list[str]:
    features = guest.get("features")
    if features is None:
        return []
    if not isinstance(features, Mapping):
        return [f"pve_container_guest.features is {features!r}; it must be a mapping such as {{nesting: true}}."]
    return [
        f"pve_container_guest.features.{key} is unknown{_suggest(str(key), _FEATURES)}"
        for key in features
        if key not in _FEATURES
    ]


def _nets(nets: Any) -> list[str]:
    if nets is None:
        return []
    if not isinstance(nets, Sequence) or isinstance(nets, str) or not all(isinstance(net, Mapping) for net in nets):
        return [f"pve_container_guest.net is {nets!r}; it must be a list of interfaces, each a mapping."]
    said = []
    for number, net in enumerate(nets):
        where = f"pve_container_guest.net[{number}]"
        said += [f"{where}.{key} is unknown{_suggest(str(key), NET_KEYS)}" for key in net if key not in NET_KEYS]
        said += [
            f"{where}.{key} is missing; give the {what}."
            for key, what in (
                ("name", "interface's name in the guest, such as eth0"),
                ("bridge", "node's bridge, such as vmbr0"),
            )
            if net.get(key) is None
        ]
        said += _address(where, net)
        hwaddr = net.get("hwaddr")
        if hwaddr is not None and not _MAC.match(str(hwaddr)):
            said.append(
                f"{where}.hwaddr is {hwaddr!r}; give a unicast MAC address such as BC:24:11:00:00:01, or leave it out."
            )
    return said


def _address(where: str, net: Vars) -> list[str]:
    ip, gateway = net.get("ip"), net.get("gw")
    if ip is None or ip in ("dhcp", "manual"):
        if gateway is not None:
            return [f"{where}.gw is {gateway!r} without a static ip; remove gw, or give ip as address/prefix."]
        return []
    try:
        if "/" not in str(ip):
            raise ValueError
        interface = ipaddress.IPv4Interface(str(ip))
    except ValueError:
        return [f"{where}.ip is {ip!r}; write an IPv4 address with its prefix, such as 192.168.1.129/24, or dhcp."]
    said = []
    network = interface.network
    if network.prefixlen < 31 and interface.ip in (network.network_address, network.broadcast_address):
        said.append(f"{where}.ip is {ip}, which is the network's own address; choose one between its ends.")
    if gateway is not None:
        try:
            address = ipaddress.IPv4Address(str(gateway))
        except ValueError:
            return [*said, f"{where}.gw is {gateway!r}; write the gateway's IPv4 address without a prefix."]
        if address not in network:
            said.append(f"{where}.gw is {gateway}, which is not in {network}; correct the gateway or the prefix of ip.")
        elif address == interface.ip:
            said.append(f"{where}.gw is {gateway}, the guest's own address; give the router's.")
    return said


def _mounts(mounts: Any) -> list[str]:
    if mounts is None:
        return []
    if not isinstance(mounts, Sequence) or isinstance(mounts, str) or not all(isinstance(m, Mapping) for m in mounts):
        return [f"pve_container_guest.mounts is {mounts!r}; it must be a list of mappings with source and path."]
    said, paths = [], set()
    for number, mount in enumerate(mounts):
        where = f"pve_container_guest.mounts[{number}]"
        keys = {"source", "path", "read_only"}
        said += [f"{where}.{key} is unknown{_suggest(str(key), keys)}" for key in mount if key not in keys]
        source, path = mount.get("source"), mount.get("path")
        if source is None or not (str(source).startswith("/") or _VOLUME.match(str(source))):
            said.append(f"{where}.source is {source!r}; give a directory of the node (/…) or a volume (storage:size).")
        if path is None or not str(path).startswith("/"):
            said.append(f"{where}.path is {path!r}; give an absolute path in the guest.")
        elif path in paths:
            said.append(f"{where}.path is {path}, which another mount has too; each path takes one mount.")
        paths.add(path)
    return said


def _gpus(gpus: Any, node: Vars, node_name: str) -> list[str]:
    if gpus is None or gpus == "all":
        return []
    rule = "it must be 'all' or a list of card numbers such as [0, 2]."
    if isinstance(gpus, str) or not isinstance(gpus, Sequence) or not all(_whole(card, 0) for card in gpus):
        return [f"pve_container_guest.gpus is {gpus!r}; {rule}"]
    cards = [int(card) for card in gpus]
    said = []
    if len(set(cards)) != len(cards):
        said.append(f"pve_container_guest.gpus is {cards}, which names a card twice; {rule}")
    count = node.get("pve_gpu_host_expected_gpus")
    if _whole(count, 0) and (beyond := [card for card in cards if card >= int(str(count))]):
        said.append(
            f"pve_container_guest.gpus names {_names(beyond)}, but {node_name} has {count} GPUs, numbered 0 to "
            f"{int(str(count)) - 1}; correct the list or pve_gpu_host_expected_gpus."
        )
    return said


def _serving(given: Vars, hosts: Mapping[str, Vars], catalogue: Catalogue) -> list[str]:
    said = _release(given, catalogue)
    given = {name: value for name, value in given.items() if value is not UNKNOWN}
    address = given.get("sglang_server_host")
    if address is not None and not is_loopback(str(address)):
        said.append(
            f"sglang_server_host is {address}, where the whole network could use the server without a key; leave it at "
            "127.0.0.1 and reach it through ssh -L or a proxy that authenticates."
        )
    for variable in ("sglang_server_modes", "sglang_server_prove"):
        modes = given.get(variable)
        own = given.get("sglang_server_mode_dirs")  # modes that only the inventory knows
        if isinstance(modes, Sequence) and not isinstance(modes, str) and catalogue.modes and not own:
            said += [
                f"{variable} names {mode!r}; the known modes are {_names(catalogue.modes)}."
                for mode in modes
                if mode not in catalogue.modes
            ]
    return said + _tensor_parallel(given, hosts, catalogue)


def _release(given: Vars, catalogue: Catalogue) -> list[str]:
    """Whether there is a stack for the release: the collection's, or one that a lock of one's own describes."""
    name = "sglang_env_version" if "sglang_env_version" in given else "sglang_version"
    version, lock = given.get(name), given.get("sglang_env_lock")
    if UNKNOWN in (version, lock):
        return []
    if not lock:
        if version is None or not catalogue.releases or str(version) in catalogue.releases:
            return []
        return [release_refusal(str(version), catalogue.releases, name)]
    if not str(lock).startswith("/"):
        return [
            f"sglang_env_lock is {lock}, but must be an absolute path on the controller; beside the inventory that is "
            "{{ inventory_dir }}/" + f"{lock}."
        ]
    if str(lock) not in catalogue.locks:
        return [
            f"sglang_env_lock is {lock}, but there is no such file on the controller; make it with `servelab lock`."
        ]
    # Without a version the role's own default counts, and the role compares.
    return [] if version is None else lock_refusals(catalogue.locks[str(lock)], str(lock), str(version))


def _tensor_parallel(given: Vars, hosts: Mapping[str, Vars], catalogue: Catalogue) -> list[str]:
    guest = given.get("pve_container_guest")
    gpus = guest.get("gpus") if isinstance(guest, Mapping) else None
    count: Any = None
    if gpus == "all":
        count = hosts.get(str(given.get("pve_node")), {}).get("pve_gpu_host_expected_gpus")
    elif isinstance(gpus, Sequence) and not isinstance(gpus, str):
        count = len(gpus)
    size = given.get("sglang_server_tp_size", catalogue.defaults.get("sglang_server_tp_size"))
    if size is None:
        return []
    if not _whole(size, 1):
        return [f"sglang_server_tp_size is {size!r}; it must be a whole number of GPUs, at least 1."]
    if _whole(count, 0) and int(size) > int(count):
        return [
            f"sglang_server_tp_size is {size}, but the guest gets {count} GPUs; lower it, or give the guest more in "
            "pve_container_guest.gpus."
        ]
    return []


def _between_guests(guests: Sequence[str], hosts: Mapping[str, Vars]) -> list[str]:
    """What only shows when guests are seen together: a number or an address given twice."""
    vmids: dict[tuple[str, str], list[str]] = defaultdict(list)
    addresses: dict[str, list[str]] = defaultdict(list)
    for host in guests:
        guest = hosts.get(host, {}).get("pve_container_guest")
        if not isinstance(guest, Mapping):
            continue
        if guest.get("vmid") is not None:
            vmids[str(hosts[host].get("pve_node")), str(guest["vmid"])].append(host)
        nets = guest.get("net")
        for net in nets if isinstance(nets, Sequence) and not isinstance(nets, str) else []:
            ip = str(net.get("ip", "")) if isinstance(net, Mapping) else ""
            if "/" in ip:
                addresses[ip.split("/")[0]].append(host)
    said = [
        f"{_names(names)}: they all have the vmid {vmid} on {node}; a number belongs to one container."
        for (node, vmid), names in vmids.items()
        if len(names) > 1
    ]
    return said + [
        f"{_names(names)}: they all have the address {ip}; give each its own."
        for ip, names in addresses.items()
        if len(names) > 1
    ]


def _whole(value: Any, least: int, most: int | None = None) -> bool:
    """Whether a value is a whole number in its range. Inventories carry numbers as text, too."""
    if isinstance(value, bool) or not re.fullmatch(r"\d+", str(value)):
        return False
    return int(value) >= least and (most is None or int(value) <= most)


def _suggest(name: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, sorted(known), n=1)
    return f"; did you mean {close[0]}?" if close else f"; the known ones are {_names(sorted(known))}."


def _names(names: Iterable[Any]) -> str:
    return ", ".join(map(str, names)) or "which has none"
