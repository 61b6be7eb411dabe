"""A guest that passes its cards by low-level lines, on a node whose driver got other major numbers."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from servelab.shared.driver_version import node_problems
from servelab.shared.pve_conf import parse_conf
from servelab.shared.raw_devices import raw_device_lines, raw_device_notices

CASE = Path(__file__).parent / "cases/09-device-majors"
_LISTED = re.compile(r"^(.)\S+\s+\d+\s+\S+\s+\S+\s+(?:(\d+),)?.*?(/dev/nvidia\S+)$", re.MULTILINE)


def listed(name: str) -> dict[str, int | None]:
    """`ls -l`: path → major number, None for what is no character device."""
    found = _LISTED.findall((CASE / name).read_text())
    return {path: int(major) if kind == "c" else None for kind, major, path in found if not path.endswith(":")}


def test_the_four_problems_of_the_case_are_named() -> None:
    expected = json.loads((CASE / "expected.json").read_text())
    node = {path: major for path, major in listed("ls_host.txt").items() if major is not None}
    assert node["/dev/nvidia-uvm"] == expected["uvm_major_now"]
    raw = parse_conf((CASE / "ct.conf").read_text()).raw
    (notice,) = raw_device_notices(raw, node)
    assert "the cgroup allows 195, 509, but /dev/nvidia-uvm has the major number 511 now" in notice
    assert "/dev/nvidia1 is not passed" in notice
    assert "/dev/nvidia-uvm-tools is not passed" in notice
    assert "/dev/nvidia0" not in notice and "/dev/nvidiactl" not in notice
    assert "dev[n]" in notice and "loaded before the guests start" in notice

    guest = {Path(path).name: major is not None for path, major in listed("ls_container.txt").items()}
    assert guest == {"nvidia0": True, "nvidiactl": True, "nvidia-uvm": False}
    problems = node_problems(guest, 2)
    assert "/dev/nvidia-uvm in the guest is no character device" in problems[0]
    assert "sees 1 cards and 2 were given" in problems[1]


def test_lines_that_are_right_are_left_alone_unless_dev_entries_replace_them() -> None:
    raw = [("lxc.cgroup2.devices.allow", "c 195:* rwm"), ("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind")]
    assert raw_device_notices(raw, {"/dev/nvidia0": 195}) == []
    (notice,) = raw_device_notices(raw, {"/dev/nvidia0": 195}, ["/dev/nvidia0"])
    assert "Take those lines out" in notice


@pytest.mark.parametrize("everything", ["a", "a *:* rwm", "c *:* rwm"])
def test_a_guest_that_may_use_every_device_has_no_wrong_major(everything: str) -> None:
    raw = [("lxc.cgroup2.devices.allow", everything), ("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind")]
    assert raw_device_notices(raw, {"/dev/nvidia0": 195}) == []


def test_a_bound_device_that_the_node_lost_is_named() -> None:
    raw = [("lxc.cgroup2.devices.allow", "c *:* rwm"), ("lxc.mount.entry", "/dev/nvidia-uvm dev/nvidia-uvm none bind")]
    (notice,) = raw_device_notices(raw, {})
    assert "/dev/nvidia-uvm is bound, but the node has no such device now" in notice


def test_a_guest_without_such_lines_hears_nothing() -> None:
    assert raw_device_notices([("lxc.mount.entry", "/srv srv none bind")], {"/dev/nvidia0": 195}) == []


def test_lines_for_a_node_that_knows_no_dev_entries() -> None:
    majors = {"/dev/nvidia0": 195, "/dev/nvidiactl": 195, "/dev/nvidia-uvm": 511}
    lines = raw_device_lines([*majors, "/dev/nvidia-uvm-tools"], majors)
    assert lines == [
        ("lxc.cgroup2.devices.allow", "c 195:* rwm"),
        ("lxc.cgroup2.devices.allow", "c 511:* rwm"),
        ("lxc.mount.entry", "/dev/nvidia0 dev/nvidia0 none bind,create=file"),
        ("lxc.mount.entry", "/dev/nvidiactl dev/nvidiactl none bind,create=file"),
        ("lxc.mount.entry", "/dev/nvidia-uvm dev/nvidia-uvm none bind,create=file"),
    ]
    # With them alone nothing is wrong, until a boot gives nvidia-uvm another number.
    assert raw_device_notices(lines, majors) == []
    (notice,) = raw_device_notices(lines, {**majors, "/dev/nvidia-uvm": 508})
    assert "/dev/nvidia-uvm has the major number 508 now" in notice
