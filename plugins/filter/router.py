"""Filters over the inventory's servers and the router before them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.servelab.sglang.plugins.module_utils import router

READ = ("ansible_connection", "ansible_host", "sglang_server_host", "sglang_server_port")
SECRET = ("sglang_server_api_key", "sglang_server_admin_api_key")


def read(hostvars: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Of these hosts, as far as there are such, only what is asked about: other templates may cost something."""
    return {
        name: {key: hostvars[name][key] for key in READ + SECRET if key in hostvars[name]}
        for name in names
        if name in hostvars
    }


def router_replicas(guests: list[str], hostvars: Mapping[str, Any], here: str) -> list[dict[str, Any]]:
    """The servers of these guests as the router on the host `here` reaches them: [{name, url}]."""
    return router.replicas(guests, read(hostvars, [*guests, here]), here)


def router_keys(guests: list[str], hostvars: Mapping[str, Any]) -> dict[str, str]:
    """The keys of these guests' servers. Secret."""
    return router.keys(guests, read(hostvars, guests))


def router_errors(
    guests: list[str], hostvars: Mapping[str, Any], known: list[str], here: str, own: dict[str, Any]
) -> list[str]:
    """Everything that is wrong with them and with the router's own settings, a sentence each."""
    return router.errors(guests, read(hostvars, [*guests, here]), known, here, own)


def router_argv(own: dict[str, Any], replicas: list[dict[str, Any]]) -> list[str]:
    """The router's flags."""
    return router.argv(own, replicas)


class FilterModule:
    """Filters of the collection about the router."""

    def filters(self) -> dict[str, Any]:
        return {
            "router_replicas": router_replicas,
            "router_keys": router_keys,
            "router_errors": router_errors,
            "router_argv": router_argv,
        }
