"""The node's containers with the real LXC."""

from __future__ import annotations

import os
import re
import stat
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from . import guest_files, mounts
from .backend import Device, Unpacked
from .config import Config
from .errors import PctError
from .lxc_config import FIRST_ID, IDS, Host, lines, numbered, volume_path
from .properties import DEV

_PATH = "/sbin:/bin:/usr/sbin:/usr/bin"
_IDMAP = [word for kind in "ug" for word in ("-m", f"{kind}:0:{FIRST_ID}:{IDS}")]
_OSTYPES = ("debian", "devuan", "ubuntu", "centos", "fedora", "opensuse", "archlinux", "alpine", "gentoo", "nixos")


class Lxc:
    """Containers live in <root>/var/lib/lxc/<vmid>: rootfs, volumes, passthrough (device nodes), config."""

    def __init__(self, root: Path = Path("/")) -> None:
        self._lxc = root / "var/lib/lxc"
        self._log = root / "var/log/lxc"

    def device(self, path: str) -> Device | None:
        try:
            status = os.stat(path)  # noqa: PTH116 - not below root: device nodes are the machine's
        except OSError:
            return None
        if stat.S_ISCHR(status.st_mode) or stat.S_ISBLK(status.st_mode):
            kind = "c" if stat.S_ISCHR(status.st_mode) else "b"
            return Device(kind, os.major(status.st_rdev), os.minor(status.st_rdev))
        raise PctError(f"{path} is not a device")

    def has_bridge(self, name: str) -> bool:
        return Path("/sys/class/net", name, "bridge").is_dir()

    def has_directory(self, path: str) -> bool:
        return Path(path).exists()

    def init_pid(self, vmid: int) -> int | None:
        if not (self._lxc / str(vmid) / "config").exists():
            return None
        said = self._tool("lxc-info", vmid, "-p", "-H").stdout.strip()
        return int(said) if said.isdigit() else None

    def _directory(self, vmid: int) -> Path:
        return self._lxc / str(vmid)

    def _tool(self, name: str, vmid: int, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [name, "-P", str(self._lxc), "-n", str(vmid), *arguments]
        return subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)

    # Files

    def unpack(self, vmid: int, archive: Path, unprivileged: bool) -> Unpacked:
        directory, rootfs = self._directory(vmid), self._directory(vmid) / "rootfs"
        # Without a configuration, what lies there is of a creation that was cut off.
        self.remove(vmid)
        rootfs.mkdir(parents=True)
        directory.chmod(0o755)
        command = ["tar", "xpf", str(archive), "--totals", "--numeric-owner", "-C", str(rootfs)]
        command += ["--anchored", "--exclude=./dev/*", "--exclude=dev/*"]
        if unprivileged:
            _allow_ids()
            os.chown(rootfs, FIRST_ID, FIRST_ID)
            command = ["lxc-usernsexec", *_IDMAP, "--", *command]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise PctError(f"command '{' '.join(command)}' failed: exit code {done.returncode}: {done.stderr.strip()}")
        rootfs.chmod(0o755)
        return Unpacked(_ostype(rootfs), _systemd(rootfs), done.stderr)

    def allocate(self, vmid: int, volume: str, unprivileged: bool) -> None:
        path = Path(volume_path(self._directory(vmid), volume))
        path.mkdir(parents=True, exist_ok=True)
        if unprivileged:
            os.chown(path, FIRST_ID, FIRST_ID)

    def remove(self, vmid: int) -> None:
        directory = self._directory(vmid)
        mounts.unmount(directory / "passthrough")
        if below := mounts.mounted_below(directory):
            raise PctError(f"unable to remove {directory}: {', '.join(below)} is mounted there")
        subprocess.run(["rm", "-rf", "--one-file-system", "--", directory], check=True)

    def _owner(self, config: Config) -> int:
        return FIRST_ID if config.unprivileged else 0

    def prepare(self, vmid: int, config: Config) -> None:
        rootfs, owner = self._directory(vmid) / "rootfs", self._owner(config)
        old_hosts = _text(rootfs / "etc/hosts")
        guest_files.put(rootfs, "etc/hostname", f"{config.settings['hostname'].partition('.')[0]}\n", owner)
        guest_files.put(rootfs, "etc/hosts", guest_files.hosts(config, old_hosts), owner)
        resolver = guest_files.resolver(config, _text(Path("/etc/resolv.conf")))
        guest_files.put(rootfs, "etc/resolv.conf", resolver, owner)
        if _has_ifupdown(rootfs):
            guest_files.put(rootfs, "etc/network/interfaces", guest_files.interfaces(config), owner)

    def set_up_access(self, vmid: int, password: str | None, keys: str | None) -> None:
        rootfs = self._directory(vmid) / "rootfs"
        owner = rootfs.stat().st_uid
        if keys is not None:
            guest_files.put(
                rootfs, "root/.ssh/authorized_keys", keys if keys.endswith("\n") else f"{keys}\n", owner, 0o600
            )
            (rootfs / "root/.ssh").chmod(0o700)
        if password is not None:
            command = ["chpasswd", "-R", str(rootfs)]
            done = subprocess.run(command, input=f"root:{password}\n", capture_output=True, text=True, check=False)
            if done.returncode != 0:
                raise PctError(f"unable to set the password: {done.stderr.strip()}")

    # Running

    def start(self, vmid: int, config: Config) -> None:
        directory = self._directory(vmid)
        devices = self._make_nodes(vmid, config)
        host = Host(
            directory,
            _controllers(),
            devices,
            guest_network=_has_ifupdown(directory / "rootfs"),
            driver=Path("/run/servelab-gpu").is_dir(),
        )
        (directory / "config").write_text("\n".join(lines(vmid, config, host)) + "\n")
        self._log.mkdir(parents=True, exist_ok=True)
        log = self._log / f"{vmid}.log"
        log.unlink(missing_ok=True)
        done = self._tool("lxc-start", vmid, "-d", "-l", "ERROR", "-o", str(log))
        if done.returncode != 0 or self._tool("lxc-wait", vmid, "-s", "RUNNING", "-t", "30").returncode != 0:
            self._tool("lxc-stop", vmid, "-k")
            mounts.unmount(directory / "passthrough")
            sys.stderr.write(_text(log)[-4000:] or done.stderr)
            raise PctError(f"startup for container '{vmid}' failed")

    def _make_nodes(self, vmid: int, config: Config) -> dict[str, Device]:
        passthrough = self._directory(vmid) / "passthrough"
        mounts.mount_tmpfs(passthrough)
        return {
            DEV.parse(value)["path"]: self._make_node(vmid, config, DEV.parse(value))
            for _, value in numbered(config, "dev")
        }

    def _make_node(self, vmid: int, config: Config, wanted: dict[str, str]) -> Device:
        """The guest's own node of a device: mode and owner are the container's, not those of the node's node."""
        device = self.device(wanted["path"])
        if device is None:
            raise PctError(f"Device {wanted['path']} does not exist")
        path = Path(f"{self._directory(vmid)}/passthrough{wanted['path']}")
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = int(wanted.get("mode", "0660"), 8)
        kind = stat.S_IFCHR if device.kind == "c" else stat.S_IFBLK
        try:
            os.mknod(path, kind | mode, os.makedev(device.major, device.minor))
        except OSError as error:
            raise PctError(f"failed to mknod {path}: {error.strerror}") from None
        path.chmod(mode)
        first = self._owner(config)
        os.chown(path, first + int(wanted.get("uid", "0")), first + int(wanted.get("gid", "0")))
        return device

    def stop(self, vmid: int) -> None:
        self._tool("lxc-stop", vmid, "-k")
        self._gone(vmid)

    def shut_down(self, vmid: int, timeout: int) -> bool:
        if self._tool("lxc-stop", vmid, "--nokill", "--timeout", str(timeout)).returncode != 0:
            return False
        self._gone(vmid)
        return True

    def _gone(self, vmid: int) -> None:
        if self._tool("lxc-wait", vmid, "-s", "STOPPED", "-t", "30").returncode != 0:
            raise PctError(f"container '{vmid}' did not stop within 30 s")
        mounts.unmount(self._directory(vmid) / "passthrough")

    def attach(self, vmid: int, command: Sequence[str], keep_environment: bool) -> int:
        """Become the command: its streams and its status are ours, and what kills us kills it."""
        sys.stdout.flush()
        sys.stderr.flush()
        kept = ["--keep-env"] if keep_environment else ["--clear-env"]
        words = ["lxc-attach", "-P", str(self._lxc), "-n", str(vmid), *kept]
        environment = {**os.environ, "PATH": _PATH}
        environment.pop("PYTHONPATH", None)  # set by our own wrapper; the guest's Python must not see it
        os.execvpe(words[0], [*words, "--", *command] if command else words, environment)

    def add_device(self, vmid: int, config: Config, properties: dict[str, str]) -> None:
        pid = self._require_pid(vmid)
        device = self._make_node(vmid, config, properties)
        source = Path(f"{self._directory(vmid)}/passthrough{properties['path']}")
        rule = f"{device.kind} {device.major}:{device.minor} rw"
        self._tool("lxc-cgroup", vmid, "devices.allow", rule)
        mounts.bind_into(pid, source, properties["path"], directory=False, owner=self._owner(config))

    def add_mount(self, vmid: int, config: Config, properties: dict[str, str]) -> None:
        source = Path(volume_path(self._directory(vmid), properties["volume"]))
        target = "/" + properties["mp"].lstrip("/")
        mounts.bind_into(self._require_pid(vmid), source, target, directory=True, owner=self._owner(config))

    def _require_pid(self, vmid: int) -> int:
        pid = self.init_pid(vmid)
        if pid is None:
            raise PctError(f"CT {vmid} not running")
        return pid

    def guest_root(self, vmid: int) -> tuple[Path, int | None]:
        pid = self._require_pid(vmid)
        own = os.stat("/proc/self/ns/user").st_ino  # noqa: PTH116
        shared = os.stat(f"/proc/{pid}/ns/user").st_ino == own  # noqa: PTH116
        return Path(f"/proc/{pid}/root"), None if shared else pid


