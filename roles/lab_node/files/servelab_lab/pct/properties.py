"""Property strings: `path,mode=0666` and the like."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from . import values
from .values import Check


@dataclass(frozen=True)
class Format:
    """What may stand in a property string: the check of each key, the key that may stand without its name, and those
    that must be there."""

    checks: Mapping[str, Check]
    default: str | None = None
    required: tuple[str, ...] = ()

    def parse(self, text: str) -> dict[str, str]:
        """The properties as written. Raises ValueError for what is no property string or names no known key."""
        found: dict[str, str] = {}
        for part in text.split(","):
            if not part:
                continue  # a trailing comma is allowed
            key, equals, value = part.partition("=")
            if not equals:
                if self.default is None:
                    raise ValueError("value without key, but schema does not define a default key\n")
                key, value = self.default, part
            if key in found:
                raise ValueError(f"duplicate key in comma-separated list property: {key}\n")
            found[key] = value
        return found

    def verify(self, option: str, text: str) -> dict[str, str]:
        """The properties, every one checked. Raises ValueError with the message for `option`."""
        try:
            found = self.parse(text)
        except ValueError as error:
            raise ValueError(f"invalid format - {error}") from None
        wrong = {}
        for key, value in found.items():
            if key not in self.checks:
                wrong[key] = "property is not defined in schema and the schema does not allow additional properties"
                continue
            try:
                self.checks[key](value)
            except ValueError as error:
                wrong[key] = str(error)
        wrong |= {key: "property is missing and it is not optional" for key in self.required if key not in found}
        if wrong:
            lines = "".join(f"{option}.{key}: {message}\n" for key, message in sorted(wrong.items()))
            raise ValueError(f"invalid format - format error\n{lines}")
        return found

    def print(self, properties: Mapping[str, str]) -> str:
        """The order Proxmox writes: the default key without its name, required ones, the rest sorted."""
        bare = [key for key in properties if key == self.default]
        first = [key for key in self.required if key in properties and key not in bare]
        rest = sorted(properties.keys() - {*first, *bare})
        return ",".join([properties[key] for key in bare] + [f"{key}={properties[key]}" for key in [*first, *rest]])


_ID = values.integer(0)

DEV = Format(
    {
        "path": values.device_path,
        "mode": values.pattern(r"0[0-7]{3}"),
        "uid": _ID,
        "gid": _ID,
        "deny-write": values.boolean,
    },
    default="path",
)
FEATURES = Format(
    {
        **dict.fromkeys(("nesting", "keyctl", "fuse", "mknod", "force_rw_sys"), values.boolean),
        "mount": values.pattern(r"[a-zA-Z0-9_; ]+"),
    }
)
NET = Format(
    {
        "name": values.pattern(r"[-_.\w]+"),
        "bridge": values.pattern(r"[-_.\w]+"),
        "hwaddr": values.mac,
        "ip": values.network,
        "gw": values.ipv4,
        "ip6": values.network6,
        "gw6": values.ipv6,
        "mtu": values.integer(64, 65535),
        "rate": values.number(0),
        "tag": values.integer(1, 4094),
        "trunks": values.pattern(r"\d+(?:-\d+)?(?:;\d+(?:-\d+)?)*"),
        "type": values.one_of("veth"),
        "firewall": values.boolean,
        "link_down": values.boolean,
        "host-managed": values.boolean,
    },
    required=("name",),
)
_VOLUME = {
    "volume": values.text,
    "size": values.pattern(r"\d+(?:\.\d+)?[KMGT]?"),
    "acl": values.boolean,
    "mountoptions": values.pattern(r"(?:discard|lazytime|noatime|nodev|noexec|nosuid)(?:;\w+)*"),
    "quota": values.boolean,
    "replicate": values.boolean,
    "ro": values.boolean,
    "shared": values.boolean,
}
ROOTFS = Format(_VOLUME, default="volume", required=("volume",))
MOUNT = Format(
    {**_VOLUME, "mp": values.mount_path, "backup": values.boolean, "keepattrs": values.boolean},
    default="volume",
    required=("volume", "mp"),
)
