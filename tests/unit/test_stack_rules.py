"""A stack is refused for what is mixed in it, for what differs from its lock and for what its sources demand."""

from __future__ import annotations

from pathlib import Path

import pytest

from servelab.shared import stack_lock, stack_rules

CASE = Path(__file__).parent / "cases/16-pip-mixed-cuda"
COHERENT = {
    "sglang": "0.5.23",
    "torch": "2.14.1",
    "sglang-kernel": "0.4.10",
    "flashinfer-python": "0.7.2",
    "nvidia-cuda-runtime": "13.0.96",
    "nvidia-cuda-nvcc": "13.0.88",
    "nvidia-nccl-cu13": "2.30.7",
    "nvidia-cudnn-cu13": "9.24.0.43",
    # Not the runtime: the compiler's back ends for both generations belong to it.
    "nvidia-cutlass-dsl-libs-cu12": "4.8.0",
    "nvidia-cutlass-dsl-libs-cu13": "4.8.0",
    # Numbered after itself, not after CUDA.
    "nvidia-cublas": "13.1.1.3",
    "nvidia-cufft": "12.0.0.61",
    "nvidia-curand": "10.4.0.35",
}


def test_the_five_findings_of_the_mixed_stack():
    packages = stack_rules.read_freeze((CASE / "freeze.txt").read_text())
    nvcc = stack_rules.nvcc_release((CASE / "nvcc.txt").read_text())
    findings = stack_rules.mixed(packages, "13.0", None, nvcc)
    assert findings[0].split(",")[0] == "torch 2.13.0+cu128 is built for CUDA 12.8"
    assert "SGLang 0.5.21 and FlashInfer are to run on CUDA 13.0" in findings[0]
    assert (
        "several generations (12, 13): nvidia-cuda-runtime-cu12 12.8.90, nvidia-nccl-cu12 2.27.5 do not" in findings[1]
    )
    assert "sgl-kernel 0.3.21 (the old name) and sglang-kernel 0.4.7" in findings[2]
    assert findings[3].startswith("flashinfer-cubin 0.6.13 is not for flashinfer-python 0.6.18")
    assert findings[4].startswith("nvcc is of CUDA 12.8, but")
    assert len(findings) == 5


def test_a_coherent_stack_has_none():
    assert stack_rules.mixed(COHERENT, "13.0", "13.0", "13.0") == []


def test_a_version_without_a_label_is_judged_by_what_torch_says():
    """`torch==2.9.1` is two different builds."""
    packages = COHERENT | {"torch": "2.9.1"}
    assert stack_rules.mixed(packages, "13.0", None, None) == []
    (finding,) = stack_rules.mixed(packages, "13.0", "12.8", None)
    assert finding.startswith("torch 2.9.1 is built for CUDA 12.8")


def test_a_newer_compiler_than_the_runtime_is_mixed_too():
    (finding,) = stack_rules.mixed(COHERENT, "13.0", "13.0", "13.5")
    assert "nvcc is of CUDA 13.5" in finding


def test_halves_of_a_compiler_must_be_of_one_release():
    """What the resolver makes of 0.5.12 when only the toolkit is pinned."""
    packages = COHERENT | {"nvidia-nvvm": "13.5.37", "nvidia-cuda-crt": "13.5.37"}
    assert stack_rules.mixed(packages, "13.0", "13.0", "13.0") == [
        "nvidia-nvvm 13.5.37, nvidia-cuda-crt 13.5.37 are not of CUDA 13.0, as the rest is."
    ]


def test_a_jit_cache_may_carry_a_label():
    packages = COHERENT | {"flashinfer-jit-cache": "0.7.2+cu130"}
    assert stack_rules.mixed(packages, "13.0", "13.0", None) == []


@pytest.mark.parametrize(
    ("text", "release"),
    [("Cuda compilation tools, release 13.0, V13.0.88", "13.0"), ("nvcc: command not found", None), ("", None)],
)
def test_the_compilers_release(text, release):
    assert stack_rules.nvcc_release(text) == release


