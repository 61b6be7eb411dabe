"""When requests are due, worked out by hand; and when a window opens."""

from itertools import islice, pairwise
from statistics import fmean, stdev

import pytest

from servelab.load.arrivals import SECOND, Open, burst, constant, poisson, ramp


def test_constant() -> None:
    assert list(islice(constant(4), 4)) == [0, 0.25, 0.5, 0.75]


def test_burst_of_three_at_six_per_second() -> None:
    assert list(islice(burst(6, 3), 7)) == [0, 0, 0, 0.5, 0.5, 0.5, 1.0]


def test_poisson_has_exponential_gaps() -> None:
    times = list(islice(poisson(5, seed=1), 20_000))
    gaps = [b - a for a, b in pairwise(times)]
    assert fmean(gaps) == pytest.approx(0.2, rel=0.03)
    assert stdev(gaps) == pytest.approx(0.2, rel=0.03)  # an exponential's is its mean
    assert sum(gap > 0.2 for gap in gaps) / len(gaps) == pytest.approx(0.3679, abs=0.015)  # 1/e


def test_poisson_is_the_same_pattern_at_every_rate_and_another_with_every_seed() -> None:
    slow, fast = list(islice(poisson(2, 1), 50)), list(islice(poisson(8, 1), 50))
    assert slow == pytest.approx([4 * time for time in fast])
    assert list(islice(poisson(2, 2), 50)) != slow


def test_ramp_from_nothing() -> None:
    # 0 to 10 per second within 2 s: 10 requests; number i is due when 5 t²/2 = i
    times = list(ramp(0, 10, 2))
    assert len(times) == 10
    assert times == pytest.approx([0, 0.6325, 0.8944, 1.0954, 1.2649, 1.4142, 1.5492, 1.6733, 1.7889, 1.8974], abs=1e-4)


def test_ramp_down_and_a_ramp_that_is_none() -> None:
    assert list(ramp(4, 4, 1)) == pytest.approx([0, 0.25, 0.5, 0.75])
    times = list(ramp(10, 0, 2))
    # mirrored: number i is due when 10 t - 5 t²/2 = i
    assert times[1] == pytest.approx(0.1026, abs=1e-4)
    assert times[9] == pytest.approx(1.3675, abs=1e-4)


def test_an_open_loop_goes_on_whatever_ends_and_opens_after_one_generation() -> None:
    shape = Open(constant(10), finite=False)
    shape.begin(5 * SECOND)
    assert [shape.launched(i) for i in range(3)] == [5 * SECOND, 5_100_000_000, 5_200_000_000]
    assert not shape.opens(3)
    shape.ended(0, 0)  # the first response: 3 were launched until then
    shape.launched(3)
    shape.ended(3, 0)
    assert not shape.opens(2)
    shape.ended(1, 0)
    assert shape.opens(1)
    assert shape.due() == 5_400_000_000


def test_a_finite_one_has_an_end_and_its_window_is_all_of_it() -> None:
    shape = Open([0, 1.5], finite=True)
    shape.begin(0)
    assert shape.opens(0)
    assert [shape.launched(0), shape.launched(1), shape.due()] == [0, 1_500_000_000, None]
