"""Whether an installed stack is one: what is mixed in it, what differs from its lock, what its own sources demand.

Pure functions over what was found; each finding is a sentence for a person.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterable, Mapping

from .stack_lock import Pin, normalize

# Libraries of the CUDA runtime come as nvidia-…-cu12, as nvidia-…-cu13, or (since CUDA 13) without a suffix.
_RUNTIME = re.compile(
    r"nvidia-(?:cuda-[a-z]+|cublas|cudnn|cufft|cufile|curand|cusolver|cusparse|cusparselt|nccl|nvjitlink|nvshmem|nvtx)"
    r"(?:-cu(?P<major>1[1-9]))?$"
)
# What compiles, and what it compiles for: numbered as CUDA is, and one without the others' number is another toolkit's.
_NUMBERED = ("nvidia-cuda-nvcc", "nvidia-nvvm", "nvidia-cuda-crt", "nvidia-cuda-cccl", "nvidia-cuda-runtime")
_LOCAL_CUDA = re.compile(r"cu(\d+)(\d)$")
_NVCC = re.compile(r"\brelease (\d+\.\d+)\b")
# They come with the driver, never with a wheel.
DRIVER_LIBRARIES = frozenset({"libcuda.so.1", "libnvidia-ml.so.1", "libnvidia-ptxjitcompiler.so.1", "libnvcuvid.so.1"})

# Parts of wheels that are opened only where what they need is there: one of FFmpeg's releases, RDMA and MPI transports,
# thread pools, and the hooks for CUDA 12 that come beside those for CUDA 13.
OPTIONAL = re.compile(
    r"torchcodec/|nvidia/nvshmem/lib/nvshmem_(transport|bootstrap)_|nvidia/cu13/lib/libcufile_rdma\.so"
    r"|numba/np/ufunc/(omp|tbb)pool\.|torch_memory_saver_hook_mode_[a-z]+(_cu12)?\.abi3\.so"
)


def cuda_of(version: str) -> str | None:
    """The CUDA release in a version's local label: 2.13.0+cu128 → 12.8; None where there is none."""
    match = _LOCAL_CUDA.search(version.partition("+")[2])
    return f"{match[1]}.{match[2]}" if match else None


def nvcc_release(text: str) -> str | None:
    """The release in what `nvcc --version` prints: 13.0; None where it is not in it."""
    match = _NVCC.search(text)
    return match[1] if match else None


def read_freeze(text: str) -> dict[str, str]:
    """Name → version of a `pip freeze`; lines that are no `name==version` are left out."""
    pins = (line.partition("==") for line in text.splitlines())
    return {normalize(name.strip()): version.strip() for name, equals, version in pins if equals}


def mixed(packages: Mapping[str, str], cuda: str, torch_cuda: str | None, nvcc: str | None) -> list[str]:
    """What does not belong together in one stack.

    packages: normalized name → version. cuda: the plan's, as 13.0. torch_cuda: torch.version.cuda, None where it was
    not asked (then the version's local label tells, if it has one). nvcc: the compiler's release, None for no compiler.
    """
    findings = []
    built = torch_cuda or cuda_of(packages.get("torch", ""))
    if built and built != cuda:
        findings.append(
            f"torch {packages.get('torch', '')} is built for CUDA {built}, but SGLang {packages.get('sglang', '')} and "
            f"FlashInfer are to run on CUDA {cuda}; installing the same version again would not change that."
        )
    generations = _generations(packages)
    wanted = cuda.partition(".")[0]
    if len(generations) > 1:
        foreign = [text for major, texts in sorted(generations.items()) if major != wanted for text in texts]
        findings.append(
            f"CUDA's runtime is there in several generations ({', '.join(sorted(generations))}): {', '.join(foreign)} "
            f"{'does' if len(foreign) == 1 else 'do'} not belong to CUDA {cuda}."
        )
    loose = [
        f"{name} {packages[name]}"
        for name in _NUMBERED
        if name in packages
        and not f"{packages[name]}.".startswith(f"{cuda}.")
        and packages[name].startswith(f"{wanted}.")
    ]
    if loose:
        findings.append(f"{', '.join(loose)} {'is' if len(loose) == 1 else 'are'} not of CUDA {cuda}, as the rest is.")
    if "sgl-kernel" in packages and "sglang-kernel" in packages:
        findings.append(
            f"Two kernel packages write into the same directory: sgl-kernel {packages['sgl-kernel']} (the old name) "
            f"and sglang-kernel {packages['sglang-kernel']}."
        )
    for name in ("flashinfer-cubin", "flashinfer-jit-cache"):
        have, python = packages.get(name, "").partition("+")[0], packages.get("flashinfer-python", "").partition("+")[0]
        if have and python and have != python:
            findings.append(
                f"{name} {have} is not for flashinfer-python {python}, which refuses to be imported with it."
            )
    if nvcc and nvcc != cuda:
        findings.append(f"nvcc is of CUDA {nvcc}, but kernels that are compiled at run time must be of CUDA {cuda}.")
    return findings


