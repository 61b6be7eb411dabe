#!/usr/bin/env python3
"""Hold a real GPU through libcuda, and nothing else: no framework, so that what is seen is the driver's doing.

    holder.py GPU MIB [--child | --survivors N] [--deaf]

One process with a context and MIB of memory on GPU; with --child that is a child, and the parent has no context; with
--survivors N children have one each and live on when the parent is killed. --deaf ignores SIGTERM. Prints `ready PID …`
(the processes that have a context) when the memory is theirs, and then waits to be killed.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import os
import signal
import sys


def check(status: int, what: str) -> None:
    if status != 0:
        sys.exit(f"{what} failed: CUresult {status}")


def occupy(gpu: int, mib: int, library: str) -> None:
    """A context on the card (the primary one: its call is the same in all releases) and `mib` MiB that are there."""
    cuda = ctypes.CDLL(library)
    device, context, memory = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDeviceGet(ctypes.byref(device), gpu), "cuDeviceGet")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    size = ctypes.c_size_t(mib << 20)
    check(cuda.cuMemAlloc_v2(ctypes.byref(memory), size), "cuMemAlloc")
    check(cuda.cuMemsetD8_v2(memory, ctypes.c_ubyte(1), size), "cuMemsetD8")
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")


def hold(arguments: argparse.Namespace) -> None:
    occupy(arguments.gpu, arguments.mib, arguments.library)


def child(arguments: argparse.Namespace) -> int:
    """Fork one that holds; its PID once it does. CUDA must not be touched before the fork."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        hold(arguments)
        os.write(writing, b"1")
        os.close(writing)
        while True:
            signal.pause()
    os.close(writing)
    if os.read(reading, 1) != b"1":
        sys.exit("a child could not get its context")
    os.close(reading)
    return pid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("gpu", type=int)
    parser.add_argument("mib", type=int)
    parser.add_argument("--child", action="store_true")
    parser.add_argument("--survivors", type=int, default=0, metavar="N")
    parser.add_argument("--deaf", action="store_true")
    parser.add_argument("--library", default="libcuda.so.1")
    arguments = parser.parse_args()
    if arguments.deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    children = arguments.survivors or int(arguments.child)
    if children:
        pids = [child(arguments) for _ in range(children)]
    else:
        hold(arguments)
        pids = [os.getpid()]
    print("ready", *pids, flush=True)
    # Whoever started this must not wait for its output; and a parent that lives collects its children.
    os.dup2(os.open(os.devnull, os.O_RDWR), 1)
    with contextlib.suppress(ChildProcessError):
        while children:
            os.wait()
    while not children:
        signal.pause()


if __name__ == "__main__":
    main()
