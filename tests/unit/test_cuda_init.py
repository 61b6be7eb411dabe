"""What cuInit's answers mean; a library that hangs, crashes or is missing is no missing GPU."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time

import pytest

from servelab.shared.cuda_init import explain_cuda, start_cuda

STARTS = "int cuInit(unsigned f) { (void)f; return %d; } int cuDeviceGetCount(int *n) { *n = %d; return 0; }"


@pytest.fixture
def libcuda(tmp_path, monkeypatch):
    """Puts a libcuda.so.1 made of the given C source where the linker looks first."""
    compiler = shutil.which("gcc")
    if compiler is None:
        pytest.skip("no gcc here")
    monkeypatch.setenv("LD_LIBRARY_PATH", f"{tmp_path}{os.pathsep}{os.environ.get('LD_LIBRARY_PATH', '')}")

    def build(source: str) -> None:
        (tmp_path / "cuda.c").write_text("#include <stdlib.h>\n#include <unistd.h>\n" + source)
        command = [compiler, "-shared", "-fPIC", "-o", str(tmp_path / "libcuda.so.1"), str(tmp_path / "cuda.c")]
        subprocess.run(command, check=True)

    return build


@pytest.mark.parametrize(
    ("code", "count", "state", "name", "words"),
    [
        (0, 8, "ok", "CUDA_SUCCESS", ""),
        (0, 0, "no_gpu", "CUDA_ERROR_NO_DEVICE", "no GPU"),
        (100, 0, "no_gpu", "CUDA_ERROR_NO_DEVICE", "no GPU"),
        # After a reboot: nvidia-smi works, CUDA says 999.
        (999, 0, "failed", "CUDA_ERROR_UNKNOWN", "nvidia-uvm"),
        (803, 0, "failed", "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH", "another version"),
        (804, 0, "failed", "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE", "forward-compatibility"),
        (802, 0, "failed", "CUDA_ERROR_SYSTEM_NOT_READY", "fabric manager"),
        (4242, 0, "failed", "CUresult 4242", "does not start"),
    ],
)
def test_every_answer_is_named(code, count, state, name, words):
    said = explain_cuda(code, count)
    assert (said.state, said.code, said.name, said.count) == (state, code, name, count)
    assert words in said.cause
    assert bool(said.remedy) == (state != "ok")


def test_a_real_call_is_made(libcuda):
    libcuda(STARTS % (0, 3))
    assert start_cuda(20, sys.executable).count == 3
    libcuda(STARTS % (999, 0))
    assert start_cuda(20, sys.executable).code == 999


def test_a_missing_or_foreign_library_is_no_missing_gpu(libcuda):
    said = explain_cuda(None, 0, "libcuda.so.1: cannot open shared object file")
    assert said.state == "failed" and "libcuda.so.1 cannot be loaded" in said.cause
    libcuda("int nothing;")
    assert start_cuda(20, sys.executable).state == "failed"


def test_a_crash_in_the_library_is_a_failure(libcuda):
    libcuda("int cuInit(unsigned f) { (void)f; abort(); }")
    said = start_cuda(20, sys.executable)
    assert said.state == "failed" and "ended" in said.cause


def test_a_driver_that_hangs_hangs_nobody_else(libcuda):
    libcuda("int cuInit(unsigned f) { (void)f; for (;;) pause(); }")
    started = time.monotonic()
    said = start_cuda(0.7, sys.executable)
    assert said.state == "failed" and "did not return within 0.7 s" in said.cause
    assert time.monotonic() - started < 30
