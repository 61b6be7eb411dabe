"""The crossover, proved against known truth: whole campaigns drawn from a curve whose zero is known exactly.

The curves are those of step times linear in the batch, as a server has them: one arm yields C tokens per b0 + b1·C ms,
the other a·C per s0 + s1·C ms. Noise moves each start (all its levels together) and each level of each arm.
"""

import math
from statistics import median

import numpy as np
import pytest

from servelab.stats.crossover import Curve, refinement

LEVELS = [1, 2, 5, 10, 30, 70, 100, 250]


def steps(a, b0, b1, s0, s1):
    return lambda c: math.log(a * (b0 + b1 * c) / (s0 + s1 * c))


# 2.5 · (20 + 0.5 C) = 30 + 1.75 C at C = 40 exactly.
CROSSING = steps(2.5, 20, 0.5, 30, 1.75)


def bent(c):
    """Flat at first, then steep: zero at exactly 41.9, far from straight in ln C between 30 and 70."""
    return 0.35 * (1 - (math.log1p(c / 20) / math.log1p(41.9 / 20)) ** 2)


def draw(rng, truth, levels, start, level, odd=0.0):
    """One repetition: level → ln(other / base)."""
    shared = rng.normal(0, start) - rng.normal(0, start)
    if rng.random() < odd:
        shared += rng.choice([-0.1, 0.1])  # one arm of the two had a bad start
    return {c: truth(c) + shared + rng.normal(0, level) - rng.normal(0, level) for c in levels}


def campaign(rng, truth, repeats, start=0.005, level=0.005, refine=True, odd=0.0):
    """As the driver does it: two levels are added to the later repetitions after a look at the first."""
    logs = [draw(rng, truth, LEVELS, start, level, odd)]
    levels = list(LEVELS)
    seen = Curve(logs).crossing(LEVELS[0], LEVELS[-1])
    if refine and seen:
        levels = sorted(levels + refinement(seen, levels))
    return logs + [draw(rng, truth, levels, start, level, odd) for _ in range(repeats - 1)]


def prove(truth, zero, campaigns=200, **kind):
    """(coverage, median error with sign, median size of the error) over *campaigns* simulated ones."""
    rng = np.random.default_rng(20261129)
    errors, covered = [], 0
    for _ in range(campaigns):
        found = Curve(campaign(rng, truth, **kind)).crossing(LEVELS[0], LEVELS[-1])
        assert found is not None and found.bounded
        covered += (found.low or 0) <= zero <= (found.high or math.inf)
        errors.append(found.estimate / zero - 1)
    return covered / campaigns, median(errors), median(map(abs, errors))


def test_interval_covers_and_estimate_is_close():
    coverage, bias, size = prove(CROSSING, 40.0, repeats=5)
    assert coverage >= 0.93
    assert abs(bias) <= 0.005
    assert size <= 0.02


def test_a_curved_ratio():
    coverage, _, size = prove(bent, 41.9, repeats=5)
    assert coverage >= 0.93
    assert size <= 0.02


def test_without_the_extra_levels_the_estimate_is_biased_and_the_interval_says_so():
    coverage, bias, _ = prove(CROSSING, 40.0, repeats=5, refine=False)
    assert abs(bias) > 0.015
    assert coverage >= 0.93


@pytest.mark.parametrize(("start", "level"), [(0.01, 0.001), (0.001, 0.01)], ids=["starts differ", "levels differ"])
def test_either_kind_of_noise_alone(start, level):
    # One per cent per run on this flat crossing (slope −0.2) is worth 2 to 3 % of C: the interval has to say it.
    coverage, bias, size = prove(CROSSING, 40.0, repeats=5, start=start, level=level)
    assert coverage >= 0.93
    assert abs(bias) <= 0.01
    assert size <= 0.035


def test_three_repetitions_still_cover():
    assert prove(CROSSING, 40.0, repeats=3)[0] >= 0.93


def test_bad_starts_widen_the_interval_and_do_not_move_the_estimate():
    coverage, bias, _ = prove(CROSSING, 40.0, repeats=5, odd=0.1)
    assert coverage >= 0.93
    assert abs(bias) <= 0.01


def test_the_line_is_exact_where_the_truth_is_a_line():
    # +0.2 at C=10 and −0.2 at C=1000 in all three repetitions: zero at the geometric middle, no width.
    found = Curve([{10: 0.2, 1000: -0.2}] * 3).crossing(10, 1000)
    assert found.estimate == pytest.approx(100)
    assert (found.low, found.high) == (pytest.approx(100), pytest.approx(100))
    assert (found.bracket, found.interpolation) == ((10, 1000), 0)


def test_interval_of_a_pure_start_effect_is_the_t_interval_of_the_starts():
    # Slope −0.1 per ln 10, starts at −0.01, 0, +0.01: half width 4.3027 · 0.01 / √3 = 0.024842 in ln ratio,
    # which is 0.24842 decades of C: 100 · 10^±0.24842 = 56.44 … 177.2.
    rows = [{10: 0.1 + a, 100: a, 1000: -0.1 + a} for a in (-0.01, 0.0, 0.01)]
    found = Curve(rows).crossing(10, 1000)
    assert found.estimate == pytest.approx(100)
    assert (found.low, found.high) == (pytest.approx(56.44, rel=1e-3), pytest.approx(177.2, rel=1e-3))


def test_one_repetition_has_an_estimate_and_no_interval():
    found = Curve([{10: 0.2, 1000: -0.2}]).crossing(10, 1000)
    assert found.estimate == pytest.approx(100)
    assert (found.bounded, found.low, found.high) == (False, None, None)


def test_an_interval_that_leaves_the_measured_levels_is_open():
    rows = [{10: 0.02 + a, 100: -0.01 + a} for a in (-0.02, 0.0, 0.02)]
    found = Curve(rows).crossing(10, 100)
    assert (found.bounded, found.low, found.high) == (True, None, None)


def test_no_passage_no_crossing():
    assert Curve([{1: 0.3, 10: 0.2, 100: 0.1}] * 3).crossing(1, 100) is None


def test_a_level_missing_from_one_repetition_does_no_harm():
    rows = [{10: 0.1, 100: 0.001, 1000: -0.1}, {10: 0.1, 100: -0.001, 1000: -0.1}, {10: 0.1, 1000: -0.1}]
    found = Curve(rows).crossing(10, 1000)
    assert found.estimate == pytest.approx(100, rel=0.02)
    assert found.low < 100 < found.high


def test_refinement_halves_the_bracket_and_then_the_half_with_the_estimate():
    found = Curve([{30: 0.05, 70: -0.15}]).crossing(30, 70)
    # Estimate ln 30 + 0.25 · ln(70/30) = 37.1; √(30·70) = 45.8; √(30·45.8) = 37.08.
    assert refinement(found, [30, 70]) == [37, 46]
    assert refinement(found, [30, 37, 70]) == [46]
    narrow = Curve([{30: 0.05, 31: -0.15}]).crossing(30, 31)
    assert refinement(narrow, [30, 31]) == []


def test_fewer_than_two_levels_is_an_error():
    with pytest.raises(ValueError, match="at least two levels"):
        Curve([{10: 0.1}])
