"""Driver versions: three fields, two files, and libraries that are links."""

from __future__ import annotations

from pathlib import Path

import pytest

from servelab.shared.driver_version import (
    KernelDriver,
    installed_libraries,
    library_problems,
    node_problems,
    parse_kernel_driver,
    version_tuple,
)

OPEN = (
    "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.95.05  Release Build  (dvs-builder@U22-I3-18-3)\n"
    "GCC version:  gcc version 14.2.0 (Debian 14.2.0-19)\n"
)
CLOSED = (
    "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.183.01  Sun May 12 19:39:15 UTC 2024\n"
    "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (OPEN, KernelDriver("580.95.05", True)),
        (CLOSED, KernelDriver("535.183.01", False)),
        ("", None),
        ("GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n", None),
    ],
)
def test_the_kernel_driver_is_read(text: str, expected: KernelDriver | None) -> None:
    assert parse_kernel_driver(text) == expected


def test_versions_are_ordered_by_number() -> None:
    assert version_tuple("580.65.06") < version_tuple("580.95.05") < version_tuple("580.126.09")


def test_libraries_are_found_behind_their_links(tmp_path: Path) -> None:
    (tmp_path / "libcuda.so.580.95.05").touch()
    (tmp_path / "libcuda.so.1").symlink_to("libcuda.so.580.95.05")
    (tmp_path / "libcuda.so").symlink_to("libcuda.so.1")
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "libnvidia-ml.so.580.82.07").touch()
    (elsewhere / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.580.82.07")
    (tmp_path / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.570.1.1")  # points nowhere
    cache = (
        f"\tlibnvidia-ml.so.1 (libc6,x86-64) => {elsewhere}/libnvidia-ml.so.1\n\tlibc.so.6 (libc6) => /lib/libc.so.6\n"
    )
    found = installed_libraries(cache, [str(tmp_path)])
    assert found == {"libcuda.so": ["580.95.05"], "libnvidia-ml.so": ["580.82.07"]}


NODE = KernelDriver("580.95.05", True)


def test_equal_to_the_last_digit_is_well() -> None:
    assert library_problems(NODE, {"libcuda.so": ["580.95.05"], "libnvidia-ml.so": ["580.95.05"]}) == []


@pytest.mark.parametrize(
    ("versions", "said"),
    [
        (["580.95.06"], "is 580.95.06, but the node's kernel driver is 580.95.05"),
        ([], "is not installed in the guest"),
        (["580.82.07", "580.95.05"], "and also as 580.82.07"),
    ],
)
def test_what_differs_is_named_with_both_versions(versions: list[str], said: str) -> None:
    problems = library_problems(NODE, {"libcuda.so": versions})
    assert len(problems) == 1 and said in problems[0]


def test_without_a_kernel_driver_nothing_can_be_compared() -> None:
    assert "no driver is loaded on the node" in library_problems(None, {"libcuda.so": []})[0]


GUEST = {"nvidia0": True, "nvidia1": True, "nvidiactl": True, "nvidia-uvm": True, "nvidia-caps": False}


def test_a_guest_with_its_nodes_has_no_problem() -> None:
    assert node_problems(GUEST, 2) == []
    assert node_problems(GUEST, None) == []


def test_a_regular_file_in_the_place_of_a_node_is_named() -> None:
    problems = node_problems({**GUEST, "nvidia-uvm": False}, 2)
    assert len(problems) == 1 and "/dev/nvidia-uvm in the guest is no character device" in problems[0]


def test_missing_cards_and_a_missing_uvm_are_two_problems() -> None:
    problems = node_problems({"nvidia0": True, "nvidiactl": True}, 2)
    assert len(problems) == 2
    assert "/dev/nvidia-uvm is missing" in problems[0] and "sees 1 cards and 2 were given" in problems[1]
