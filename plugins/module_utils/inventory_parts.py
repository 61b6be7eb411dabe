"""Which machines of an inventory have to do with each other: a node with its guests, and guests that serve together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["parts"]


def parts(hosts: Mapping[str, Mapping[str, Any]], groups: Mapping[str, Sequence[str]]) -> list[list[str]]:
    """The nodes and guests in parts of which none needs another, each and all in the inventory's order.

    hosts: host → its variables, evaluated; groups: group → its hosts.
    """
    machines = list(dict.fromkeys([*groups.get("pve_nodes", []), *groups.get("gpu_guests", [])]))
    part = {host: {host} for host in machines}
    for host in groups.get("gpu_guests", []):
        given = hosts.get(host, {})
        for other in (given.get("pve_node"), *(given.get("sglang_server_nodes") or [])):
            if other in part and part[other] is not part[host]:
                part[other] |= part[host]
                part |= dict.fromkeys(part[host], part[other])
    found = []
    for host in machines:
        members = sorted(part[host], key=machines.index)
        if members not in found:
            found.append(members)
    return found
