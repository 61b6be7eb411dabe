"""Each fault has its own sentence; libraries come by installer or packages, of the node's version, without a module."""

from __future__ import annotations

import hashlib

import pytest

# One pass of the role is enough for most tests.
ONE = ("--skip-tags", "alternative")
LIBRARIES = "/usr/lib/x86_64-linux-gnu"


def test_a_good_guest_passes_and_nothing_changes(play):
    played = play("--diff")
    assert played.ok
    assert played.changed == []
    sentence = (
        "8 GPUs, driver 580.95.05, the libraries are of the same version; CUDA was not tried further: "
        "it finds no GPU (CUDA_ERROR_NO_DEVICE)."
    )
    assert [result["msg"] for result in played.results["Tell what the guest has"]] == [sentence] * 2


def test_a_library_one_digit_off_is_refused(play, guest):
    def rename(old: str, new: str) -> None:
        guest.check_output(
            f"cd {LIBRARIES} && mv libcuda.so.{old} libcuda.so.{new} && ln -sf libcuda.so.{new} libcuda.so.1"
        )

    rename("580.95.05", "580.95.06")
    try:
        played = play(*ONE)
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
        played = play(*ONE)
    finally:
        guest.check_output(f"rm {other}")
    assert not played.ok
    assert "libnvidia-ml.so is installed in the guest as 580.95.05, which is right" in played.said
    assert "and also as 575.57.08; remove the other" in played.said


def test_all_problems_are_told_at_once(play, guest):
    guest.check_output("touch /dev/nvidia9")
    try:
        played = play(*ONE, nvidia_userspace_gpus=4)
    finally:
        guest.check_output("rm /dev/nvidia9")
    assert not played.ok
    assert "/dev/nvidia9 in the guest is no character device" in played.said
    assert "The guest sees 8 cards and 4 were given to it" in played.said


def test_where_cuda_is_required_a_gpu_that_it_does_not_find_is_a_fault(play):
    # Whether or not somebody says how many there should be.
    played = play(*ONE, nvidia_userspace_require_cuda=True, nvidia_userspace_gpus=None)
    assert not played.ok
    assert "CUDA does not start in lab-gpu1: CUDA finds no GPU (CUDA_ERROR_NO_DEVICE). Remedy: " in played.said


@pytest.fixture
def no_libcuda(guest):
    """The guest without libcuda, as a new one is; whatever came in its place goes again."""
    guest.check_output(f"mv {LIBRARIES}/libcuda.so.580.95.05 /srv/repository/held.so && rm {LIBRARIES}/libcuda.so.1")
    yield
    guest.run("apt-mark unhold lab-libcuda1 lab-libnvidia-ml1; dpkg -P lab-libcuda1 lab-libnvidia-ml1")
    guest.check_output(
        f"cp /srv/repository/held.so {LIBRARIES}/libcuda.so.580.95.05 && "
        f"ln -sf libcuda.so.580.95.05 {LIBRARIES}/libcuda.so.1 && "
        "rm -f /var/tmp/installer-called /etc/apt/preferences.d/servelab-nvidia"
    )


@pytest.fixture
def installer(guest, tmp_path):
    """The installer of the scenario's repository, on the controller."""
    path = tmp_path / "driver-580.95.05.run"
    path.write_text(guest.file("/srv/repository/driver.run").content_string)
    return path


def test_the_installer_brings_the_libraries_and_no_kernel_module(play, guest, no_libcuda, installer):
    given = {
        "nvidia_userspace_method": "runfile",
        "nvidia_userspace_runfile": str(installer).replace("580.95.05", "{version}"),
        "nvidia_userspace_runfile_checksum": "sha256:" + hashlib.sha256(installer.read_bytes()).hexdigest(),
    }
    checked = play(*ONE, "--check", **given)
    assert checked.ok and checked.changed[0][0] == "Make a place for the installer"
    assert not guest.file("/var/tmp/installer-called").exists
    played = play(*ONE, **given)
    assert played.ok
    assert ("Run the installer", "lab-gpu1") in played.changed
    (call,) = guest.file("/var/tmp/installer-called").content_string.splitlines()
    assert {"--silent", "--no-kernel-modules", "--no-dkms"} <= set(call.split())
    assert not guest.file("/var/tmp/servelab-nvidia").exists
    assert play(*ONE, **given).changed == []


