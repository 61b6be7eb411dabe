"""Configuration spaces made by hand: where ACS and ASPM are; clearing and restoring touch two bits and no more."""

from __future__ import annotations

import pytest

from servelab.shared import pci

ACS, EXPRESS = 0x000D, 0x10


def space(acs: int | None = None, aspm: int | None = None, before: int = 0) -> bytearray:
    """4096 bytes with an ACS control word, behind `before` other extended capabilities, and ASPM control bits."""
    config = bytearray(4096)
    if aspm is not None:
        config[0x34] = 0x48  # a power-management capability first
        config[0x48:0x4A] = bytes([0x01, 0x60])
        config[0x60:0x62] = bytes([EXPRESS, 0x00])
        config[0x70] = 0xC0 | aspm
    offset = 0x100
    for _ in range(before):
        config[offset : offset + 4] = (((offset + 0x40) << 20) | (1 << 16) | 0x0001).to_bytes(4, "little")
        offset += 0x40
    if acs is not None:
        config[offset : offset + 4] = ((1 << 16) | ACS).to_bytes(4, "little")
        config[offset + 6 : offset + 8] = acs.to_bytes(2, "little")
    return config


@pytest.mark.parametrize(
    ("config", "redirects"),
    [
        (space(acs=0x001D), ["ReqRedir", "CmpltRedir"]),  # as Linux sets it: SV RR CR UF
        (space(acs=0x001D, before=3), ["ReqRedir", "CmpltRedir"]),
        (space(acs=0x0011), []),
        (space(acs=0x0004), ["ReqRedir"]),
        (space(), None),
        (space(before=2), None),
        (bytes(64), None),  # what anybody but root may read
        (b"", None),
        (bytes([0xFF]) * 4096, None),  # a device that fell off the bus
    ],
)
def test_redirects(config, redirects):
    assert pci.acs_redirects(bytes(config)) == redirects


@pytest.mark.parametrize(("bits", "said"), [(0, "off"), (1, "L0s"), (2, "L1"), (3, "L0s L1")])
def test_power_saving(bits, said):
    assert pci.aspm(bytes(space(aspm=bits))) == said


def test_a_list_of_capabilities_that_bites_its_tail_ends():
    config = space(before=1)
    config[0x140:0x144] = ((0x100 << 20) | (1 << 16) | 0x0001).to_bytes(4, "little")
    assert pci.acs_redirects(bytes(config)) is None
    config = space(aspm=1)
    config[0x48:0x4A] = bytes([0x01, 0x48])
    assert pci.aspm(bytes(config)) is None


@pytest.fixture
def bus(tmp_path):
    """A root port 00:01.1, a switch 40:00.0 with 41:00.0 below it, and three devices as sysfs shows them."""
    root = tmp_path / "devices/pci0000:00"
    port, other = root / "0000:00:01.1", root / "0000:00:02.1/0000:40:00.0"
    for path, config, vendor, kind in (
        (port, space(acs=0x001D), "0x1022", "0x060400"),
        (root / "0000:00:02.1", space(acs=0x0011), "0x1022", "0x060400"),
        (other, space(acs=0x001C, before=2), "0x10b5", "0x060400"),
        (port / "0000:01:00.0", space(aspm=2), "0x10de", "0x030000"),
        (port / "0000:01:00.1", space(), "0x10de", "0x040300"),  # its sound
        (other / "0000:41:00.0", space(), "0x10de", "0x030200"),
    ):
        path.mkdir(parents=True)
        (path / "config").write_bytes(config)
        (path / "vendor").write_text(vendor + "\n")
        (path / "class").write_text(kind + "\n")
    devices = tmp_path / "bus"
    devices.mkdir()
    for path in root.rglob("config"):
        (devices / path.parent.name).symlink_to(path.parent)
    return devices


def test_only_cards_and_the_ports_above_them(bus):
    assert pci.gpus(bus) == ["0000:01:00.0", "0000:41:00.0"]
    assert pci.ports_above("0000:01:00.0", bus) == ["0000:00:01.1"]
    assert pci.ports_above("0000:41:00.0", bus) == ["0000:00:02.1", "0000:40:00.0"]


def test_clearing_touches_two_bits_and_restoring_puts_them_back(bus, tmp_path):
    state = tmp_path / "run/acs.json"
    names = ["0000:00:01.1", "0000:00:02.1", "0000:40:00.0", "0000:01:00.0"]
    before = {name: pci.read_config(name, bus) for name in names}
    assert pci.clear(names, bus, state) == {"0000:00:01.1": 0x001D, "0000:40:00.0": 0x001C}
    after = {name: pci.read_config(name, bus) for name in names}
    differ = {name: [i for i in range(4096) if before[name][i] != after[name][i]] for name in names}
    assert differ == {"0000:00:01.1": [0x106], "0000:00:02.1": [], "0000:40:00.0": [0x186], "0000:01:00.0": []}
    assert after["0000:00:01.1"][0x106] == 0x11 and after["0000:40:00.0"][0x186] == 0x10
    # Twice is once: what was there first is what comes back.
    pci.clear(names, bus, state)
    assert pci.restore(bus, state) == {"0000:00:01.1": 0x001D, "0000:40:00.0": 0x001C}
    assert {name: pci.read_config(name, bus) for name in names} == before
    assert not state.exists() and pci.restore(bus, state) == {}


def test_wrong_usage_is_said(capsys):
    assert pci.main(["off"]) == 2
    assert "clear | restore" in capsys.readouterr().err
