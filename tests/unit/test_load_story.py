"""The older call forms, run as a person would: the script beside a wheel, with nothing installed."""

import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from known_truth_server import KnownTruthServer, Script

ROOT = Path(__file__).parents[2]


@pytest.fixture
def client(tmp_path: Path) -> Path:
    """A directory like /opt/servelab/client: the scripts and a wheel (a zip of the package, links followed)."""
    where = tmp_path / "client"
    where.mkdir()
    for script in ("benchmark_eagle3.py", "benchmark_parallel.py"):
        shutil.copy(ROOT / "roles/bench/files" / script, where)
    with zipfile.ZipFile(where / "servelab-0.1.0-py3-none-any.whl", "w") as wheel:
        for package, name in ((ROOT / "src/servelab", "servelab"), (ROOT / "plugins/module_utils", "servelab/shared")):
            for path in package.rglob("*.py"):
                wheel.write(path, f"{name}/{path.relative_to(package)}")
    return where


@pytest.fixture
def server() -> Iterator[KnownTruthServer]:
    started = KnownTruthServer(Script(tokens=[1, 4, 2, 3, 4, 2]))
    yield started
    started.close()


def call(client: Path, script: str, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-I", str(client / script), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, cwd="/")


def test_single_stream(client: Path, server: KnownTruthServer, tmp_path: Path) -> None:
    words = ["--server-url", server.url, "--max-tokens", "16", "--num-runs", "5", "--warmup", "1"]
    said = call(client, "benchmark_eagle3.py", *words, "--out", str(tmp_path / "out"))
    assert said.returncode in (0, 3), said.stderr  # 3: the machine was too busy for the client
    lines = said.stdout.splitlines()
    assert [line.split(":")[0] for line in lines if line.startswith("run ")] == [f"run {n}" for n in range(1, 6)]
    mean = next(line for line in lines if line.startswith("mean: "))
    assert 40 < float(mean.split()[1]) <= 200.5  # 16 tokens in at least 80 ms
    assert len(server.requests) == 6


def test_parallel(client: Path, server: KnownTruthServer, tmp_path: Path) -> None:
    words = ["--server-url", server.url, "--max-tokens", "16", "--concurrency", "1", "2", "--num-requests", "6"]
    said = call(client, "benchmark_parallel.py", *words, "--out", str(tmp_path / "out"))
    assert said.returncode in (0, 3), said.stderr
    table = [line.split() for line in said.stdout.splitlines()]
    start = next(number for number, cells in enumerate(table) if cells[:1] == ["concurrency"])
    assert [cells[0] for cells in table[start + 1 : start + 3]] == ["1", "2"]
    assert all(int(cells[5]) >= 6 for cells in table[start + 1 : start + 3])


def test_without_the_wheel(client: Path) -> None:
    next(client.glob("*.whl")).unlink()
    said = call(client, "benchmark_eagle3.py")
    assert said.returncode == 1
    assert "exactly one servelab wheel" in said.stderr
    assert "Traceback" not in said.stderr


def test_no_server(client: Path, tmp_path: Path) -> None:
    said = call(client, "benchmark_eagle3.py", "--server-url", "http://127.0.0.1:9", "--out", str(tmp_path / "out"))
    assert said.returncode == 4
    assert "no answer from" in said.stdout
