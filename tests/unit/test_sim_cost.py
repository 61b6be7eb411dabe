"""The cost model, against numbers worked out by hand from the profiles' own comments."""

from __future__ import annotations

import json

import pytest

from servelab_lab.server.cost import (
    PROFILES,
    Backend,
    Mode,
    ProfileError,
    accept_length,
    accept_thresholds,
    allreduce_ms,
    captured,
    crossover,
    decode_tok_s,
    load_profile,
    prefill_ms,
    profile_names,
    step_ms,
)

BASELINE = Mode()
EAGLE3 = Mode(draft_steps=2, draft_tokens=3)
STORY = load_profile("story")
CROSSING = load_profile("crossing")
LEVELS = (1, 2, 5, 10, 30, 70, 100, 250)


def test_one_allreduce_is_a_start_up_cost_and_a_transfer() -> None:
    backend = Backend(graph_us=20, eager_us=200, gigabytes_per_s=2)
    assert backend.latency_us(0, captured=True) == 20
    # 10,000 bytes at 2 GB/s take 5 µs.
    assert backend.latency_us(10_000, captured=False) == 205


def test_story_reproduces_the_two_reported_single_streams() -> None:
    assert step_ms(STORY, BASELINE, 1) == pytest.approx(11.1732, abs=1e-6)
    assert decode_tok_s(STORY, BASELINE, 1) == pytest.approx(89.5, abs=0.005)
    assert step_ms(STORY, EAGLE3, 1) == pytest.approx(38.8172, abs=1e-6)
    assert decode_tok_s(STORY, EAGLE3, 1) == pytest.approx(54.1, abs=0.005)


def test_story_spends_30_ms_of_a_verify_in_122_allreduces_of_200_to_250_microseconds() -> None:
    latency = STORY.backends["nccl"].latency_us(3 * 7168 * 2, captured=False)
    assert latency == pytest.approx(240.0)
    assert 200 <= latency <= 250
    assert allreduce_ms(STORY, EAGLE3, 1) == pytest.approx(29.28)


def test_story_saturates_near_340_beyond_70_and_the_baseline_stays_above() -> None:
    for level in (70, 100, 250):
        assert decode_tok_s(STORY, EAGLE3, level) == pytest.approx(340, rel=0.07)
    for level in LEVELS:
        assert decode_tok_s(STORY, BASELINE, level) > decode_tok_s(STORY, EAGLE3, level)
    # A cap of 48 running requests, which is SGLang's default under speculation, hardly lowers the plateau.
    assert decode_tok_s(STORY, EAGLE3, 48) == pytest.approx(340, rel=0.07)
    assert crossover(STORY, BASELINE, EAGLE3) is None
    assert STORY.crossover is None


@pytest.mark.parametrize("batch", [1, 40, 250])
def test_crossing_is_linear_as_its_comment_says(batch: int) -> None:
    assert step_ms(CROSSING, BASELINE, batch) == pytest.approx(20 + 0.5 * batch)
    assert step_ms(CROSSING, EAGLE3, batch) == pytest.approx(30 + 1.75 * batch)


def test_crossing_crosses_at_40() -> None:
    assert CROSSING.crossover == 40
    assert crossover(CROSSING, BASELINE, EAGLE3) == pytest.approx(40, abs=1e-6)
    assert decode_tok_s(CROSSING, BASELINE, 40) == pytest.approx(1000)
    assert decode_tok_s(CROSSING, EAGLE3, 40) == pytest.approx(1000)
    assert decode_tok_s(CROSSING, EAGLE3, 39) > decode_tok_s(CROSSING, BASELINE, 39)
    assert decode_tok_s(CROSSING, EAGLE3, 41) < decode_tok_s(CROSSING, BASELINE, 41)


def test_crossover_between_two_batches_is_interpolated() -> None:
    # One step, two tokens: draft 1.95 + 0.125 C, verify 13.9 + 12.2 + 1.0 C.
    # 2 (20 + 0.5 C) = 28.05 + 1.125 C gives C = 11.95 / 0.125.
    one_step = Mode(draft_steps=1, draft_tokens=2)
    assert crossover(CROSSING, BASELINE, one_step) == pytest.approx(95.6)


def test_a_batch_above_the_captured_ones_pays_for_eager_launches() -> None:
    small = Mode(graph_max_batch=128)
    assert captured(STORY, small, 128)
    assert not captured(STORY, small, 129)
    # 122 all-reduces start 213.12 - 26.04 µs later each.
    assert step_ms(STORY, small, 129) - step_ms(STORY, BASELINE, 129) == pytest.approx(122 * 0.18708)
    assert not captured(STORY, Mode(graph_max_batch=0), 1)


def test_the_verify_of_both_profiles_runs_outside_graphs() -> None:
    assert not captured(STORY, EAGLE3, 1)
    assert not captured(CROSSING, EAGLE3, 1)


def test_prefill_is_a_constant_and_a_price_per_token() -> None:
    assert prefill_ms(STORY, 512) == pytest.approx(21.36)
    assert prefill_ms(CROSSING, 512) == pytest.approx(3.06)


def test_accept_thresholds_are_powers_that_give_the_mean() -> None:
    # 1 + p + p² = 2.5 has p = (√7 - 1) / 2.
    assert accept_thresholds(2.5, 3) == pytest.approx((0.8228757, 0.6771243))
    # 1 + p = 1.25
    assert accept_thresholds(1.25, 2) == pytest.approx((0.25,))


def test_accept_length_is_bounded_by_the_draft() -> None:
    assert accept_length(STORY, BASELINE) == 1
    assert accept_length(STORY, EAGLE3) == 2.1
    assert accept_length(CROSSING, Mode(draft_steps=1, draft_tokens=2)) == 2


def test_every_profile_says_where_its_numbers_come_from() -> None:
    assert profile_names() == ["crossing", "story"]
    for name in profile_names():
        comments = json.loads((PROFILES / f"{name}.json").read_text())["comments"]
        assert {"source", "model", "allreduce.nccl", "compute", "speculation", "prefill", "memory"} <= set(comments)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="'wonder' is unknown: choose one of crossing, story"):
        load_profile("wonder")
