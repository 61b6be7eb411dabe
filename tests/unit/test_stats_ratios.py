"""Ratios: every expectation is from a table of the t distribution or worked out by hand."""

import math
import random
import subprocess
import sys

import pytest

from servelab.stats import outliers, ratios


def logs(*values):
    return [math.log(v) for v in values]


def test_three_pairs_have_the_wide_interval_of_two_degrees_of_freedom():
    # ln ratios 0.30, 0.32, 0.34: mean 0.32, sd 0.02, t(2, 95 %) = 4.3027; half width 4.3027 · 0.02 / √3 = 0.049683.
    found = ratios.paired([0.30, 0.32, 0.34])
    assert found.value == pytest.approx(math.exp(0.32))
    assert found.low == pytest.approx(math.exp(0.32 - 0.049683), rel=1e-5)
    assert found.high == pytest.approx(math.exp(0.32 + 0.049683), rel=1e-5)
    assert (found.n, found.log_sd) == (3, pytest.approx(0.02))


def test_p_is_the_tables():
    # A mean of 2.7764 standard errors is the 5 % point of four degrees of freedom: mean 1, so sd = √5 / 2.7764.
    sd = math.sqrt(5) / 2.7764
    spread = sd * math.sqrt(4 / 2)  # two values off by ± spread, three at the mean: sd = spread · √(2/4)
    found = ratios.paired([1 - spread, 1, 1, 1, 1 + spread])
    assert found.p == pytest.approx(0.05, abs=1e-4)


def test_one_pair_has_no_interval():
    found = ratios.paired(logs(1.5))
    assert (found.low, found.high, found.p, found.log_sd) == (None, None, None, None)


def test_no_pair_is_an_error():
    with pytest.raises(ValueError, match="at least one pair"):
        ratios.paired([])


def test_holm_raises_by_rank_and_never_falls():
    # 0.01 · 3 = 0.03; 0.02 · 2 = 0.04; 0.03 · 1 = 0.03, but not below its predecessor's 0.04.
    assert ratios.holm([0.03, 0.01, 0.02]) == pytest.approx([0.04, 0.03, 0.04])
    assert ratios.holm([]) == []
    assert ratios.holm([0.9, 0.8]) == [1.0, 1.0]


def test_a_win_must_be_beyond_chance_and_beyond_the_margin():
    sure = ratios.paired(logs(1.10, 1.11, 1.10, 1.11))
    small = ratios.paired(logs(1.010, 1.011, 1.010, 1.011))
    noisy = ratios.paired(logs(0.9, 1.3))
    assert [ratios.side(r) for r in (sure, small, noisy)] == [1, 0, 0]
    assert ratios.side(ratios.paired(logs(0.80, 0.81, 0.80))) == -1
    assert ratios.side(sure, p=0.2) == 0  # not after the adjustment
    assert [ratios.side(ratios.paired(logs(r))) for r in (1.0199, 1.0201, 0.9805, 0.9803)] == [0, 1, 0, -1]


def test_equality_is_shown_only_by_a_narrow_interval():
    assert ratios.same(ratios.paired(logs(1.001, 0.999, 1.002, 0.998)))
    assert not ratios.same(ratios.paired(logs(0.9, 1.1)))
    assert not ratios.same(ratios.paired(logs(1.0)))


def test_repeats_needed_agrees_with_the_published_tables_of_the_paired_t_test():
    # Cohen (1988), two-sided 5 %, power 80 %: effect 1 sd needs 10 pairs, 0.5 sd needs 34.
    one_sd = math.log1p(0.02)
    assert ratios.repeats_needed(one_sd, 0.02) == 10
    assert ratios.repeats_needed(2 * one_sd, 0.02) == 34
    assert ratios.repeats_needed(100 * one_sd, 0.02) is None
    assert ratios.repeats_needed(one_sd / 1000, 0.02) == 2