def test_an_installer_of_another_version_or_content_is_refused(play, guest, no_libcuda, installer):
    given = {"nvidia_userspace_method": "runfile", "nvidia_userspace_runfile": str(installer)}
    played = play(*ONE, **given, nvidia_userspace_runfile_checksum="sha256:" + "0" * 64)
    assert not played.ok and "is not the file of nvidia_userspace_runfile_checksum" in played.said
    installer.write_text(installer.read_text().replace("-580.95.05}", "-570.124.06}"))
    played = play(*ONE, **given)
    assert not played.ok
    assert "does not say that it holds the driver 580.95.05" in played.said and "570.124.06" in played.said
    assert not guest.file("/var/tmp/installer-called").exists
    played = play(*ONE, nvidia_userspace_method="runfile", nvidia_userspace_runfile="/nowhere/{version}.run")
    assert not played.ok and "/nowhere/580.95.05.run on the controller does not exist" in played.said


PACKAGES = ["lab-libcuda1", "lab-libnvidia-ml1"]


def test_packages_are_of_the_nodes_version_pinned_and_held(play, guest, no_libcuda):
    guest.check_output(f"mv {LIBRARIES}/libnvidia-ml.so.580.95.05 /srv/repository/ml.so")
    given = {"nvidia_userspace_method": "apt", "nvidia_userspace_apt_packages": PACKAGES}
    try:
        assert play(*ONE, "--check", **given).ok
        assert guest.run("dpkg -s lab-libcuda1").rc != 0
        played = play(*ONE, **given)
        assert played.ok
        assert ("Install them", "lab-gpu1") in played.changed
        assert guest.package("lab-libcuda1").version == "580.95.05-1"
        assert set(guest.check_output("apt-mark showhold").split()) == set(PACKAGES)
        # The newer one is there, and neither an upgrade nor a person who installs it by name gets it.
        assert "590.44.01-1" in guest.check_output("apt-cache madison lab-libcuda1")
        assert "580.95.05-1" in guest.check_output("apt-cache policy lab-libcuda1 | grep Candidate")
        assert play(*ONE, **given).changed == []
    finally:
        guest.run("apt-mark unhold lab-libcuda1 lab-libnvidia-ml1; dpkg -P lab-libcuda1 lab-libnvidia-ml1")
        guest.check_output(
            f"mv /srv/repository/ml.so {LIBRARIES}/libnvidia-ml.so.580.95.05 && "
            f"ln -sf libnvidia-ml.so.580.95.05 {LIBRARIES}/libnvidia-ml.so.1"
        )


def test_packages_with_kernel_modules_are_refused_by_name_and_by_what_they_drag_in(play, guest, no_libcuda):
    played = play(*ONE, nvidia_userspace_method="apt", nvidia_userspace_apt_packages=["cuda-drivers", "nvidia-open"])
    assert not played.ok and played.changed == []
    assert "has cuda-drivers, which brings kernel modules" in played.said and "has nvidia-open" in played.said
    played = play(*ONE, nvidia_userspace_method="apt", nvidia_userspace_apt_packages=["lab-everything"])
    assert not played.ok
    assert "Installing lab-everything would bring nvidia-kernel-dkms, which compile kernel modules" in played.said
    assert guest.run("dpkg -s nvidia-kernel-dkms").rc != 0
    played = play(*ONE, nvidia_userspace_method="apt", nvidia_userspace_apt_packages=["libcuda99"])
    assert not played.ok and "apt cannot install libcuda99=580.95.05-*" in played.said


def test_a_method_without_what_it_needs_is_refused(play):
    played = play(*ONE, nvidia_userspace_method="runfile", nvidia_userspace_runfile_checksum="1234")
    assert not played.ok and played.changed == []
    assert "nvidia_userspace_method runfile needs nvidia_userspace_runfile" in played.said
    assert 'nvidia_userspace_runfile_checksum is "1234"' in played.said
    played = play(*ONE, nvidia_userspace_method="runfile", nvidia_userspace_runfile="https://example.org/driver.run")
    assert (
        not played.ok
        and "nvidia_userspace_runfile is a URL, so nvidia_userspace_runfile_checksum must say" in played.said
    )


@pytest.mark.parametrize("name", ["smi_hang", "no_devices", "driver_mismatch", "off_the_bus"])
def test_an_nvidia_smi_that_does_not_work_is_told_with_the_remedy(play, fault, name):
    with fault(name):
        played = play(*ONE, nvidia_userspace_timeout=2)
    assert not played.ok
    assert played.said.startswith("nvidia-smi does not work in lab-gpu1: ")
    assert " Remedy: " in played.said