def _text(path: Path) -> str:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return ""


def _allow_ids() -> None:
    """Real nodes come with these lines; without them no user may be mapped."""
    for table in ("/etc/subuid", "/etc/subgid"):
        line = f"root:{FIRST_ID}:{IDS}\n"
        if line not in _text(Path(table)):
            with Path(table).open("a") as file:
                file.write(line)


def _ostype(rootfs: Path) -> str:
    match = re.search(r'(?m)^ID="?(\w+)"?', _text(rootfs / "usr/lib/os-release") or _text(rootfs / "etc/os-release"))
    return match[1] if match and match[1] in _OSTYPES else "unmanaged"


def _systemd(rootfs: Path) -> int:
    names = [path.name for path in rootfs.glob("usr/lib/*/systemd/libsystemd-shared-*.so")]
    names += [path.name for path in rootfs.glob("usr/lib/systemd/libsystemd-shared-*.so")]
    versions = [int(match[1]) for name in names if (match := re.search(r"-(\d+)", name))]
    return max(versions, default=0)


def _has_ifupdown(rootfs: Path) -> bool:
    return (rootfs / "usr/sbin/ifup").exists() or (rootfs / "sbin/ifup").exists()


def _controllers() -> frozenset[str]:
    """What cgroup limits can be set: none on a host where version 1 has the controllers."""
    found = set(_text(Path("/sys/fs/cgroup/cgroup.subtree_control")).split())
    if "memory" in found and any(Path("/sys/fs/cgroup").glob("*/memory.swap.max")):
        found.add("memory.swap")
    return frozenset(found)
