"""NVIDIA driver versions: the kernel's, the libraries', and whether the two are the same.

The libraries of a guest must equal the kernel driver of its node in all three fields (580.95.05); with one digit off,
CUDA does not start.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "KernelDriver",
    "installed_libraries",
    "library_problems",
    "node_problems",
    "parse_kernel_driver",
    "version_tuple",
]

# The oldest driver that runs what a CUDA 13.0 toolchain compiles.
CUDA_13_0_DRIVER = "580.65.06"
LIBRARIES = ("libcuda.so", "libnvidia-ml.so")
_LIBRARY_DIRS = ("/usr/lib/x86_64-linux-gnu", "/usr/lib/aarch64-linux-gnu", "/usr/lib64", "/usr/lib", "/usr/local/lib")
_VERSION = r"\d{3}\.\d+(?:\.\d+)?"


@dataclass(frozen=True)
class KernelDriver:
    """version: e.g. "580.95.05"; open_flavour: the open kernel modules, which Blackwell cards need."""

    version: str
    open_flavour: bool


def version_tuple(version: str) -> tuple[int, ...]:
    """("580.95.05") → (580, 95, 5), for comparisons of order. Equality of versions is equality of their text."""
    return tuple(int(part) for part in version.split("."))


def parse_kernel_driver(text: str) -> KernelDriver | None:
    """Read /proc/driver/nvidia/version. None if it names no version."""
    line = next((line for line in text.splitlines() if line.startswith("NVRM version:")), "")
    # GCC's version in the second line and the build host in this one look similar; blanks are around the driver's.
    match = re.search(rf"\s({_VERSION})\s", line + " ")
    return KernelDriver(match[1], "Open Kernel Module" in line) if match else None


def installed_libraries(linker_cache: str = "", directories: Sequence[str] = _LIBRARY_DIRS) -> dict[str, list[str]]:
    """Library → versions of it that a program could load, sorted.

    linker_cache: the output of `ldconfig -p`; its entries are links (libcuda.so.1), so they are followed to the file
    that carries the version in its name. The usual directories are looked through as well: a library that was only
    copied there is not in the cache yet.
    """
    found: dict[str, set[str]] = {library: set() for library in LIBRARIES}
    candidates = [Path(match) for match in re.findall(r"=> (/\S+)", linker_cache)]
    for directory in directories:
        candidates += [path for library in LIBRARIES for path in Path(directory).glob(f"{library}.*")]
    for path in candidates:
        with contextlib.suppress(OSError):
            name = path.resolve(strict=True).name
            for library in LIBRARIES:
                if match := re.fullmatch(rf"{re.escape(library)}\.({_VERSION})", name):
                    found[library].add(match[1])
    return {library: sorted(versions, key=version_tuple) for library, versions in found.items()}


def library_problems(kernel: KernelDriver | None, libraries: Mapping[str, Sequence[str]]) -> list[str]:
    """Sentences, each with its remedy, about libraries that are not the kernel driver's. Empty if all is well."""
    if kernel is None:
        return [
            "/proc/driver/nvidia/version is missing or names no version, so no driver is loaded on the node; load it "
            "there (`modprobe nvidia`), then run again."
        ]
    problems = []
    for library, versions in libraries.items():
        if not versions:
            problems.append(
                f"{library} is not installed in the guest, and the node's driver is {kernel.version}; install its user "
                f"space here: NVIDIA-Linux-x86_64-{kernel.version}.run --no-kernel-modules."
            )
        elif kernel.version not in versions:
            problems.append(
                f"{library} in the guest is {', '.join(versions)}, but the node's kernel driver is {kernel.version}; "
                f"the two must be equal to the last digit: install {kernel.version} in the guest (without kernel "
                "modules) and hold it there."
            )
        elif len(versions) > 1:
            others = ", ".join(version for version in versions if version != kernel.version)
            problems.append(
                f"{library} is installed in the guest as {kernel.version}, which is right, and also as {others}; "
                "remove the other, as it decides by chance which one a program loads."
            )
    return problems


def node_problems(nodes: Mapping[str, bool], gpus: int | None) -> list[str]:
    """Sentences about a guest's device nodes. nodes: name under /dev → whether it is a character device;
    gpus: how many cards the guest should see, None where that is not known.
    """
    problems = [
        f"/dev/{name} in the guest is no character device (create=file makes a regular file where the "
        "node had none at the guest's start); load the driver's nodes on the node and give the card by dev[n]."
        for name, device in sorted(nodes.items())
        if not device and re.fullmatch(r"nvidia(\d+|ctl|-uvm|-uvm-tools)", name)
    ]
    problems += [
        f"/dev/{name} is missing in the guest, so CUDA cannot start; run `nvidia-modprobe -c=0 -u` on the node, "
        "see that the guest has its dev[n] entry (`pct config`), and restart the guest."
        for name in ("nvidiactl", "nvidia-uvm")
        if name not in nodes
    ]
    cards = [name for name, device in nodes.items() if device and re.fullmatch(r"nvidia\d+", name)]
    if gpus is not None and len(cards) != gpus:
        problems.append(
            f"The guest sees {len(cards)} cards and {gpus} were given to it; compare its dev[n] entries (`pct config`) "
            "with /dev/nvidia* here, and restart the guest if some still wait for it."
        )
    return problems
