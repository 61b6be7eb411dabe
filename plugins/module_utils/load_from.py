"""Where the load of a run is made: on the guest itself, or on another machine that can reach its server."""

from __future__ import annotations

from collections.abc import Mapping

from .router import Vars, is_loopback, listens, machine_of, replicas


def url(guest: str, hosts: Mapping[str, Vars], maker: str) -> str:
    """The server of `guest` as the inventory's host `maker` reaches it. hosts: inventory name → its variables."""
    return str(replicas([guest], hosts, maker)[0]["url"])


def errors(guest: str, hosts: Mapping[str, Vars], maker: str) -> list[str]:
    """What is wrong with making the load on `maker`, a sentence each."""
    if maker not in hosts:
        return [
            f"bench_load_host is {maker}, which is no host of the inventory; add it, or leave bench_load_host empty "
            "to make the load on the guest."
        ]
    host, _ = listens(hosts[guest])
    if is_loopback(host) and machine_of(guest, hosts[guest]) != machine_of(maker, hosts[maker]):
        return [
            f"{guest} serves on {host} only, which bench_load_host {maker} cannot reach: set sglang_server_host of "
            f"{guest} to an address of its own (that needs sglang_server_api_key and sglang_server_admin_api_key), or "
            "leave bench_load_host empty to make the load on the guest."
        ]
    return []
