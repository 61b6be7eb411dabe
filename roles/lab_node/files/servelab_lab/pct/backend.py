"""What `pct` needs of the machine. `lxc.py` does it with the real LXC; tests bring their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from .config import Config


@dataclass(frozen=True)
class Device:
    """A node on the host: kind c or b, and its numbers."""

    kind: str
    major: int
    minor: int


@dataclass(frozen=True)
class Unpacked:
    """What was found in a template: the version of its systemd, 0 without one, and how many bytes were read."""

    ostype: str
    systemd: int
    transcript: str


class Backend(Protocol):
    """Errors are raised as PctError with the text to show."""

    def device(self, path: str) -> Device | None:
        """The node at `path`; None when there is nothing. A thing that is no device raises."""

    def has_bridge(self, name: str) -> bool: ...

    def has_directory(self, path: str) -> bool: ...

    def init_pid(self, vmid: int) -> int | None:
        """The guest's first process by the node's numbers; None when it does not run."""

    def unpack(self, vmid: int, archive: Path, unprivileged: bool) -> Unpacked:
        """Lay the template out as the guest's root."""

    def allocate(self, vmid: int, volume: str, unprivileged: bool) -> None:
        """Make an empty volume for a mount point."""

    def prepare(self, vmid: int, config: Config) -> None:
        """Write name, network and resolver into the stopped guest's files."""

    def set_up_access(self, vmid: int, password: str | None, keys: str | None) -> None:
        """Root's password and authorized_keys in the files of the new guest."""

    def start(self, vmid: int, config: Config) -> None:
        """Start the guest; returns when it runs."""

    def stop(self, vmid: int) -> None:
        """Kill it."""

    def shut_down(self, vmid: int, timeout: int) -> bool:
        """Ask it to go; whether it went in time."""

    def remove(self, vmid: int) -> None:
        """Delete its files."""

    def attach(self, vmid: int, command: Sequence[str], keep_environment: bool) -> int:
        """Run a command inside and return its status."""

    def add_device(self, vmid: int, config: Config, properties: dict[str, str]) -> None:
        """Give the running guest one more device."""

    def add_mount(self, vmid: int, config: Config, properties: dict[str, str]) -> None:
        """Give the running guest one more directory."""

    def guest_root(self, vmid: int) -> tuple[Path, int | None]:
        """Where the running guest's files are seen from here, and the process whose user namespace to write as."""
