"""Checks of single values. Each returns the text as it is stored, or raises ValueError with the real message."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

Check = Callable[[str], str]

_TRUE = re.compile(r"(1|on|yes|true)", re.IGNORECASE)
_FALSE = re.compile(r"(0|off|no|false)", re.IGNORECASE)
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9-]*[a-zA-Z0-9])?"
_DNS_NAME = re.compile(rf"(?:{_LABEL}\.)*{_LABEL}")
_IPV4 = re.compile(r"(?:(?:25[0-5]|2[0-4]\d|1?\d?\d)\.){3}(?:25[0-5]|2[0-4]\d|1?\d?\d)")
_IPV6 = re.compile(r"[0-9a-fA-F:]*:[0-9a-fA-F:.]*")
_CONFIG_ID = re.compile(r"[a-zA-Z][a-zA-Z0-9_-]+")


def as_boolean(text: str) -> bool | None:
    """What the text means; None when it means neither."""
    if _TRUE.fullmatch(text):
        return True
    return False if _FALSE.fullmatch(text) else None


def boolean(text: str) -> str:
    meaning = as_boolean(text)
    if meaning is None:
        raise ValueError(f"type check ('boolean') failed - got '{text}'")
    return str(int(meaning))


def integer(minimum: int | None = None, maximum: int | None = None) -> Check:
    """A whole number, kept as written ("01024" stays)."""

    def check(text: str) -> str:
        if not re.fullmatch(r"[+-]?\d+", text):
            raise ValueError(f"type check ('integer') failed - got '{text}'")
        _within(int(text), minimum, maximum)
        return text

    return check


def number(minimum: float | None = None, maximum: float | None = None) -> Check:
    def check(text: str) -> str:
        if not re.fullmatch(r"[+-]?\d+(\.\d+)?", text):
            raise ValueError(f"type check ('number') failed - got '{text}'")
        _within(float(text), minimum, maximum)
        return text

    return check


def _within(value: float, minimum: float | None, maximum: float | None) -> None:
    if minimum is not None and value < minimum:
        raise ValueError(f"value must have a minimum value of {minimum}")
    if maximum is not None and value > maximum:
        raise ValueError(f"value must have a maximum value of {maximum}")


def text(value: str) -> str:
    """Anything."""
    return value


def pattern(expression: str) -> Check:
    compiled = re.compile(expression)

    def check(value: str) -> str:
        if not compiled.fullmatch(value):
            raise ValueError("value does not match the regex pattern")
        return value

    return check


def one_of(*words: str) -> Check:
    def check(value: str) -> str:
        if value not in words:
            raise ValueError(f"value '{value}' does not have a value in the enumeration '{', '.join(words)}'")
        return value

    return check


def formatted(test: Callable[[str], bool], message: str) -> Check:
    """A named format: the real verifiers die with a line of their own, hence the newline."""

    def check(value: str) -> str:
        if not test(value):
            raise ValueError(f"invalid format - {message.format(value)}\n")
        return value

    return check


def split_list(value: str) -> list[str]:
    """Proxmox lists may be separated by blanks, commas, semicolons or NULs."""
    return [part for part in re.split(r"[\0,;\s]+", value) if part]


def is_ip(value: str) -> bool:
    return bool(_IPV4.fullmatch(value) or _IPV6.fullmatch(value))


def _is_network(value: str) -> bool:
    address, slash, length = value.partition("/")
    return bool(_IPV4.fullmatch(address) and slash and length.isdigit() and int(length) <= 32)


def _is_network6(value: str) -> bool:
    address, slash, length = value.partition("/")
    return bool(_IPV6.fullmatch(address) and slash and length.isdigit() and int(length) <= 128)


def _is_mac(value: str) -> bool:
    return bool(re.fullmatch(r"(?i)[0-9a-f][02468ace](?::[0-9a-f]{2}){5}", value))


def _is_time_zone(value: str) -> bool:
    if value in {"host", "UTC"}:
        return True
    return (
        bool(re.fullmatch(r"[A-Za-z0-9_+-]+(/[A-Za-z0-9_+-]+)*", value))
        and Path("/usr/share/zoneinfo", value).is_file()
    )


def _is_startup(value: str) -> bool:
    return all(re.fullmatch(r"(order=)?\d+|up=\d+|down=\d+", part) for part in value.split(","))


vm_id = formatted(lambda v: v.isdigit() and 100 <= int(v) <= 999_999_999, "value does not look like a valid VM ID")
config_id = formatted(lambda v: bool(_CONFIG_ID.fullmatch(v)), "invalid configuration ID '{}'")
dns_name = formatted(lambda v: bool(_DNS_NAME.fullmatch(v)), "value does not look like a valid DNS name")
device_path = formatted(lambda v: v.startswith("/dev/") and ".." not in v.split("/"), "{} is not a valid device path")
mount_path = formatted(lambda v: ".." not in v.split("/"), "{} is not a valid mount path")
mac = formatted(_is_mac, "value does not look like a valid unicast MAC address")
time_zone = formatted(_is_time_zone, "invalid time zone '{}'")
startup = formatted(_is_startup, "unable to parse startup options")
storage_id = formatted(
    lambda v: bool(re.fullmatch(r"(?i)[a-z][a-z0-9._-]*[a-z0-9]", v)), "storage ID '{}' contains illegal characters"
)
network = formatted(
    lambda v: v in {"dhcp", "manual"} or _is_network(v), "value does not look like a valid ipv4 network configuration"
)
network6 = formatted(
    lambda v: v in {"auto", "dhcp", "manual"} or _is_network6(v),
    "value does not look like a valid ipv6 network configuration",
)
ipv4 = formatted(lambda v: bool(_IPV4.fullmatch(v)), "value does not look like a valid ipv4 address")
ipv6 = formatted(lambda v: bool(_IPV6.fullmatch(v)), "value does not look like a valid ipv6 address")
address_list = formatted(
    lambda v: all(is_ip(part) for part in split_list(v)), "value does not look like a valid ip address"
)
name_list = formatted(
    lambda v: all(_DNS_NAME.fullmatch(p) for p in split_list(v)), "value does not look like a valid DNS name"
)
tag_list = formatted(
    lambda v: all(re.fullmatch(r"(?i)[a-z0-9_][a-z0-9_+.-]*", p) for p in split_list(v)), "invalid characters in tag"
)