def test_what_differs_from_the_lock():
    pins = {"torch": stack_lock.Pin("2.14.1", ("0" * 64,)), "sglang": stack_lock.Pin("0.5.23", ("1" * 64,))}
    assert stack_rules.differs({"torch": "2.14.1", "sglang": "0.5.23", "wheel": "0.45"}, pins) == []
    assert stack_rules.differs({"torch": "2.13.0"}, pins) == [
        "sglang 0.5.23 is in the lock, but is not installed.",
        "torch 2.13.0 is installed, but 2.14.1 is locked.",
    ]
    assert stack_rules.differs({"sglang": "0.5.23"}, pins, only=["sglang"]) == []


SOURCE = """
def _set_envs_and_config(cfg):
    if True:
        assert_pkg_version(
            "flashinfer_python", "0.6.11.post1", "Please uninstall the old version and " "reinstall"
        )
    assert_pkg_version("sglang-kernel", "0.4.9", "Please reinstall")
    assert_pkg_version(name, "1.0", "not a constant")
"""


def test_sglangs_own_assertions():
    least = stack_rules.minimums(SOURCE)
    assert least == {"flashinfer-python": "0.6.11.post1", "sglang-kernel": "0.4.9"}
    assert stack_rules.too_old({"flashinfer-python": "0.6.11.post1", "sglang-kernel": "0.4.10"}, least) == []
    assert stack_rules.too_old({"flashinfer-python": "0.6.11"}, least) == [
        "SGLang asserts flashinfer-python 0.6.11.post1 or newer, and 0.6.11 is installed.",
        "SGLang asserts sglang-kernel 0.4.9 or newer, and it is not installed.",
    ]


def test_versions_sort_as_releases_do():
    versions = ["0.4.9rc1", "0.4.9", "0.4.9.post1", "0.4.9.post2", "0.4.10", "0.5", "1.0.0"]
    assert sorted(versions, key=stack_rules.order) == versions
    assert stack_rules.order("2.14.1+cu130") == stack_rules.order("2.14.1")
    assert stack_rules.order("1.0") == stack_rules.order("1.0.0")


READELF = """
File: torch/lib/libc10_cuda.so

Dynamic section at offset 0xb2c88 contains 34 entries:
  Tag        Type                         Name/Value
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.13]
 0x0000000000000001 (NEEDED)             Shared library: [libc.so.6]
 0x000000000000000e (SONAME)             Library soname: [libc10_cuda.so]

File: sgl_kernel/sm100/common_ops.abi3.so
 0x0000000000000001 (NEEDED)             Shared library: [libcudart.so.12]
 0x0000000000000001 (NEEDED)             Shared library: [libcuda.so.1]

File: a.so

There is no dynamic section in this file.
"""


def test_a_library_that_nobody_brings():
    needed = stack_rules.read_needed(READELF)
    assert needed == {
        "torch/lib/libc10_cuda.so": ["libcudart.so.13", "libc.so.6"],
        "sgl_kernel/sm100/common_ops.abi3.so": ["libcudart.so.12", "libcuda.so.1"],
        "a.so": [],
    }
    provided = {"libcudart.so.13", "libc.so.6"}
    assert stack_rules.unresolved(needed, provided, stack_rules.DRIVER_LIBRARIES) == [
        "libcudart.so.12 is in no wheel and not in the system, and sgl_kernel/sm100/common_ops.abi3.so needs it."
    ]
    assert len(stack_rules.unresolved(needed, provided, ())) == 2


def test_parts_that_nobody_opens_may_lack_what_they_need():
    """As 0.5.23's wheels have them; the hook for CUDA 13 is not optional."""
    needed = {
        "torchcodec/libtorchcodec_core7.so": ["libavcodec.so.61"],
        "nvidia/nvshmem/lib/nvshmem_bootstrap_mpi.so.3": ["libmpi.so.40"],
        "nvidia/cu13/lib/libcufile_rdma.so.1": ["libibverbs.so.1"],
        "numba/np/ufunc/tbbpool.cpython-313-x86_64-linux-gnu.so": ["libtbb.so.12"],
        "torch_memory_saver_hook_mode_preload.abi3.so": ["libcudart.so.12"],
        "torch_memory_saver_hook_mode_torch_cu12.abi3.so": ["libcudart.so.12"],
    }
    assert stack_rules.unresolved(needed, set(), ()) == []
    needed = {"torch_memory_saver_hook_mode_torch_cu13.abi3.so": ["libcudart.so.13"]}
    assert len(stack_rules.unresolved(needed, set(), ())) == 1
