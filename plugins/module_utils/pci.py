"""What the PCI configuration space of a card and of the ports above it says about peer-to-peer.

ACS redirects (request and completion) on a root or switch port send what one card writes to another up to the root
complex, where it is slow, or lost when the IOMMU translates. They are set anew at every boot, so the role copies this
file to the node, where a unit runs it: `pci.py clear` clears the redirects of the ports above NVIDIA's cards,
`pci.py restore` puts back what was there. Standard library only, and no import of its neighbours.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable
from pathlib import Path

__all__ = ["acs_offset", "acs_redirects", "aspm", "gpus", "ports_above"]

DEVICES = Path("/sys/bus/pci/devices")
STATE = Path("/run/servelab/acs.json")
NVIDIA, DISPLAY_CLASSES = "0x10de", ("0x0300", "0x0302")

_ACS, _PCI_EXPRESS = 0x000D, 0x10
_REQUEST_REDIRECT, _COMPLETION_REDIRECT = 0x04, 0x08
_REDIRECTS = {_REQUEST_REDIRECT: "ReqRedir", _COMPLETION_REDIRECT: "CmpltRedir"}
_BDF = re.compile(r"^[0-9a-f]{4}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]$")


def acs_offset(config: bytes) -> int | None:
    """Where the ACS control word is, None where the device has none. Only root reads more than the first 64 bytes."""
    offset, seen = 0x100, set()
    while offset >= 0x100 and offset + 8 <= len(config) and offset not in seen:
        seen.add(offset)
        header = int.from_bytes(config[offset : offset + 4], "little")
        if header in (0, 0xFFFFFFFF):
            return None
        if header & 0xFFFF == _ACS:
            return offset + 6
        offset = header >> 20
    return None


def acs_redirects(config: bytes) -> list[str] | None:
    """The redirects that are on, in lspci's names. None where the configuration could not be read or has no ACS."""
    offset = acs_offset(config)
    if offset is None:
        return None
    control = int.from_bytes(config[offset : offset + 2], "little")
    return [name for bit, name in _REDIRECTS.items() if control & bit]


def aspm(config: bytes) -> str | None:
    """The link's power saving: "off", "L0s", "L1" or "L0s L1"; None where it is not to be seen."""
    if len(config) < 0x40:
        return None
    offset, seen = config[0x34] & 0xFC, set()
    while offset and offset + 0x12 <= len(config) and offset not in seen:
        seen.add(offset)
        if config[offset] == _PCI_EXPRESS:
            bits = config[offset + 0x10] & 3
            return ("off", "L0s", "L1", "L0s L1")[bits]
        offset = config[offset + 1] & 0xFC
    return None


def gpus(devices: Path = DEVICES) -> list[str]:
    """The addresses of NVIDIA's cards (0000:01:00.0), their sound functions left out."""
    found = []
    for device in sorted(devices.glob("*")):
        vendor, kind = _text(device / "vendor"), _text(device / "class")
        if vendor == NVIDIA and kind.startswith(DISPLAY_CLASSES):
            found.append(device.name)
    return found


def ports_above(address: str, devices: Path = DEVICES) -> list[str]:
    """The root and switch ports above a device, the nearest last: the names in its real path."""
    path = (devices / address).resolve()
    return [part for part in path.parts[:-1] if _BDF.match(part)]


def read_config(address: str, devices: Path = DEVICES) -> bytes:
    try:
        return (devices / address / "config").read_bytes()
    except OSError:
        return b""


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""


def _write_control(address: str, offset: int, control: int, devices: Path) -> None:
    with (devices / address / "config").open("r+b", buffering=0) as handle:
        handle.seek(offset)
        handle.write(control.to_bytes(2, "little"))


def clear(addresses: Iterable[str], devices: Path = DEVICES, state: Path = STATE) -> dict[str, int]:
    """Clear the redirects of these ports; returns and keeps port → control word before, of those that had any."""
    before = json.loads(state.read_text()) if state.exists() else {}
    for address in addresses:
        config = read_config(address, devices)
        offset = acs_offset(config)
        if offset is None:
            continue
        control = int.from_bytes(config[offset : offset + 2], "little")
        if control & (_REQUEST_REDIRECT | _COMPLETION_REDIRECT):
            _write_control(address, offset, control & ~(_REQUEST_REDIRECT | _COMPLETION_REDIRECT), devices)
            before.setdefault(address, control)
    state.parent.mkdir(parents=True, exist_ok=True)
    state.write_text(json.dumps(before) + "\n")
    return before


def restore(devices: Path = DEVICES, state: Path = STATE) -> dict[str, int]:
    """Put back what `clear` found; returns port → control word."""
    before: dict[str, int] = json.loads(state.read_text()) if state.exists() else {}
    for address, control in before.items():
        offset = acs_offset(read_config(address, devices))
        if offset is not None:
            _write_control(address, offset, control, devices)
    state.unlink(missing_ok=True)
    return before


def main(arguments: list[str]) -> int:
    if arguments == ["clear"]:
        ports = dict.fromkeys(port for card in gpus() for port in ports_above(card))
        changed = clear(ports)
        print(f"ACS redirects are off on {len(ports)} ports above {len(gpus())} cards; they were on at {len(changed)}.")
    elif arguments == ["restore"]:
        print(f"ACS is as it was on {len(restore())} ports.")
    else:
        print("usage: pci.py clear | restore", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
