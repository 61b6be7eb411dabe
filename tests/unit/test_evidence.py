"""The bundles of a real GPU in docs/evidence: readable, whole, and saying what the page says."""

from __future__ import annotations

import json
import re
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


def ratios(one: Path, other: Path) -> list[float]:
    """Tokens per second of the other by those of the one, level by level, as `servelab compare` prints them."""
    said = servelab("compare", one, other).stdout
    return [float(found[1]) for found in re.finditer(r"^\| \d+ \|[^|]+\|[^|]+\| ([\d.]+) \|", said, re.MULTILINE)]


@pytest.mark.parametrize("mode", ["baseline", "ngram", "eagle3", "eagle3_adaptive"])
def test_every_figure_can_be_made_again_from_its_rows(runs: dict[str, Path], mode: str) -> None:
    done = servelab("verify-bundle", runs[mode])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_crossover_that_the_page_states(runs: dict[str, Path]) -> None:
    """1.282 at C=10 and 0.713 at C=30; a straight line of log ratio over log C is zero at 10 · 3^0.423 = 15.9."""
    done = servelab("compare", runs["baseline"], runs["ngram"])
    told = "ngram pays up to C ≈ 16 (between the measured levels 10 and 30); beyond, baseline is faster."
    assert f"**In one run of each, {told}**" in done.stdout
    assert "simulated" not in done.stdout


def test_a_wrong_model_is_no_measurement(runs: dict[str, Path]) -> None:
    done = servelab("compare", runs["baseline"], runs["broken"])
    assert done.returncode != 0
    assert "Wrong output" in done.stdout + done.stderr or "failed" in done.stdout + done.stderr


@pytest.fixture(scope="module")
def again(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The second day's runs in their order: baseline, ngram, baseline, eagle3."""
    place = tmp_path_factory.mktemp("again")
    with tarfile.open(ROOT / "docs/evidence/h200-x1/again.tar.xz") as archive:
        archive.extractall(place, filter="data")
    return sorted((place / "again").iterdir())


def test_the_second_days_figures_can_be_made_again(again: list[Path]) -> None:
    for run in again:
        done = servelab("verify-bundle", run)
        assert done.returncode == 0, done.stdout + done.stderr


def test_two_starts_of_one_mode_differ_as_the_page_says(again: list[Path]) -> None:
    first, ngram, second, eagle3 = again
    assert ratios(first, second) == [1.07, 0.92, 0.90, 0.80, 1.10, 1.06]
    assert ratios(second, ngram) == [1.27, 1.41, 1.19, 0.71, 0.72, 0.97]
    assert ratios(second, eagle3) == [0.81, 1.05, 1.05, 0.87, 0.95, 1.23]


def test_a_pair_of_cards_figures_can_be_made_again(tmp_path: Path) -> None:
    """custom_ar set nothing that the baseline did not: two starts of one mode, and ngram."""
    with tarfile.open(ROOT / "docs/evidence/h200-x2/tp2.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    baseline, same, ngram = sorted((tmp_path / "tp2").iterdir())
    for run in (baseline, same, ngram):
        done = servelab("verify-bundle", run)
        assert done.returncode == 0, done.stdout + done.stderr
    assert ratios(baseline, same) == [0.89, 0.89, 0.82]
    assert ratios(baseline, ngram) == [1.38, 1.10, 0.73]


def test_nccl_and_sglangs_own_over_a_pair_of_cards_are_what_the_page_says(tmp_path: Path) -> None:
    with tarfile.open(ROOT / "docs/evidence/h200-x2/tp2-again.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    runs = sorted((tmp_path / "tp2-again").iterdir())
    for run in runs:
        done = servelab("verify-bundle", run)
        assert done.returncode == 0, done.stdout + done.stderr
    nccl, own, eagle3, nccl_again, own_again, no_p2p, patched = runs
    assert ratios(nccl, own) == [1.05, 1.25, 1.06]
    assert ratios(nccl_again, own_again) == [0.98, 1.19, 1.10]
    assert ratios(nccl_again, no_p2p) == [0.96, 1.09, 0.62]
    assert ratios(nccl, eagle3) == [1.01, 1.11, 0.84]
    both = servelab("compare", nccl, nccl_again, own, own_again).stdout
    assert both.count("no difference shown") == 3
    assert "the state of the all-reduce patch differs" in servelab("compare", nccl_again, patched).stdout
    for run in (own_again, no_p2p, patched):
        assert json.loads((run / "run.json").read_text())["correctness"]["status"] == "verified"


@pytest.mark.parametrize(
    ("file", "arm", "microseconds"),
    [
        ("all", "nccl", [11.0, 11.6, 12.4, 18.2, 48.8]),
        ("all", "nccl_ring_ll", [11.1, 11.6, 12.5, 19.3, 71.8]),
        ("all", "custom_ar_unforced", [4.2, 4.4, 4.5, 8.2, 34.5]),
        ("all", "custom_ar_v2", [2.1, 2.3, 2.7, 5.5, 28.8]),
        ("forced", "custom_ar_pcie", [4.2, 4.4, 4.5, 8.2, 34.5]),
        ("quiet", "nccl", [10.8, 10.5, 11.8, 19.4, 49.5]),
        ("quiet", "nccl_ring_ll", [11.1, 10.8, 11.8, 19.4, 71.6]),
        ("quiet", "nccl_no_p2p", [15.0, 15.5, 20.3, 65.6, 311.3]),
    ],
)
def test_the_collectives_are_what_the_page_says(file: str, arm: str, microseconds: list[float]) -> None:
    said = json.loads((ROOT / f"docs/evidence/h200-x2/collectives-{file}.json").read_text())
    (found,) = (one for one in said["arms"] if one["name"] == arm)
    assert found["status"] == "ok"
    sizes = [1 << 10, 1 << 12, 1 << 16, 1 << 20, 1 << 23]
    assert [round(found["rows"][str(size)]["graph"]["median_us"], 1) for size in sizes] == microseconds
