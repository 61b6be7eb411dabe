"""What several test files share."""

from __future__ import annotations

import os
import stat
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# /dev/full's number: a node that can be opened and held without any driver. The lab's cards have it too, so what tells
# ours from those of a lab (or of another test run) on this machine is a name that nobody else has.
HARMLESS = os.makedev(1, 7)
CARDS = [int(f"{os.getpid()}{number}") for number in range(2)]
NODES = {0: f"nvidia{CARDS[0]}", 1: f"nvidia{CARDS[1]}", "ctl": f"nvidiactl{os.getpid()}"}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--all-releases", action="store_true", help="try the allreduce patch on every published release of SGLang"
    )


@pytest.fixture
def gpu_dir(tmp_path: Path) -> Path:
    """A directory with the device nodes of two cards, all of one harmless number, as in the lab."""
    directory = tmp_path / "dev"
    directory.mkdir(mode=0o755)
    try:
        for name in NODES.values():
            os.mknod(directory / name, stat.S_IFCHR | 0o666, HARMLESS)
            (directory / name).chmod(0o666)
        (directory / NODES[0]).open("rb").close()
    except OSError as error:
        pytest.skip(f"device nodes cannot be made or opened here: {error}")
    return directory


@pytest.fixture
def hold(gpu_dir: Path) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
    """hold(0, "ctl", …, argv=[…]) → a process that has these nodes (keys of NODES, or paths) open."""
    started: list[subprocess.Popen[bytes]] = []

    def start(*nodes: int | str, argv: list[str] | None = None, **options: object) -> subprocess.Popen[bytes]:
        fds = [os.open(gpu_dir / NODES[node] if node in NODES else str(node), os.O_RDONLY) for node in nodes]
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
