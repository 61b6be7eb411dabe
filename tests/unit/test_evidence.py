"""The bundles of a real GPU in docs/evidence: readable, whole, and saying what the page says."""

from __future__ import annotations

import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
ARCHIVE = ROOT / "docs/evidence/h200-x1/bundles.tar.xz"


def servelab(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "servelab", *map(str, words)],
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "MPLCONFIGDIR": "/tmp"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """mode → its run; `broken` is the one whose answers were wrong."""
    place = tmp_path_factory.mktemp("evidence")
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(place, filter="data")
    found = {path.name.rpartition("-")[2]: path for path in (place / "gpu").iterdir()}
    return found | {"broken": next((place / "broken").iterdir())}


@pytest.mark.parametrize("mode", ["baseline", "ngram", "eagle3", "eagle3_adaptive"])
def test_every_figure_can_be_made_again_from_its_rows(runs: dict[str, Path], mode: str) -> None:
    done = servelab("verify-bundle", runs[mode])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_crossover_that_the_page_states(runs: dict[str, Path]) -> None:
    """1.282 at C=10 and 0.713 at C=30; a straight line of log ratio over log C is zero at 10 · 3^0.423 = 15.9."""
    done = servelab("compare", runs["baseline"], runs["ngram"])
    assert (
        "**ngram pays up to C ≈ 16 (between the measured levels 10 and 30); beyond, baseline is faster.**"
        in done.stdout
    )
    assert "simulated" not in done.stdout


def test_a_wrong_model_is_no_measurement(runs: dict[str, Path]) -> None:
    done = servelab("compare", runs["baseline"], runs["broken"])
    assert done.returncode != 0
    assert "Wrong output" in done.stdout + done.stderr or "failed" in done.stdout + done.stderr
