"""Comparison of runs; every expectation is worked out by hand."""

import math

import pytest

from servelab import bundle, compare
from servelab.bundle import Bundle


def arm(mode, rates, *, run=None, workload=None, invalid=()):
    levels = [
        {
            "concurrency": c,
            "valid": c not in invalid,
            "invalid_reasons": ["2 of 40 requests failed"] if c in invalid else [],
            "output_tok_s": rate,
            "accept_length": 2.5 if mode == "eagle3" else None,
        }
        for c, rate in rates.items()
    ]
    return Bundle(
        path=None,
        run={"mode": mode, "status": "ok", "simulated": None, "correctness": {"status": "verified"}, **(run or {})},
        summary={"levels": levels, "workload": {"output_tokens": 128, "seed": 1, **(workload or {})}},
        provenance={},
    )


@pytest.mark.parametrize(
    ("ratios", "outcome"),
    [
        ([1.5, 1.3, 1.1], "everywhere"),
        ([0.6, 0.5, 0.3], "nowhere"),
        ([1.6, 1.01, 0.8], "below"),
        ([0.8, 0.99, 1.2], "above"),
        ([1.2, 0.8, 1.2], "several"),
        ([1.01, 0.99, 1.0], "no difference"),
        ([], "nothing valid"),
    ],
)
def test_outcome(ratios, outcome):
    assert compare.outcome_of(ratios) == outcome


def test_a_two_percent_win_is_no_win():
    assert [compare.side(r) for r in (1.0199, 1.0201, 0.9805, 0.9803)] == [0, 1, 0, -1]


def test_crossover_is_linear_in_the_logarithms():
    # ln ratio goes from +0.2 at C=10 to −0.2 at C=1000: it passes 0 at the geometric middle, C=100.
    found = compare.crossover_of([(10, math.exp(0.2)), (1000, math.exp(-0.2))])
    assert found.estimate == pytest.approx(100)
    assert (found.low, found.high) == (10, 1000)


def test_crossover_through_a_level_without_a_difference():
    # +0.1 at C=10, exactly 0 between is a tie at 40, −0.1 at C=160: the root is the tie.
    found = compare.crossover_of([(10, math.exp(0.1)), (40, 1.0), (160, math.exp(-0.1))])
    assert found.estimate == pytest.approx(40)
    assert (found.low, found.high) == (10, 160)


def test_verdict_below():
    result = compare.compare(arm("baseline", {1: 50, 40: 1000, 100: 2000}), arm("eagle3", {1: 80, 40: 1100, 100: 1500}))
    # ln 1.1 = 0.0953 at ln 40 = 3.6889; ln 0.75 = −0.2877 at ln 100 = 4.6052;
    # root 3.6889 + 0.0953 / 0.3830 · 0.9163 = 3.9169 = ln 50.25.
    assert result.crossover.estimate == pytest.approx(50.25, abs=0.05)
    assert compare.verdict(result) == (
        "eagle3 pays up to C ≈ 50 (between the measured levels 40 and 100); beyond, baseline is faster."
    )


def test_verdict_nowhere_names_span_and_ratios():
    result = compare.compare(arm("baseline", {1: 89.5, 250: 900}), arm("eagle3", {1: 54.1, 250: 340}))
    assert compare.verdict(result) == (
        "eagle3 pays nowhere from C=1 to C=250: 0.38–0.60 times baseline's tokens per second."
    )


def test_an_invalid_level_is_shown_and_not_used():
    result = compare.compare(arm("baseline", {1: 50, 10: 400}), arm("eagle3", {1: 60, 10: 900}, invalid={10}))
    assert [row.ratio for row in result.rows] == [pytest.approx(1.2), None]
    assert "| 10 | 400.0 | — | — | 2.50 | eagle3: 2 of 40 requests failed |" in compare.table(result)
    assert result.outcome == "everywhere"


def test_a_level_of_one_arm_only_is_said():
    result = compare.compare(arm("baseline", {1: 50, 10: 400}), arm("eagle3", {1: 60}))
    assert result.rows[1].note == "eagle3 was not measured"


def test_no_headline_when_the_workload_differs():
    result = compare.compare(arm("baseline", {1: 50}), arm("eagle3", {1: 80}, workload={"output_tokens": 219}))
    assert result.differences == ["the output length differs: 128 in baseline, 219 in eagle3."]
    assert "pays" not in compare.text(result)


def test_a_failed_arm_is_named_with_its_reason():
    failed = arm("eagle3", {1: 80}, run={"status": "failed", "reason": "out of memory at graph capture"})
    assert (
        "eagle3 failed: out of memory at graph capture" in compare.compare(arm("baseline", {1: 50}), failed).differences
    )


def test_simulated_is_in_table_and_qualifications():
    lab = {"simulated": {"profile": "story", "time_scale": 5}}
    result = compare.compare(arm("baseline", {1: 50}, run=lab), arm("eagle3", {1: 80}, run=lab))
    words = compare.text(result)
    assert "baseline tok/s (simulated)" in words
    assert (
        "- simulated: these figures come from the lab's cost model (profile story, time scale 5), not from GPUs."
        in words
    )


def test_a_real_and_a_simulated_run_are_never_compared():
    lab = {"simulated": {"profile": "story", "time_scale": 5}}
    result = compare.compare(arm("baseline", {1: 50}), arm("eagle3", {1: 80}, run=lab))
    assert any(d.startswith("the simulator differs: unknown in baseline") for d in result.differences)


def test_campaign_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(bundle.BundleError, match="holds measured runs of no mode; a comparison needs baseline"):
        compare.of_campaign(tmp_path)
