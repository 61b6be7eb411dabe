"""A mode over several guests (SGLang's --nnodes): who takes part, what each is told, and what is wrong with it.

The first `nodes` names of sglang_server_nodes are the ranks, in that order. The first is the head: it answers, and the
others meet it at its address. Everything here is pure.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping, Sequence
from typing import Any

from .router import is_loopback, machine_of

Vars = Mapping[str, Any]
# What the role puts in, so that no mode and no machine says it.
FLAGS = ("nnodes", "node_rank", "dist_init_addr", "nccl_init_addr")
# Without them NCCL and Gloo choose: often the loopback, to which Debian resolves the host's own name.
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME")
# What a mode over several guests has otherwise than one over one, whatever else it is for.
TREATMENT = ("nnodes", "node_rank", "dist_init_addr", "tp_size", *INTERFACES)
_EVERYWHERE = ("0.0.0.0", "::")
# With data-parallel attention SGLang takes as many ports behind the one where the ranks meet.
_PORTS_BEHIND = 6


def nodes_of(mode: Vars) -> int:
    """Over how many guests a merged or rendered mode serves."""
    return int(mode.get("nodes") or 1)


def address_of(name: str, given: Vars) -> str:
    """Where the other ranks reach a guest."""
    return str(given.get("sglang_server_dist_address") or given.get("ansible_host") or name)


def settings(names: Sequence[str], hosts: Mapping[str, Vars], here: str, port: int, interface: str) -> dict[str, Any]:
    """What the guest `here` is told about the ranks: node_rank (None: it is none of `names`), dist_init_addr and
    dist_interface. hosts: inventory name → its variables."""
    head = next(iter(names), here)
    address = address_of(head, hosts.get(head, {}))
    return {
        "node_rank": list(names).index(here) if here in names else None,
        "dist_init_addr": f"[{address}]:{port}" if ":" in address else f"{address}:{port}",
        "dist_interface": interface,
    }


def takes_part(nodes: int, told: Vars) -> bool:
    """Whether a guest with these settings has a rank in a mode over so many guests."""
    return nodes < 2 or (told.get("node_rank") is not None and told["node_rank"] < nodes)


def flags(mode: Vars, told: Vars) -> tuple[dict[str, Any], dict[str, str]]:
    """The flags and variables that one guest adds to a mode over several. Raises ValueError where it has no rank."""
    if not takes_part(nodes_of(mode), told):
        raise ValueError(
            f"Mode {mode.get('name', '?')!r} serves over the first {nodes_of(mode)} guests of sglang_server_nodes, and "
            "this is none of them; serve it there."
        )
    args = {"nnodes": nodes_of(mode), "node_rank": told["node_rank"], "dist_init_addr": told["dist_init_addr"]}
    interface = told.get("dist_interface")
    return args, {name: str(interface) for name in INTERFACES} if interface else {}


def interface_of(address: str, facts: Vars) -> str | None:
    """The interface that has the address, from Ansible's facts.

    "" where the address is a name or nothing is known of the interfaces, None where none has it.
    """
    try:
        wanted = ipaddress.ip_address(address)
    except ValueError:
        return ""
    if not facts.get("interfaces"):
        return ""
    for name in facts["interfaces"]:
        about = facts.get(str(name).replace("-", "_").replace(":", "_")) or {}
        entries = [about.get("ipv4") or {}, *(about.get("ipv4_secondaries") or []), *(about.get("ipv6") or [])]
        if any(_same(entry.get("address"), wanted) for entry in entries):
            return str(name)
    return None


def _same(address: Any, wanted: ipaddress.IPv4Address | ipaddress.IPv6Address) -> bool:
    try:
        return ipaddress.ip_address(str(address).partition("%")[0]) == wanted
    except ValueError:
        return False


def errors(mode: Vars, names: Sequence[str], hosts: Mapping[str, Vars], own: Vars) -> list[str]:
    """What is wrong with serving a rendered mode over these guests, a sentence each; none for a mode over one guest.

    own: {"port", "dist_port", "isolated", "prove", "boot_mode"} of the role on this guest.
    """
    nodes = nodes_of(mode)
    if nodes < 2:
        return []
    name = mode.get("name", "?")
    where = f"Mode {name!r} serves over {nodes} guests"
    strange = [guest for guest in names if guest not in hosts]
    said = [
        f"sglang_server_nodes names {guest}, which the inventory does not have; correct it, or add the guest."
        for guest in strange
    ]
    if len(set(names)) != len(names):
        said.append(f"sglang_server_nodes names a guest twice ({', '.join(names)}); each has one rank.")
    if len(names) < nodes:
        said.append(
            f"{where}, and sglang_server_nodes has {len(names)} ({', '.join(names) or 'none'}); add guests to the "
            "group gpu_guests or to sglang_server_nodes, or take a mode with fewer nodes."
        )
    ranks = _number(mode, "tp_size", "tp", "tensor_parallel_size") * _number(mode, "pp_size")
    if ranks % nodes:
        said.append(
            f"{where}, and its {ranks} ranks (tp_size) do not divide by {nodes}: SGLang gives each guest as many; set "
            "tp_size to a multiple."
        )
    if name in own["prove"]:
        said.append(
            f"{where}, which sglang_server_prove cannot start guest by guest; leave it out, and start it with "
            f"playbooks/serve.yml -e mode={name}."
        )
    if name == own["boot_mode"]:
        said.append(
            f"{where}, and sglang_server_boot_mode would start each rank when its guest boots, whether the others are "
            "there or not; choose another mode."
        )
    if not said:
        said += _network(where, names[:nodes], hosts, own)
    return said


def _network(where: str, names: Sequence[str], hosts: Mapping[str, Vars], own: Vars) -> list[str]:
    said = []
    apart = len({machine_of(name, hosts[name]) for name in names}) > 1
    for name in names:
        address = address_of(name, hosts[name])
        if address in _EVERYWHERE or (apart and is_loopback(address)):
            said.append(
                f"{where}, and {name} has the address {address}, at which the others cannot reach it; set "
                f"sglang_server_dist_address of {name} to an address of its own."
            )
    if apart and not own["isolated"]:
        said.append(
            f"{where}, whose ranks talk to each other without a key and take Python objects from whoever reaches their "
            "ports; set sglang_server_dist_isolated=true where nobody but the guests reaches that network."
        )
    first, last = int(own["dist_port"]), int(own["dist_port"]) + _PORTS_BEHIND
    if not 1023 < first <= 65535 - _PORTS_BEHIND:
        said.append(f"sglang_server_dist_port is {first}, but must lie between 1024 and {65535 - _PORTS_BEHIND}.")
    elif first <= int(own["port"]) <= last:
        said.append(
            f"sglang_server_port is {own['port']}, which lies between {first} and {last}, where the ranks of a mode "
            "over several guests meet; move sglang_server_dist_port."
        )
    return said


def _number(mode: Vars, *flags: str) -> int:
    args = mode.get("args") or {}
    return next((int(args[name]) for name in flags if str(args.get(name, "")).isdigit()), 1)


def play_errors(name: str, nodes: int, names: Sequence[str], play: Sequence[str], forks: int) -> list[str]:
    """Why the hosts of this play cannot start a mode over several guests together, a sentence each.

    play: the hosts that are in the play and have not failed in it.
    """
    if nodes < 2:
        return []
    wanted = names[:nodes]
    missing = [guest for guest in wanted if guest not in play]
    where = f"Mode {name!r} serves over {', '.join(wanted)}"
    said = []
    if missing:
        said.append(
            f"{where}, and {', '.join(missing)} {'is' if len(missing) == 1 else 'are'} not in this play any more, or "
            "never was: leave out -l, and mend what failed there. Nothing was started."
        )
    if forks < len(wanted):
        said.append(f"{where}, which are watched at the same time, and forks is {forks}; add -f {len(wanted)}.")
    return said