def _generations(packages: Mapping[str, str]) -> dict[str, list[str]]:
    """Major CUDA release → the runtime packages of it, each with its version."""
    found: dict[str, list[str]] = {}
    for name, version in sorted(packages.items()):
        match = _RUNTIME.match(name)
        if match and (match["major"] or name.startswith("nvidia-cuda-")):
            # Without a suffix only CUDA's own packages are numbered as CUDA is.
            found.setdefault(match["major"] or version.partition(".")[0], []).append(f"{name} {version}")
    return found


def differs(packages: Mapping[str, str], pins: Mapping[str, Pin], only: Collection[str] = ()) -> list[str]:
    """Where what is installed is not what is locked. `only`: look at these packages alone."""
    findings = []
    for name, pin in sorted(pins.items()):
        if only and name not in only:
            continue
        have = packages.get(name)
        if have is None:
            findings.append(f"{name} {pin.version} is in the lock, but is not installed.")
        elif have != pin.version:
            findings.append(f"{name} {have} is installed, but {pin.version} is locked.")
    return findings


def minimums(source: str) -> dict[str, str]:
    """Name → least version that a source of SGLang asserts with assert_pkg_version("name", "version", …)."""
    found = {}
    for node in ast.walk(ast.parse(source)):
        if not (
            isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "assert_pkg_version"
        ):
            continue
        words = [argument.value if isinstance(argument, ast.Constant) else None for argument in node.args[:2]]
        if len(words) == 2 and all(isinstance(word, str) for word in words):
            found[normalize(str(words[0]))] = str(words[1])
    return found


def too_old(packages: Mapping[str, str], least: Mapping[str, str]) -> list[str]:
    """Which packages SGLang itself would refuse at its start."""
    findings = []
    for name, version in sorted(least.items()):
        have = packages.get(name)
        if have is None:
            findings.append(f"SGLang asserts {name} {version} or newer, and it is not installed.")
        elif order(have) < order(version):
            findings.append(f"SGLang asserts {name} {version} or newer, and {have} is installed.")
    return findings


def order(version: str) -> tuple[tuple[int, ...], tuple[int, int]]:
    """A version as a value that sorts: 0.6.11rc1 < 0.6.11 < 0.6.11.post1 < 0.6.12. Local labels do not count."""
    text = version.partition("+")[0]
    match = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    rest = text[match.end() :] if match else text
    digits = int("".join(re.findall(r"\d+", rest)[:1]) or 0)
    stage = 1 if "post" in rest else -1 if re.search(r"a|b|rc|dev", rest) else 0
    return tuple(numbers), (stage, digits)


def unresolved(needed: Mapping[str, Iterable[str]], provided: Collection[str], tolerated: Collection[str]) -> list[str]:
    """Which shared libraries nothing provides.

    needed: file → sonames that it asks the loader for. provided: sonames in the stack and in the system.
    tolerated: sonames that may be missing (the driver's, where there is none). OPTIONAL files are left out.
    """
    missing: dict[str, list[str]] = {}
    for path, names in needed.items():
        for name in [] if OPTIONAL.match(path) else names:
            if name not in provided and name not in tolerated:
                missing.setdefault(name, []).append(path)
    return [
        f"{name} is in no wheel and not in the system, and {paths[0]} needs it"
        f"{f' (and {len(paths) - 1} more files)' if len(paths) > 1 else ''}."
        for name, paths in sorted(missing.items())
    ]


def read_needed(text: str) -> dict[str, list[str]]:
    """File → sonames, of what `readelf --dynamic FILE…` prints (of one file it does not print the name)."""
    found: dict[str, list[str]] = {}
    path = ""
    for line in text.splitlines():
        if line.startswith("File: "):
            path = line.removeprefix("File: ").strip()
            found[path] = []
        elif "(NEEDED)" in line and (match := re.search(r"\[(.+)\]", line)):
            found.setdefault(path, []).append(match[1])
    return found
