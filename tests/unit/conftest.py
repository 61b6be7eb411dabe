"""What several test files share."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# /dev/full's number: a node that can be opened and held without any driver.
HARMLESS = os.makedev(1, 7)


@pytest.fixture
def gpu_dir(tmp_path: Path) -> Path:
    """A directory with the device nodes of two cards, all of one harmless number, as in the lab."""
    directory = tmp_path / "dev"
    directory.mkdir(mode=0o755)
    try:
        for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
            os.mknod(directory / name, stat.S_IFCHR | 0o666, HARMLESS)
            (directory / name).chmod(0o666)
        (directory / "nvidia0").open("rb").close()
    except OSError as error:
        pytest.skip(f"device nodes cannot be made or opened here: {error}")
    return directory


@pytest.fixture
def hold(gpu_dir: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """hold("nvidia0", …, argv=[…]) → a process that has these nodes open. A name with a slash is a path of its own."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*names: str, argv: list[str] | None = None, **options: object) -> subprocess.Popen[bytes]:
        fds = [os.open(name if "/" in name else gpu_dir / name, os.O_RDONLY) for name in names]
        try:
            process = subprocess.Popen(argv or ["sleep", "60"], pass_fds=fds, **options)  # type: ignore[call-overload]
        finally:
            for fd in fds:
                os.close(fd)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()
