"""Two toolchains that compile and link, a third that was only proved, and hand-made damage that alone is repaired."""

from __future__ import annotations

import json

import pytest

HOME, OTHER, PROOF, APT = "/opt/servelab/cuda-13.0", "/srv/other/cuda", "/srv/other/proof", "/srv/other/apt"
# The play of converge.yml that is as the inventory says.
OWN = ("--tags", "own")
KERNEL = "__global__ void k(float *x) { x[threadIdx.x] *= 2.0f; }\\nint main() { k<<<1, 32>>>(nullptr); return 0; }\\n"


@pytest.mark.parametrize(("prefix", "architecture"), [(HOME, "sm_120a"), (OTHER, "sm_100a")])
def test_a_persons_kernel_compiles_and_links(guest, prefix, architecture):
    home = f"{prefix}/cuda"
    assert "release 13.0," in guest.check_output(f"{home}/bin/nvcc --version")
    guest.check_output(f"printf '{KERNEL}' > /tmp/own.cu")
    built = guest.run(
        f"cd /tmp && PATH=/usr/bin:/bin {home}/bin/nvcc -arch={architecture} -cudart shared -o own own.cu"
    )
    assert built.rc == 0, built.stderr
    assert guest.run("readelf --dynamic /tmp/own").stdout.count("libcudart.so.13") == 1


@pytest.mark.parametrize(
    ("prefix", "home", "architectures"),
    [
        (HOME, f"{HOME}/cuda", ["sm_120a"]),
        (OTHER, f"{OTHER}/cuda", ["sm_100a", "sm_90"]),
        (PROOF, f"{OTHER}/cuda", ["sm_80"]),
        (APT, f"{APT}/cuda", ["sm_120f"]),
    ],
)
def test_what_was_proved_is_written_down(guest, prefix, home, architectures):
    proof = json.loads(guest.file(f"{prefix}/servelab-proof.json").content_string)
    assert (proof["home"], proof["architectures"], proof["python"]) == (home, architectures, "3.13")


def test_what_is_preinstalled_is_left_alone(guest):
    assert guest.file(PROOF).listdir() == ["servelab-proof.json"]


def test_extra_arguments_and_packages_arrive(guest):
    assert guest.package("make").is_installed
    assert guest.run(f"find {OTHER}/lib -path '*nvidia*' -name '*.pyc'").stdout == ""


def test_the_packages_are_what_was_named_and_no_driver_came_in(guest):
    installed = guest.check_output("dpkg-query --show --showformat '${Package}\\n'").splitlines()
    assert {name for name in installed if name.startswith(("nvidia-", "libcu", "cuda"))} == {
        "cuda-nvcc-13-0",
        "cuda-crt-13-0",
        "cuda-cccl-13-0",
        "cuda-cudart-dev-13-0",
        "cuda-driver-dev-13-0",
        "cuda-nvrtc-dev-13-0",
        "libcublas-dev-13-0",
    }


def test_the_packages_toolkit_is_found_where_consumers_look(guest):
    assert guest.check_output(f"readlink {APT}/cuda") == "/usr/local/cuda-13.0"
    source = guest.file("/etc/apt/sources.list.d/servelab-cuda.sources").content_string
    assert "URIs: file:///srv/repository/\n" in source
    assert "Signed-By: /etc/apt/keyrings/servelab-cuda.asc\n" in source


def test_a_metapackage_that_brings_a_driver_is_refused(play, guest):
    played = play("--tags", "apt", cuda_toolkit_apt_packages=["cuda-toolkit-13-0"])
    assert not played.ok
    assert (
        "cuda-toolkit-13-0 would bring a driver into the guest (nvidia-open), and the driver is the node's"
        in played.said
    )
    assert not guest.package("cuda-toolkit-13-0").is_installed


def test_no_toolkit_is_a_choice(guest):
    assert not guest.file("/srv/other/none").exists


def test_the_wheels_are_installed_by_their_hashes(guest):
    lock = guest.file(f"{HOME}/servelab-lock.txt").content_string
    assert lock.count("--hash=sha256:") >= 6
    assert "nvidia-nvvm==13.0.88" in lock


def test_a_lost_link_is_found_and_alone_repaired(play, guest):
    link = f"{HOME}/cuda/lib/libcudart.so"
    guest.check_output(f"rm {link}")
    repair = [("Link what the wheels leave out", "lab-gpu1")]
    assert play(*OWN, "--check", "--diff").changed == repair
    assert not guest.file(link).exists
    assert play(*OWN, "--diff").changed == repair
    assert guest.check_output(f"readlink {link}") == "libcudart.so.13"


def test_wrong_settings_are_told_at_once_and_before_anything_changes(play, guest):
    played = play(
        cuda_toolkit_architectures=["blackwell"], cuda_toolkit_prefix="/cuda", cuda_toolkit_method="preinstalled"
    )
    assert not played.ok
    assert "cuda_toolkit_architectures has blackwell, which is no architecture; write it like sm_120a" in played.said
    assert "cuda_toolkit_prefix is /cuda, but must be an absolute path of at least two parts." in played.said
    assert "cuda_toolkit_method preinstalled needs cuda_toolkit_home" in played.said
    assert played.changed == []
    assert not guest.file("/cuda").exists


def test_a_home_without_a_compiler_is_refused(play):
    played = play(*OWN, cuda_toolkit_method="preinstalled", cuda_toolkit_home="/srv/nowhere")
    assert not played.ok
    assert "/srv/nowhere/bin/nvcc does not exist; set cuda_toolkit_home to a CUDA 13 toolkit" in played.said


def test_a_toolchain_that_cannot_link_is_not_believed(play, guest):
    """The compiler is there, compiles, and links nothing."""
    script = f'#!/bin/sh\\nexec {OTHER}/cuda/bin/nvcc -lnowhere "$@"\\n'
    nvcc = "/srv/other/broken/bin/nvcc"
    guest.check_output(f"mkdir -p /srv/other/broken/bin && printf '{script}' > {nvcc} && chmod +x {nvcc}")
    played = play(*OWN, cuda_toolkit_method="preinstalled", cuda_toolkit_home="/srv/other/broken")
    assert not played.ok
    assert "/srv/other/broken/bin/nvcc cannot build a kernel for sm_120a: " in played.said
    assert "nowhere" in played.said
