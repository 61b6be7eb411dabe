"""Filters over the machine that makes the load of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ansible_collections.servelab.sglang.plugins.module_utils import load_from

READ = ("ansible_connection", "ansible_host", "sglang_server_host", "sglang_server_port")


def read(hostvars: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Of these hosts, as far as there are such, only what is asked about: other templates may cost something."""
    return {
        name: {key: hostvars[name][key] for key in READ if key in hostvars[name]} for name in names if name in hostvars
    }


def load_url(guest: str, hostvars: Mapping[str, Any], maker: str) -> str:
    """The server of a guest as the host `maker` reaches it. One that is not in the inventory is told by load_errors."""
    known = maker if maker in hostvars else guest
    return load_from.url(guest, read(hostvars, [guest, known]), known)


def load_errors(guest: str, hostvars: Mapping[str, Any], maker: str) -> list[str]:
    """What is wrong with making the load of a guest's server on the host `maker`, a sentence each."""
    return load_from.errors(guest, read(hostvars, [guest, maker]), maker)


class FilterModule:
    """Filters of the collection about where the load comes from."""

    def filters(self) -> dict[str, Any]:
        return {"load_url": load_url, "load_errors": load_errors}
