"""The options of a container: what the command line takes and what a configuration file holds."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from . import properties, values
from .errors import BadParameters
from .properties import Format
from .values import Check

LOCKS = (
    *("backup", "create", "destroyed", "disk", "fstrim", "migrate"),
    *("mounted", "rollback", "snapshot", "snapshot-delete"),
)
OS_TYPES = (
    *("debian", "devuan", "ubuntu", "centos", "fedora", "opensuse"),
    *("archlinux", "alpine", "gentoo", "nixos", "unmanaged"),
)


@dataclass(frozen=True)
class Option:
    """`kind`: boolean options may stand without a value, list options may be repeated, of others the last counts.
    `form` is the property string's format where the value is one."""

    kind: str = "string"
    check: Check = values.text
    form: Format | None = None

    def verify(self, name: str, value: str) -> str:
        """The value as stored. Raises ValueError with the message to show for option `name`."""
        if self.form is not None:
            self.form.verify(name, value)
            return value
        return self.check(value)


_NUMBER = re.compile(r"^(dev|net|mp|unused)(0|[1-9]\d*)$")
# Highest number of each family.
_FAMILIES = {"dev": 255, "net": 31, "mp": 255, "unused": 255}
_FORMS = {"dev": properties.DEV, "net": properties.NET, "mp": properties.MOUNT, "unused": properties.ROOTFS}

_PLAIN: dict[str, Option] = {
    "arch": Option(check=values.one_of("amd64", "i386", "arm64", "armhf", "riscv32", "riscv64")),
    "cmode": Option(check=values.one_of("shell", "console", "tty")),
    "console": Option("boolean", values.boolean),
    "cores": Option(check=values.integer(1, 8192)),
    "cpulimit": Option(check=values.number(0, 8192)),
    "cpuunits": Option(check=values.integer(0, 500000)),
    "debug": Option("boolean", values.boolean),
    "description": Option(),
    "env": Option(),
    "features": Option(form=properties.FEATURES),
    "hookscript": Option(),
    "hostname": Option(check=values.dns_name),
    "lock": Option(check=values.one_of(*LOCKS)),
    "memory": Option(check=values.integer(16)),
    "nameserver": Option("list", values.address_list),
    "onboot": Option("boolean", values.boolean),
    "ostype": Option(check=values.one_of(*OS_TYPES)),
    "protection": Option("boolean", values.boolean),
    "rootfs": Option(form=properties.ROOTFS),
    "searchdomain": Option("list", values.name_list),
    "startup": Option(check=values.startup),
    "swap": Option(check=values.integer(0)),
    "tags": Option("list", values.tag_list),
    "template": Option("boolean", values.boolean),
    "timezone": Option(check=values.time_zone),
    "tty": Option(check=values.integer(0, 6)),
    "unprivileged": Option("boolean", values.boolean),
}
# In the file, not on the command line.
_KEPT: dict[str, Option] = {
    "parent": Option(check=values.config_id),
    "snaptime": Option(check=values.integer(0)),
    "snapstate": Option(),
    "digest": Option(),
}


def family(name: str) -> tuple[str, int] | None:
    """("dev", 3) of "dev3"; None for what is not numbered or numbered too high."""
    match = _NUMBER.match(name)
    if not match or int(match[2]) > _FAMILIES[match[1]]:
        return None
    return match[1], int(match[2])


def option(name: str) -> Option | None:
    """The option of that name, as `pct set` and configuration files know it."""
    if name in _PLAIN:
        return _PLAIN[name]
    member = family(name)
    return Option(form=_FORMS[member[0]]) if member else None


def command_line_options() -> list[str]:
    """Every name that `pct set` takes for a value of the container."""
    numbered = [f"{kind}{i}" for kind, last in _FAMILIES.items() for i in range(last + 1)]
    return [*_PLAIN, *numbered]


def in_file(key: str, value: str) -> str:
    """A value read from a file, as Proxmox understands it. Raises ValueError; the value is kept all the same."""
    known = option(key) or _KEPT.get(key)
    if known is None:
        raise ValueError(f"unknown setting '{key}'")
    if known.check in {_PLAIN["memory"].check, _PLAIN["swap"].check, _PLAIN["cores"].check, _PLAIN["cpuunits"].check}:
        if not value.isdigit():
            raise ValueError(f"type check ('integer') failed - got '{value}'")
        return str(int(value))
    if known.kind == "boolean":
        return values.boolean(value)
    return value


def verify(given: Mapping[str, str]) -> dict[str, str]:
    """All the values of one call, as stored. Raises BadParameters with every message at once."""
    stored, wrong = {}, {}
    for name, value in given.items():
        known = option(name)
        try:
            stored[name] = known.verify(name, value) if known else value
        except ValueError as error:
            wrong[name] = str(error)
    if wrong:
        raise BadParameters(wrong)
    return stored
