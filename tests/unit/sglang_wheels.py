"""Real SGLang wheels for tests: downloaded once without dependencies, unpacked as pip would install them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from functools import lru_cache
from pathlib import Path

import pytest

from servelab.shared.sglang_release import Release

CACHE = Path.home() / ".cache" / "servelab" / "wheels"


def _wheel(version: str, name: str = "sglang") -> Path:
    """Return the cached wheel of a release; skips the test with the reason where it cannot be had."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if cached := sorted(CACHE.glob(f"{name.replace('-', '_')}-{version}-*.whl")):
        return cached[0]
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        # The newest Python with a wheel of every release; the files inside are the same for all of them.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", "--platform=manylinux_2_34_x86_64", "--platform=any"]
        command += ["--platform=manylinux2014_x86_64"]
        result = subprocess.run(
            [*command, f"--dest={directory}", f"{name}=={version}"], capture_output=True, text=True, timeout=300
        )
        downloaded = list(Path(directory).glob("*.whl"))
        if not downloaded:
            reason = result.stderr.strip().splitlines()[-1:] or [f"pip exited {result.returncode}"]
            pytest.skip(f"{name} {version} cannot be downloaded: {reason[0]}")
        return downloaded[0].replace(CACHE / downloaded[0].name)


def published(oldest: str) -> list[str]:
    """Return the releases of SGLang on the package index from `oldest` on, oldest first."""
    command = [sys.executable, "-m", "pip", "index", "versions", "sglang", "--disable-pip-version-check"]
    answer = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout
    names = answer.partition("Available versions:")[2].splitlines()[0].replace(",", " ").split()
    return sorted((name for name in names if Release.parse(name) >= Release.parse(oldest)), key=Release.parse)


def unpack_communicators(version: str, directory: Path) -> Path:
    """As `unpack`, but only what concerns the all-reduce: of a wheel that is not in the cache only that is kept."""
    small = CACHE / "communicators" / f"sglang-{version}.zip"
    if not small.exists() and not list(CACHE.glob(f"sglang-{version}-*.whl")):
        small.parent.mkdir(parents=True, exist_ok=True)
        whole = _wheel(version)
        beside = small.with_suffix(".new")
        with zipfile.ZipFile(whole) as wheel, zipfile.ZipFile(beside, "w", zipfile.ZIP_DEFLATED) as kept:
            for name in wheel.namelist():
                if _concerns_the_allreduce(name):
                    kept.writestr(name, wheel.read(name))
        beside.replace(small)
        whole.unlink()
    with zipfile.ZipFile(small if small.exists() else _wheel(version)) as archive:
        archive.extractall(directory, [name for name in archive.namelist() if _concerns_the_allreduce(name)])
    return directory / "sglang"


def _concerns_the_allreduce(name: str) -> bool:
    top, _, rest = name.partition("/")
    version = "/" not in rest and rest.endswith("version.py")
    return top.endswith(".dist-info") or (
        top == "sglang" and (version or rest.startswith("srt/distributed/device_communicators/"))
    )


@lru_cache(maxsize=2)
def texts(version: str) -> str:
    """Return all Python sources of a release in one text, to look words up in."""
    with zipfile.ZipFile(_wheel(version)) as wheel:
        names = [name for name in wheel.namelist() if name.startswith("sglang/") and name.endswith(".py")]
        return "\n".join(wheel.read(name).decode("utf-8", "replace") for name in names if "/test/" not in name)


def other_wheel(name: str, version: str) -> bytes:
    """Return sources and libraries of another distribution in one piece, to look words up in."""
    with zipfile.ZipFile(_wheel(version, name)) as wheel:
        wanted = [entry for entry in wheel.namelist() if entry.endswith(".py") or ".so" in entry]
        return b"\n".join(wheel.read(entry) for entry in wanted)


def unpack(version: str, directory: Path) -> Path:
    """Unpack the serving part of a release below `directory` and return the package directory `sglang`."""
    with zipfile.ZipFile(_wheel(version)) as wheel:
        for name in wheel.namelist():
            top, _, rest = name.partition("/")
            serving = top == "sglang" and name.endswith(".py") and (rest.startswith("srt/") or "/" not in rest)
            if serving or top.endswith(".dist-info"):
                wheel.extract(name, directory)
    return directory / "sglang"
