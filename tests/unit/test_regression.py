"""Has anything become slower? Expectations by hand; the t quantiles are from a table."""

import json
import math

import pytest

from servelab.bundle import BundleError
from servelab.cli import main
from servelab.compare import regression


def campaign(path, rates, *, mode="eagle3", driver="580.95.05", tokens=128):
    """rates: per repetition concurrency → tok/s. A directory as the driver leaves it."""
    path.mkdir(parents=True, exist_ok=True)
    plan = []
    for i, levels in enumerate(rates):
        run = path / f"20261129T10{i:02d}00Z-{mode}"
        run.mkdir()
        said = {
            "run.json": {
                "schema": "servelab.run/1",
                "mode": mode,
                "status": "ok",
                "started": f"2026-11-29T10:{i:02d}:00Z",
                "simulated": None,
            },
            "summary.json": {
                "levels": [
                    {"concurrency": c, "valid": True, "invalid_reasons": [], "output_tok_s": rate}
                    for c, rate in levels.items()
                ],
                "workload": {"output_tokens": tokens, "seed": i + 1},
            },
            "provenance.json": {"gpus": [{"uuid": "GPU-0", "driver_version": driver}]},
        }
        for name, content in said.items():
            (run / name).write_text(json.dumps(content))
        plan.append({"arm": mode, "mode": mode, "repetition": i, "run_id": run.name})
    (path / "campaign.json").write_text(json.dumps({"runs": plan}))
    return path


def test_the_interval_is_welchs():
    # Logs 0, 0.02, 0.04 (variance 0.0004) and 0.1, 0.11, 0.12 (0.0001): difference 0.09, standard error
    # √(0.0005 / 3) = 0.012910, degrees of freedom 0.0005² / ((0.0004² + 0.0001²) / 2) = 2.941, t(2.941) = 3.217.
    ratio = regression.unpaired([0, 0.02, 0.04], [0.1, 0.11, 0.12])
    assert ratio.value == pytest.approx(math.exp(0.09))
    assert math.log(ratio.high) - 0.09 == pytest.approx(3.217 * 0.012910, abs=2e-4)
    assert ratio.n == 3


def test_one_run_on_one_side_borrows_the_other_sides_deviation():
    # Variance 0.0004 with 2 degrees of freedom, t = 4.303, standard error √(0.0004 · (1 + 1/3)) = 0.023094.
    ratio = regression.unpaired([0, 0.02, 0.04], [0.12])
    assert math.log(ratio.high / ratio.value) == pytest.approx(4.303 * 0.023094, abs=1e-4)
    assert regression.unpaired([0.1], [0.2]).low is None


def test_a_loss_is_named_and_ends_with_3(tmp_path, capsys):
    campaign(tmp_path / "first", [{1: 100, 10: 400}, {1: 101, 10: 401}, {1: 99, 10: 399}])
    now = campaign(tmp_path / "after", [{1: 100, 10: 360}, {1: 99, 10: 361}, {1: 101, 10: 359}], driver="580.159.04")
    assert main(["compare", str(now), "--baseline", "first"]) == 3
    said = capsys.readouterr().out
    # Logs of 399, 400, 401 and 359, 360, 361: means differ by ln 0.9, variances 6.25e-6 and 7.72e-6 → se 0.00216,
    # 3.96 degrees of freedom, t 2.79: ±0.60 %.
    assert "| eagle3 | 10 | 400.0 | 360.0 | 0.900 [0.895, 0.905] | slower |" in said
    assert "| eagle3 | 1 | 100.0 | 100.0 | 1.000 [0.978, 1.023] | no difference shown |" in said
    assert "**Slower than first: eagle3 at C=10 (0.900 [0.895, 0.905]).**" in said
    assert "- Changed: the driver differs: 580.95.05 in eagle3 of first, 580.159.04 in eagle3 of after." in said


def test_nothing_slower_says_how_sure_it_is(tmp_path, capsys):
    campaign(tmp_path / "first", [{10: 400}, {10: 401}, {10: 399}])
    now = campaign(tmp_path / "after", [{10: 401}, {10: 400}, {10: 402}])
    assert main(["compare", str(now), "--baseline", str(tmp_path / "first")]) == 0
    assert (
        "**Nothing was shown to be slower than first by more than 2%; every level is shown to be equal within it, and "
        "the widest interval is ±0.6%.**"
    ) in capsys.readouterr().out


def test_a_gain_is_no_loss(tmp_path):
    campaign(tmp_path / "first", [{10: 400}, {10: 401}, {10: 399}])
    now = campaign(tmp_path / "after", [{10: 500}, {10: 501}, {10: 499}])
    assert main(["compare", str(now), "--baseline", "first"]) == 0


def test_many_levels_are_adjusted_together(tmp_path):
    # A loss of 4 % with deviations of 1.5 %: alone p = 0.031 would be called slower, of ten levels one is not.
    spread = [-0.015, 0, 0.015]
    level = range(1, 11)
    loss = {c: (0.04 if c == 1 else 0.0) for c in level}
    first = [{c: 100 * math.exp(e) for c in level} for e in spread]
    after = [{c: 100 * math.exp(e - loss[c]) for c in level} for e in spread]
    campaign(tmp_path / "first", first)
    found = regression.watch(tmp_path / "first", campaign(tmp_path / "after", after))
    assert found.rows[0].ratio.p == pytest.approx(0.031, abs=0.001)
    assert found.slower == []
    alone = campaign(tmp_path / "alone", [{1: levels[1]} for levels in after])
    campaign(tmp_path / "one", [{1: levels[1]} for levels in first])
    assert [row.concurrency for row in regression.watch(tmp_path / "one", alone).slower] == [1]


def test_one_run_on_each_side_is_no_answer(tmp_path, capsys):
    campaign(tmp_path / "first", [{10: 400}])
    now = campaign(tmp_path / "after", [{10: 200}])
    assert main(["compare", str(now), "--baseline", "first"]) == 1
    said = capsys.readouterr().out
    assert "unknown: one run on each side" in said
    assert "nothing can be called slower. Repeat." in said


def test_another_workload_is_no_upgrade(tmp_path, capsys):
    campaign(tmp_path / "first", [{10: 400}, {10: 401}])
    now = campaign(tmp_path / "after", [{10: 200}, {10: 201}], tokens=64)
    assert main(["compare", str(now), "--baseline", "first"]) == 1
    said = capsys.readouterr().out
    assert "**No answer: these campaigns differ in more than an upgrade.**" in said
    assert "- the output length differs: 128 in eagle3 of first, 64 in eagle3 of after." in said
    assert main(["compare", str(now), "--baseline", "first", "--force"]) == 1
    assert "**NOT COMPARABLE, printed by force: Slower than first: eagle3 at C=10" in capsys.readouterr().out


def test_what_cannot_be_found_or_shares_no_mode(tmp_path):
    now = campaign(tmp_path / "after", [{10: 400}])
    with pytest.raises(BundleError, match="--baseline gone is no directory"):
        regression.campaign_of("gone", now)
    other = campaign(tmp_path / "other", [{10: 400}], mode="ngram")
    with pytest.raises(BundleError, match="no mode is in both"):
        regression.watch(other, now)
    assert main(["compare", str(now), str(other), "--baseline", "other"]) == 2
