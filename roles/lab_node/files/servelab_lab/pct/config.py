"""A container's configuration file: sections [pve:pending] and one a snapshot, after the running configuration.

Reading never fails: a line that cannot be read is told and dropped, at the next write it is gone. That is the real
tool's way, and what makes hand-written files lose lines.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from urllib.parse import quote_from_bytes, unquote_to_bytes

from . import schema

_PENDING = re.compile(r"\[pve:pending\]\s*$", re.IGNORECASE)
_SNAPSHOT = re.compile(r"\[([a-z][a-z0-9_-]+)\]\s*$", re.IGNORECASE)
_RAW = re.compile(r"(lxc\.[a-z0-9_.-]+)(?::|\s*=)\s*(.*?)\s*$")
_OLD_DESCRIPTION = re.compile(r"description:\s*(.*\S)\s*$")
_DELETE = re.compile(r"delete:\s*(.*\S)\s*$")
_SETTING = re.compile(r"([a-z][a-z_]*\d*):\s*(.+?)\s*$")
_ENVIRONMENT = "lxc.environment.runtime"
# Everything but %, : and what is not printable ASCII.
_SAFE = "".join(chr(c) for c in range(0x20, 0x7F) if chr(c) not in "%:")

_RAW_ALLOWED = re.compile(
    r"lxc\.(?:aa_profile|aa_allow_incomplete|apparmor\..+|arch|autodev|autodev\.tmpfs\.size|cap\.(?:drop|keep)|cgroup2?\..+"
    r"|console\..+|environment(?:\.(?:runtime|hooks))?|ephemeral|execute\.cmd|group|haltsignal|hook\..+|id_map|idmap"
    r"|include|init\..+|init_cmd|keyring\.session|kmsg|loglevel|log\..+|logfile|monitor\..+|mount|mount\.(?:auto|entry|fstab)"
    r"|namespace\..+|net\..+|no_new_privs|prlimit\..+|proc\..+|pts|rebootsignal|se_context|seccomp|seccomp\..+|selinux\..+"
    r"|signal\..+|start\..+|stopsignal|syslog|sysctl\..+|tty|tty\.max|tty\.dir|uts\.name|utsname|rootfs\.mount|rootfs\.options)"
)
_RAW_GENERATED = {
    "lxc.rootfs": "lxc.rootfs is auto generated from rootfs",
    "lxc.rootfs.path": "lxc.rootfs.path is auto generated from rootfs",
    "lxc.network.type": "lxc.network.type is auto generated",
}


def encode(text: str) -> str:
    """One line of a description, as it is kept and shown."""
    return quote_from_bytes(text.encode("utf-8", "surrogateescape"), safe=_SAFE)


def decode(text: str) -> str:
    return unquote_to_bytes(text).decode("utf-8", "surrogateescape")


@dataclass
class Section:
    """Settings by key; `raw` holds the lxc.* lines in their order, `environment` the variables for the guest's init."""

    settings: dict[str, str] = field(default_factory=dict)
    raw: list[tuple[str, str]] = field(default_factory=list)
    environment: list[str] = field(default_factory=list)

    def copy(self) -> Section:
        return Section(dict(self.settings), list(self.raw), list(self.environment))

    def text(self) -> str:
        """As in the file: description, settings sorted as strings, environment, raw lines."""
        lines = [f"#{encode(line)}" for line in self.settings.get("description", "").rstrip("\n").split("\n")]
        if not self.settings.get("description"):
            lines = []
        lines += [f"{key}: {value}" for key, value in sorted(self.settings.items()) if key != "description"]
        lines += [f"{_ENVIRONMENT}: {entry}" for entry in self.environment]
        lines += [f"{key}: {value}" for key, value in self.raw]
        return "".join(f"{line}\n" for line in lines)


@dataclass
class Config(Section):
    """The running configuration, what waits for the next start, and the snapshots by name."""

    pending: Section = field(default_factory=Section)
    snapshots: dict[str, Section] = field(default_factory=dict)
    digest: str = ""

    @property
    def pending_deletes(self) -> list[str]:
        return [key.lstrip("!") for key in re.split(r"[,;\s]+", self.pending.settings.get("delete", "")) if key]

    @pending_deletes.setter
    def pending_deletes(self, keys: list[str]) -> None:
        if keys:
            self.pending.settings["delete"] = ",".join(sorted(set(keys)))
        else:
            self.pending.settings.pop("delete", None)

    @property
    def unprivileged(self) -> bool:
        return self.settings.get("unprivileged") == "1"

    def whole(self) -> str:
        """The text of the file."""
        text = self.text()
        if self.pending.settings:
            text += f"\n[pve:pending]\n{self.pending.text()}"
        for name, snapshot in sorted(self.snapshots.items()):
            text += f"\n[{name}]\n{snapshot.text()}"
        return text


class _Reader:
    def __init__(self, vmid: int, warn: Callable[[str], None]) -> None:
        self._vmid, self._warn = vmid, warn
        self.config = Config()
        self._section: Section = self.config
        self._description = ""

    def line(self, line: str) -> None:
        if not line.strip():
            return
        if _PENDING.match(line):
            self._enter(self.config.pending)
        elif match := _SNAPSHOT.match(line):
            self._enter(self.config.snapshots.setdefault(match[1], Section()))
        elif line.startswith("#"):
            self._description += decode(line[1:].rstrip("\r")) + "\n"
        elif match := _RAW.match(line):
            self._raw(match[1], match[2], line)
        elif match := _OLD_DESCRIPTION.match(line):
            self._description += decode(match[1])
        elif match := _DELETE.match(line):
            if self._section is self.config.pending:
                self._section.settings["delete"] = match[1]
            else:
                self._complain("property 'delete' is only allowed in [pve:pending]")
        elif match := _SETTING.match(line):
            self._setting(match[1], match[2])
        else:
            self._complain(f"unable to parse config: {line}")

    def finish(self) -> None:
        if self._description:
            self._section.settings["description"] = self._description
        self._description = ""

    def _enter(self, section: Section) -> None:
        self.finish()
        self._section = section

    def _complain(self, what: str) -> None:
        self._warn(f"vm {self._vmid} - {what}\n")

    def _raw(self, key: str, value: str, line: str) -> None:
        if key == _ENVIRONMENT:
            self._section.environment.append(value)
        elif key in _RAW_GENERATED:
            self._complain(f"{key}: {_RAW_GENERATED[key]}")
        elif _RAW_ALLOWED.fullmatch(key):
            self._section.raw.append((key, value))
        else:
            self._complain(f"unable to parse config: {line}")

    def _setting(self, key: str, value: str) -> None:
        try:
            value = schema.in_file(key, value)
        except ValueError as error:
            self._complain(f"unable to parse value of '{key}' - {error}")
        self._section.settings[key] = value


def read(vmid: int, text: str, warn: Callable[[str], None]) -> Config:
    """The configuration in `text`; `warn` gets a line for everything that could not be read."""
    reader = _Reader(vmid, warn)
    for line in text.split("\n"):
        reader.line(line)
    reader.finish()
    reader.config.digest = hashlib.sha1(text.encode("utf-8", "surrogateescape"), usedforsecurity=False).hexdigest()
    return reader.config
