"""Name, network and resolver in a stopped guest's files, as Proxmox writes them before each start."""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from .config import Config
from .lxc_config import numbered
from .properties import NET

_BEGIN, _END = "# --- BEGIN PVE ---", "# --- END PVE ---"


def put(rootfs: Path, path: str, text: str, owner: int, mode: int = 0o644) -> None:
    """Write a file below `rootfs`; a link in its way is not followed but replaced. Nothing is written when it is so."""
    *folders, name = path.strip("/").split("/")
    where = os.open(rootfs, os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        for folder in folders:
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o755, dir_fd=where)
                os.chown(folder, owner, owner, dir_fd=where, follow_symlinks=False)
            below = os.open(folder, os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=where)
            os.close(where)
            where = below
        if _reads(name, where) == text:
            return
        temporary = f".{name}.pct-tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode, dir_fd=where)
        with os.fdopen(fd, "w") as file:
            file.write(text)
            os.fchown(fd, owner, owner)
            os.fchmod(fd, mode)
        os.rename(temporary, name, src_dir_fd=where, dst_dir_fd=where)
    finally:
        os.close(where)


def _reads(name: str, where: int) -> str | None:
    try:
        with os.fdopen(os.open(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=where)) as file:
            return file.read()
    except (OSError, UnicodeDecodeError):
        return None


def block(old: str, inner: str) -> str:
    """`old` with `inner` between Proxmox's marks; what others wrote outside them stays."""
    marked = f"{_BEGIN}\n{inner}{_END}\n"
    pattern = re.compile(rf"(?ms)^{re.escape(_BEGIN)}$.*?^{re.escape(_END)}\n?")
    return pattern.sub(lambda _: marked, old) if pattern.search(old) else old + marked


def interfaces(config: Config) -> str:
    """/etc/network/interfaces."""
    text = "auto lo\niface lo inet loopback\n"
    for _, value in numbered(config, "net"):
        net = NET.parse(value)
        ip = net.get("ip", "manual")
        text += f"\nauto {net['name']}\niface {net['name']} inet {'static' if '/' in ip else ip}\n"
        if "/" in ip:
            text += f"\taddress {ip}\n"
        if "gw" in net:
            text += f"\tgateway {net['gw']}\n"
    return text


def hosts(config: Config, old: str) -> str:
    """/etc/hosts: the guest's name at its first static address."""
    name = config.settings["hostname"]
    ips = [NET.parse(value).get("ip", "") for _, value in numbered(config, "net")]
    address = next((ip.partition("/")[0] for ip in ips if "/" in ip), "127.0.1.1")
    names = f"{name} {name.partition('.')[0]}" if "." in name else name
    if not old.strip():
        old = "127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n"
    return block(old, f"{address} {names}\n")


def resolver(config: Config, node: str) -> str:
    """/etc/resolv.conf: the container's own servers, else those of the node, whose file is `node`."""
    servers = config.settings.get("nameserver", "").split() or re.findall(r"(?m)^\s*nameserver\s+(\S+)", node)
    search = config.settings.get("searchdomain") or " ".join(re.findall(r"(?m)^\s*search\s+(.+?)\s*$", node)[-1:])
    lines = ([f"search {search}"] if search else []) + [f"nameserver {server}" for server in servers]
    return block("", "".join(f"{line}\n" for line in lines))