def test_noise_floor_of_equal_arms():
    # ln rates ±0.01 around each level: squares 2 · 0.0001 per level of two, one degree of freedom each: sd 0.014142.
    sd, df = ratios.start_noise(
        [[100 * math.exp(0.01), 100 * math.exp(-0.01)], [9 * math.exp(0.01), 9 * math.exp(-0.01)]]
    )
    assert (sd, df) == (pytest.approx(math.sqrt(2) / 100), 2)
    assert ratios.start_noise([[5.0], []]) is None
    # t(4) = 2.7764 · 0.02 / √5 = 0.024833
    assert ratios.smallest_shown(0.02, 5) == pytest.approx(math.expm1(0.024833), rel=1e-4)


def test_what_is_odd_is_named_and_its_level():
    calm = [{1: 0.300 + d, 10: 0.100 - d, 100: -0.2 + d / 2} for d in (0.0, 0.004, -0.004, 0.002)]
    assert outliers.odd(calm) == []
    calm.append({1: 0.301, 10: -0.15, 100: -0.199})
    ((repetition, level, away),) = outliers.odd(calm)
    assert (repetition, level) == (4, 10)
    assert away == pytest.approx(-0.248, abs=0.003)


def test_a_hair_is_not_odd_however_alike_the_others_are():
    """As a campaign on a quiet machine had it, whose levels repeated to a thousandth."""
    alike = [{1: 0.3000, 10: 0.1000}, {1: 0.3001, 10: 0.1001}, {1: 0.3001, 10: 0.1150}]
    assert outliers.odd(alike) == []
    alike[2][10] = 0.1250
    assert [(i, level) for i, level, _ in outliers.odd(alike)] == [(2, 10)]


def test_two_repetitions_cannot_tell_which_is_odd():
    assert outliers.odd([{1: 0.0, 2: 0.0}, {1: 0.5, 2: 0.001}]) == []


def test_what_runs_on_a_guest_never_imports_any_of_this():
    words = "import sys, servelab.cli, servelab.load.command, servelab.bundle, servelab.verify, servelab.ledger"
    check = "assert not {'numpy', 'scipy', 'jinja2', 'matplotlib', 'yaml'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", f"{words}; {check}"], check=True)


def test_narrow_asks_for_five_pairs_and_every_interval():
    def ratio(width, n):
        return ratios.Ratio(0.5, 0.5 / (1 + width), 0.5 * (1 + width), n, 0.01, 0.01)

    assert ratios.narrow([ratio(0.02, 5), ratio(0.01, 6)], 0.02000001)
    assert not ratios.narrow([ratio(0.02, 5), ratio(0.03, 5)], 0.0201)
    assert not ratios.narrow([ratio(0.01, 4), ratio(0.01, 5)], 0.02)
    assert not ratios.narrow([], 0.02)
    assert not ratios.narrow([ratios.Ratio(1.0, None, None, 1, None, None)], 0.02)


# 1 % noise of starts that moves all levels together, which is the worst case, and half of it in single levels.
@pytest.mark.parametrize(("start", "level", "least"), [(0.01, 0.0, 0.915), (0.007, 0.007, 0.935)])
@pytest.mark.parametrize("share", [0.008, 0.012, 0.02])
def test_intervals_that_were_stopped_for_cover_as_said(start, level, least, share):
    rng = random.Random(11)
    held = claimed = 0
    for _ in range(600):
        logs_of: list[list[float]] = [[], [], [], []]
        for _ in range(15):
            moved = rng.gauss(0, start)
            for logs_here in logs_of:
                logs_here.append(moved + rng.gauss(0, level))
            if len(logs_of[0]) < ratios.LEAST_TO_STOP:
                continue
            found = [ratios.paired(logs_here) for logs_here in logs_of]
            if ratios.narrow(found, share):
                break
        held += sum(r.low <= 1 <= r.high for r in found)
        claimed += len(found)
    assert held / claimed >= least
