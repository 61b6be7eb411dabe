"""What a machine must offer to carry a lab, and how it reaches the world, so that node and guest can do likewise."""

from __future__ import annotations

import configparser
import ipaddress
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

__all__ = [
    "apt_packages_missing",
    "certificates",
    "debian_mirrors",
    "nameservers",
    "overlapping_route",
    "pip_settings",
    "proxies",
    "read_all",
    "with_sbin",
]

# What is run here, and the Debian package that brings it.
COMMANDS = {
    "lxc-start": "lxc",
    "mmdebstrap": "mmdebstrap",
    "ip": "iproute2",
    "iptables": "iptables",
    "iptables-save": "iptables",
    "ssh": "openssh-client",
    "ssh-keygen": "openssh-client",
    "tar": "tar",
    "zstd": "zstd",
}
KEYRING = ("/usr/share/keyrings/debian-archive-keyring.gpg", "debian-archive-keyring")

_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)
_PIP_KEYS = ("index-url", "extra-index-url", "trusted-host", "timeout", "retries", "proxy")
_PROXY_NAMES = ("http_proxy", "https_proxy", "no_proxy")


def apt_packages_missing(which: Callable[[str], str | None], exists: Callable[[str], bool]) -> list[str]:
    """Debian packages to install before a lab can be built, sorted."""
    missing = {package for command, package in COMMANDS.items() if which(command) is None}
    if not exists(KEYRING[0]):
        missing.add(KEYRING[1])
    return sorted(missing)


def with_sbin(path: str) -> str:
    """A PATH that finds system programs too: after a plain `su` root has an ordinary user's."""
    words = [word for word in path.split(":") if word]
    return ":".join(words + [sbin for sbin in ("/usr/local/sbin", "/usr/sbin", "/sbin") if sbin not in words])


def overlapping_route(subnet: str, routes: Iterable[Mapping[str, Any]], own_bridge: str) -> str | None:
    """The first route inside or around `subnet`, as "10.0.0.0/8 dev tun0"; `routes` are those of `ip -json route`.

    The default route covers everything and the lab's own bridge covers itself: neither is an overlap.
    """
    network = ipaddress.ip_network(subnet)
    for route in routes:
        destination, device = str(route.get("dst", "default")), str(route.get("dev", "?"))
        if destination == "default" or device == own_bridge:
            continue
        try:
            other = ipaddress.ip_network(destination, strict=False)
        except ValueError:
            continue
        if other.version == network.version and other.prefixlen > 0 and other.overlaps(network):
            return f"{destination} dev {device}"
    return None


def nameservers(resolv_conf: str, uplink_resolv_conf: str) -> list[str]:
    """Name servers that a container can reach too: a resolver on this machine's loopback answers only this machine.

    `uplink_resolv_conf` is what systemd-resolved itself asks ("" where it does not run). Empty list: none is reachable.
    """

    def listed(text: str) -> list[str]:
        found = []
        for line in text.splitlines():
            words = line.split()
            if len(words) >= 2 and words[0] == "nameserver":
                address = words[1].partition("%")[0]
                try:
                    if not ipaddress.ip_address(address).is_loopback:
                        found.append(address)
                except ValueError:
                    continue
        return found

    return listed(resolv_conf) or listed(uplink_resolv_conf)


def _named_alike(settings: Mapping[str, str]) -> dict[str, str]:
    """The settings that matter here; pip takes `default-timeout` for `timeout` and underscores for hyphens."""
    renamed = {key.replace("_", "-").removeprefix("default-"): value for key, value in settings.items()}
    return {key: value for key, value in renamed.items() if key in _PIP_KEYS and value}


def pip_settings(files: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """How this machine's pip reaches its indexes, in pip.conf's names; later files win, the environment wins over all.

    Only what means the same in another machine is kept: directories and file:// indexes are not there.
    """
    found: dict[str, str] = {}
    for text in files:
        parser = configparser.RawConfigParser(strict=False)
        try:
            parser.read_string(text)
        except configparser.Error:
            continue
        for section in ("global", "install", "download"):
            if parser.has_section(section):
                found.update(_named_alike(dict(parser.items(section))))
    found.update(
        _named_alike(
            {name[4:].lower().replace("_", "-"): value for name, value in environment.items() if name[:4] == "PIP_"}
        )
    )
    for key in ("index-url", "extra-index-url"):
        if key in found:
            found[key] = " ".join(url for url in found[key].split() if url.startswith(("http://", "https://")))
    return {key: value for key, value in found.items() if value}


def proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """Proxy variables in lower case, {} without a proxy. no_proxy alone means nothing and is dropped."""
    found = {name: environment.get(name) or environment.get(name.upper()) or "" for name in _PROXY_NAMES}
    if not (found["http_proxy"] or found["https_proxy"]):
        return {}
    return {name: value for name, value in found.items() if value}


def debian_mirrors(sources: Iterable[str], is_debian: bool) -> dict[str, str]:
    """The archives this machine uses: {"main": url, "security": url}; Debian's own where it is no Debian or names none.

    sources: texts of sources.list and sources.list.d/*, one-line or deb822.
    """
    mirrors = {"main": "http://deb.debian.org/debian", "security": "http://deb.debian.org/debian-security"}
    if not is_debian:
        return mirrors
    chosen: dict[str, str] = {}
    for text in sources:
        for line in text.splitlines():
            if line.lstrip().startswith("#"):
                continue
            for url in re.findall(r"https?://\S+", line):
                path = url.rstrip("/")
                if path.endswith("/debian-security"):
                    chosen.setdefault("security", path)
                elif path.endswith("/debian"):
                    chosen.setdefault("main", path)
    return mirrors | chosen


def certificates(bundles: Iterable[str]) -> list[str]:
    """The distinct PEM certificates in the texts, in their order, each ending in a newline."""
    seen: dict[str, None] = {}
    for text in bundles:
        for pem in _CERTIFICATE.findall(text):
            seen.setdefault(pem.replace("\r\n", "\n") + "\n", None)
    return list(seen)


def read_all(paths: Iterable[Path]) -> list[str]:
    """The texts of those of the files that can be read."""
    texts = []
    for path in paths:
        try:
            texts.append(path.read_text(encoding="utf-8", errors="replace"))
        except OSError:
            continue
    return texts
