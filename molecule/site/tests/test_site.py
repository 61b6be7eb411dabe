"""A guest that has the GPUs, a toolchain that links, a patched SGLang, and units that were seen to serve."""

from __future__ import annotations

import json

import pytest

PACKAGE = "/opt/servelab/stack/lib/python3.13/site-packages/sglang"
COMMUNICATORS = f"{PACKAGE}/srt/distributed/device_communicators"
CUDA = "/opt/servelab/cuda-13.0/cuda"


def test_the_node_runs_the_guest_at_boot(node):
    config = node.check_output("pct config 129")
    assert "onboot: 1" in config.splitlines()
    assert "unprivileged: 1" in config.splitlines()
    assert node.check_output("pct status 129") == "status: running"


def test_the_node_passes_every_card_and_the_driver(node):
    config = node.check_output("pct config 129")
    passed = {line.split()[1].split(",")[0] for line in config.splitlines() if line.startswith("dev")}
    assert passed >= {f"/dev/nvidia{n}" for n in range(8)} | {"/dev/nvidiactl", "/dev/nvidia-uvm"}


def test_the_guest_is_up(guest):
    assert guest.check_output("systemctl is-system-running") == "running"
    assert guest.check_output("hostname") == "gpu1"


@pytest.mark.parametrize("name", [*(f"nvidia{n}" for n in range(8)), "nvidiactl", "nvidia-uvm"])
def test_the_guest_has_device_nodes_and_not_files(guest, name):
    assert guest.run(f"test -c /dev/{name}").rc == 0


def test_driver_library_and_kernel_driver_are_one(guest):
    assert "580.95.05" in guest.file("/proc/driver/nvidia/version").content_string
    assert "libcuda.so.580.95.05" in guest.check_output("readlink -f /usr/lib/x86_64-linux-gnu/libcuda.so.1")


def test_the_toolchain_is_cuda_13_0(guest):
    assert "release 13.0," in guest.check_output(f"{CUDA}/bin/nvcc --version")


def test_the_toolchain_compiles_and_links_for_blackwell(guest):
    source = (
        "__global__ void k(float *x) { x[threadIdx.x] *= 2.0f; }\\nint main() { k<<<1, 32>>>(nullptr); return 0; }\\n"
    )
    guest.check_output(f"printf '{source}' > /tmp/own.cu")
    built = guest.run(f"cd /tmp && PATH=/usr/bin:/bin {CUDA}/bin/nvcc -arch=sm_120a -cudart shared -o own own.cu")
    assert built.rc == 0, built.stderr
    assert guest.run("readelf --dynamic /tmp/own").stdout.count("libcudart.so.13") == 1


def test_sglang_is_the_real_wheel(guest):
    metadata = guest.check_output(f"cat {PACKAGE}/../sglang-0.5.23.dist-info/METADATA")
    assert "\nName: sglang\n" in metadata
    assert "\nVersion: 0.5.23\n" in metadata


def test_the_patch_is_in_the_real_sources(guest):
    assert "SGLANG_FORCE_CUSTOM_AR_PCIE" in guest.file(f"{COMMUNICATORS}/custom_all_reduce_utils.py").content_string
    assert "_pcie_forced" in guest.file(f"{COMMUNICATORS}/custom_all_reduce.py").content_string
    for name in ("custom_all_reduce_utils.py", "custom_all_reduce.py"):
        guest.check_output(f"python3 -m py_compile {COMMUNICATORS}/{name}")


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_the_unit_is_written_and_at_rest(guest, mode):
    assert guest.file(f"/etc/systemd/system/servelab-{mode}.service").exists
    assert guest.check_output(f"systemd-analyze verify servelab-{mode}.service 2>&1") == ""
    assert not guest.service(f"servelab-{mode}").is_running
    # No [Install] section: it cannot be started at boot by mistake.
    assert guest.run(f"systemctl is-enabled servelab-{mode}").stdout.strip() == "static"


def test_the_units_differ_by_speculation_only(guest):
    flags = {}
    for mode in ("baseline", "eagle3"):
        command = json.loads(guest.file(f"/etc/servelab/modes/{mode}.json").content_string)["command"]
        flags[mode] = {word.split("=")[0] for word in command if word.startswith("--")}
    assert flags["baseline"] < flags["eagle3"]
    assert flags["eagle3"] - flags["baseline"] == {
        "--speculative-algorithm",
        "--speculative-draft-model-path",
        "--speculative-num-steps",
        "--speculative-eagle-topk",
        "--speculative-num-draft-tokens",
    }


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_the_mode_was_seen_to_answer(guest, mode):
    journal = guest.check_output(f"journalctl --unit servelab-{mode} --output cat")
    assert "simulated" in journal
    assert "POST /v1/completions HTTP/1.1" in journal
    assert guest.file(f"/var/lib/servelab/proofs/{mode}.json").exists


@pytest.mark.parametrize("place", ["node", "guest"])
def test_nothing_is_left_on_the_cards(place, request):
    host = request.getfixturevalue(place)
    used = host.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    assert len(used) == 8
    # 4 MiB is what such a card reports when it is idle.
    assert max(int(mib) for mib in used) <= 4
