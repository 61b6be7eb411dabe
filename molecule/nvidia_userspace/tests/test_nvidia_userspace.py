"""One digit off, a card too few, a file instead of a card, no nvidia-smi: each ends in its own sentence."""

from __future__ import annotations

import pytest

LIBRARIES = "/usr/lib/x86_64-linux-gnu"


def test_a_good_guest_passes_and_nothing_changes(play):
    played = play("--diff")
    assert played.ok
    assert played.changed == []
    sentence = "8 GPUs, driver 580.95.05, the libraries are of the same version."
    assert [result["msg"] for result in played.results["Tell what the guest has"]] == [sentence] * 2


def test_a_library_one_digit_off_is_refused(play, guest):
    def rename(old: str, new: str) -> None:
        guest.check_output(
            f"cd {LIBRARIES} && mv libcuda.so.{old} libcuda.so.{new} && ln -sf libcuda.so.{new} libcuda.so.1"
        )

    rename("580.95.05", "580.95.06")
    try:
        played = play()
    finally:
        rename("580.95.06", "580.95.05")
    assert not played.ok
    assert "libcuda.so in the guest is 580.95.06, but the node's kernel driver is 580.95.05" in played.said
    assert "equal to the last digit: install 580.95.05 in the guest" in played.said
    assert "libnvidia-ml.so" not in played.said


def test_a_second_version_beside_the_right_one_is_refused(play, guest):
    other = f"{LIBRARIES}/libnvidia-ml.so.575.57.08"
    guest.check_output(f"cp {LIBRARIES}/libnvidia-ml.so.580.95.05 {other}")
    try:
        played = play()
    finally:
        guest.check_output(f"rm {other}")
    assert not played.ok
    assert "libnvidia-ml.so is installed in the guest as 580.95.05, which is right" in played.said
    assert "and also as 575.57.08; remove the other" in played.said


def test_all_problems_are_told_at_once(play, guest):
    guest.check_output("touch /dev/nvidia9")
    try:
        played = play(nvidia_userspace_gpus=4)
    finally:
        guest.check_output("rm /dev/nvidia9")
    assert not played.ok
    assert "/dev/nvidia9 in the guest is no character device" in played.said
    assert "The guest sees 8 cards and 4 were given to it" in played.said


@pytest.mark.parametrize("method", ["runfile", "apt"])
def test_a_method_that_is_not_carried_out_says_what_to_do(play, method):
    played = play(nvidia_userspace_method=method)
    assert not played.ok
    assert f"nvidia_userspace_method is {method}, which this release does not carry out yet" in played.said
    assert "set nvidia_userspace_method to preinstalled" in played.said


@pytest.mark.parametrize("name", ["smi_hang", "no_devices", "driver_mismatch", "off_the_bus"])
def test_an_nvidia_smi_that_does_not_work_is_told_with_the_remedy(play, fault, name):
    with fault(name):
        played = play(nvidia_userspace_timeout=2)
    assert not played.ok
    assert played.said.startswith("nvidia-smi does not work in lab-gpu1: ")
    assert " Remedy: " in played.said
