"""Does CUDA start here? `cuInit`, asked in a process of its own with a time limit, and what its answer means.

nvidia-smi proves less: it works without nvidia-uvm and with a library that CUDA refuses.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from typing import Literal

from .nvidia_smi import run_bounded

__all__ = ["CudaStart", "explain_cuda", "start_cuda"]

State = Literal["ok", "no_gpu", "failed"]

# Prints {"library", "code", "count"}; code is null where the library cannot be loaded.
_ASK = """
import ctypes, json
answer = {"library": None, "code": None, "count": 0}
try:
    cuda = ctypes.CDLL("libcuda.so.1")
except OSError as error:
    answer["library"] = str(error)
else:
    answer["code"] = cuda.cuInit(0)
    if answer["code"] == 0:
        count = ctypes.c_int(0)
        answer["code"] = cuda.cuDeviceGetCount(ctypes.byref(count))
        answer["count"] = count.value
print(json.dumps(answer))
"""

_NO_DEVICE = 100
# CUresult → (its name, what it means here, the remedy).
_CODES: dict[int, tuple[str, str, str]] = {
    3: (
        "CUDA_ERROR_NOT_INITIALIZED",
        "the driver was not initialised, as when its device nodes are missing",
        "see that /dev/nvidiactl, /dev/nvidia-uvm and the cards are character devices here",
    ),
    100: (
        "CUDA_ERROR_NO_DEVICE",
        "CUDA finds no GPU",
        "see that the guest is given the cards (`pct config`) and that CUDA_VISIBLE_DEVICES does not hide them",
    ),
    101: (
        "CUDA_ERROR_INVALID_DEVICE",
        "a card is there that CUDA cannot use",
        "look for Xid messages in the node's dmesg",
    ),
    304: (
        "CUDA_ERROR_OPERATING_SYSTEM",
        "the operating system refused a call of the driver",
        "see that the cgroup and the mode of /dev/nvidia* allow access (dev[n] entries with mode=0666), and memlock",
    ),
    802: (
        "CUDA_ERROR_SYSTEM_NOT_READY",
        "the cards wait for the fabric manager (machines with NVSwitch)",
        "start nvidia-fabricmanager, of the driver's version, on the node",
    ),
    803: (
        "CUDA_ERROR_SYSTEM_DRIVER_MISMATCH",
        "libcuda is of another version than the kernel driver",
        "install the libraries of exactly the kernel driver's version (nvidia_userspace_method)",
    ),
    804: (
        "CUDA_ERROR_COMPAT_NOT_SUPPORTED_ON_DEVICE",
        "a forward-compatibility libcuda is loaded, which these cards do not take",
        "remove cuda-compat from the linker's path (`ldconfig -p | grep libcuda`)",
    ),
    999: (
        "CUDA_ERROR_UNKNOWN",
        "CUDA cannot start although nvidia-smi may work, which means that nvidia-uvm is missing or not allowed",
        "run `nvidia-modprobe -c=0 -u` on the node, have a dev[n] entry pass /dev/nvidia-uvm, and restart the guest",
    ),
}


@dataclass(frozen=True)
class CudaStart:
    """state: "no_gpu" is CUDA's own word for it; code: the CUresult, None where it was not reached; count: of cards;
    cause, remedy: phrases, empty for "ok".
    """

    state: State
    code: int | None = None
    name: str = ""
    count: int = 0
    cause: str = ""
    remedy: str = ""


def start_cuda(timeout: float, python: str = sys.executable) -> CudaStart:
    """Ask. A driver that hangs is a failure after `timeout` seconds, and not a hanging caller."""
    answer = run_bounded([python, "-c", _ASK], timeout)
    if answer is None:
        return CudaStart(
            "failed",
            cause=f"cuInit did not return within {timeout:g} s",
            remedy="the driver hangs: look on the node for Xid (dmesg) and processes in state D (ps)",
        )
    status, out, err = answer
    if status != 0 or not out.strip():
        said = (err.strip().splitlines() or [f"exit status {status}"])[-1]
        return CudaStart("failed", cause=f"the process that called cuInit ended ({said})", remedy=_CODES[803][2])
    said_json = json.loads(out.strip().splitlines()[-1])
    return explain_cuda(said_json["code"], said_json["count"], said_json["library"])


def explain_cuda(code: int | None, count: int, library: str | None = None) -> CudaStart:
    """What a CUresult of cuInit means. library: why libcuda.so.1 could not be loaded."""
    if code is None:
        remedy = "install the driver's libraries in the guest (nvidia_userspace_method)"
        return CudaStart("failed", cause=f"libcuda.so.1 cannot be loaded ({library})", remedy=remedy)
    if code == 0 and count > 0:
        return CudaStart("ok", code, "CUDA_SUCCESS", count)
    name, cause, remedy = _CODES.get(
        _NO_DEVICE if code == 0 else code,
        (f"CUresult {code}", "CUDA does not start", "look into the node's dmesg for NVRM and Xid messages"),
    )
    return CudaStart("no_gpu" if code in (0, _NO_DEVICE) else "failed", code, name, 0, cause, remedy)
