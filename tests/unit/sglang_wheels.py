"""Real SGLang wheels for tests: downloaded once without dependencies, unpacked as pip would install them."""

from __future__ import annotations

import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import pytest

CACHE = Path.home() / ".cache" / "servelab" / "wheels"


def _wheel(version: str) -> Path:
    """Return the cached wheel of an SGLang release; skips the test with the reason where it cannot be had."""
    CACHE.mkdir(parents=True, exist_ok=True)
    if cached := sorted(CACHE.glob(f"sglang-{version}-*.whl")):
        return cached[0]
    with tempfile.TemporaryDirectory(dir=CACHE) as directory:
        # The newest Python with a wheel of every release; the files inside are the same for all of them.
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--python-version=3.12", "--platform=manylinux_2_34_x86_64", "--platform=any"]
        result = subprocess.run(
            [*command, f"--dest={directory}", f"sglang=={version}"], capture_output=True, text=True, timeout=300
        )
        downloaded = list(Path(directory).glob("*.whl"))
        if not downloaded:
            reason = result.stderr.strip().splitlines()[-1:] or [f"pip exited {result.returncode}"]
            pytest.skip(f"sglang {version} cannot be downloaded: {reason[0]}")
        return downloaded[0].replace(CACHE / downloaded[0].name)


def unpack(version: str, directory: Path) -> Path:
    """Unpack the serving part of a release below `directory` and return the package directory `sglang`."""
    with zipfile.ZipFile(_wheel(version)) as wheel:
        for name in wheel.namelist():
            top, _, rest = name.partition("/")
            serving = top == "sglang" and name.endswith(".py") and (rest.startswith("srt/") or "/" not in rest)
            if serving or top.endswith(".dist-info"):
                wheel.extract(name, directory)
    return directory / "sglang"
