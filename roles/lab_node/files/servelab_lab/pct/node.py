"""The node as `pct` sees it: its files, locks and storages. `root` moves all of it, for tests."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from . import config as conf
from .backend import Backend
from .config import Config
from .errors import PctError


def _to_stderr(text: str) -> None:
    sys.stderr.write(text)


def _to_stdout(text: str) -> None:
    sys.stdout.write(text)


@dataclass
class Node:
    """`user` is who asks: some changes are refused to all but root@pam."""

    backend: Backend
    root: Path = Path("/")
    name: str = os.uname().nodename
    user: str = "root@pam"
    lock_timeout: float = 10
    say: Callable[[str], None] = _to_stdout
    warn: Callable[[str], None] = _to_stderr
    now: Callable[[], float] = time.time

    def config_path(self, vmid: int) -> Path:
        return self.root / f"etc/pve/lxc/{vmid}.conf"

    def vmids(self) -> list[int]:
        """The containers of this node."""
        files = (self.root / "etc/pve/lxc").glob("*.conf")
        return sorted(int(path.stem) for path in files if path.stem.isdigit())

    def require_free(self, vmid: int) -> None:
        """Raise when the number is taken, by a container or a virtual machine."""
        if self.config_path(vmid).exists():
            raise PctError(f"CT {vmid} already exists on node '{self.name}'")
        if (self.root / f"etc/pve/qemu-server/{vmid}.conf").exists():
            raise PctError(f"VM {vmid} already exists on node '{self.name}'")

    def load(self, vmid: int, *, quiet: bool = False) -> Config:
        """The container's configuration. What cannot be read is told on stderr unless `quiet`."""
        try:
            text = self.config_path(vmid).read_bytes().decode("utf-8", "surrogateescape")
        except FileNotFoundError:
            raise PctError(f"Configuration file 'nodes/{self.name}/lxc/{vmid}.conf' does not exist") from None
        return conf.read(vmid, text, (lambda _: None) if quiet else self.warn)

    def save(self, vmid: int, config: Config) -> None:
        """Write the file as a whole, or not at all."""
        path = self.config_path(vmid)
        path.parent.mkdir(parents=True, exist_ok=True)
        # No other name may end in .conf: it would be a container.
        temporary = path.with_name(f"{path.name}.tmp.{os.getpid()}")
        temporary.write_bytes(config.whole().encode("utf-8", "surrogateescape"))
        temporary.chmod(0o640)
        temporary.replace(path)

    def erase(self, vmid: int) -> None:
        self.config_path(vmid).unlink()

    @contextlib.contextmanager
    def locked(self, vmid: int) -> Iterator[None]:
        """Hold the container's lock; waits `lock_timeout` seconds for another pct."""
        path = self.root / f"run/lock/lxc/pve-config-{vmid}.lock"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w") as file:
            self._acquire(file.fileno(), vmid)
            yield

    def _acquire(self, fd: int, vmid: int) -> None:
        deadline, told = time.monotonic() + self.lock_timeout, False
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                if not told:
                    self.warn("trying to acquire lock...\n")
                    told = True
                if time.monotonic() > deadline:
                    message = f"can't lock file '/run/lock/lxc/pve-config-{vmid}.lock' - got timeout"
                    raise PctError(message) from None
                time.sleep(0.05)
                continue
            if told:
                self.warn(" OK\n")
            return

    def storages(self) -> dict[str, str]:
        """Kind by name, from storage.cfg; without that file there is `local`, a directory."""
        try:
            text = (self.root / "etc/pve/storage.cfg").read_text()
        except FileNotFoundError:
            return {"local": "dir"}
        return {match[2]: match[1] for match in re.finditer(r"(?m)^([a-z]+):\s*(\S+)\s*$", text)}

    def require_storage(self, name: str) -> str:
        """The storage's kind."""
        try:
            return self.storages()[name]
        except KeyError:
            raise PctError(f"storage '{name}' does not exist") from None

    def running(self, vmid: int) -> bool:
        return self.backend.init_pid(vmid) is not None


def check_lock(config: Config) -> None:
    """Raise when a job of the node holds the container."""
    if lock := config.settings.get("lock"):
        raise PctError(f"CT is locked ({lock})")
