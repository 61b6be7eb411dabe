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

# What the story reports the baseline with; up to 512 is what SGLang captures by itself.
BASELINE = Mode(graph_max_batch=128)
WIDE = Mode(graph_max_batch=512)
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


def test_story_reproduces_the_graphs_and_the_custom_all_reduce() -> None:
    # 1000 / 82 ms and 1000 / 38 ms.
    assert step_ms(STORY, WIDE, 1) == pytest.approx(12.19512, abs=1e-5)
    assert decode_tok_s(STORY, WIDE, 1) == pytest.approx(82, abs=0.005)
    custom = Mode(graph_max_batch=128, backend="custom_ar", limit=1 << 20)
    assert step_ms(STORY, custom, 1) == pytest.approx(26.31579, abs=1e-4)
    assert decode_tok_s(STORY, custom, 1) == pytest.approx(38, abs=0.005)
    # 73 x 14336 bytes are the last that fit into 1 MiB; above, NCCL carries them.
    assert allreduce_ms(STORY, custom, 74) == allreduce_ms(STORY, BASELINE, 74)
    assert allreduce_ms(STORY, custom, 73) > allreduce_ms(STORY, BASELINE, 73)


def test_pcie_ipc_takes_what_sglangs_source_says_of_it() -> None:
    ipc = STORY.backends["pcie_ipc"]
    assert ipc.latency_us(12 * 1024, captured=True) == pytest.approx(5.3, abs=1e-4)
    assert ipc.latency_us(96 * 1024, captured=True) == pytest.approx(15.3, abs=1e-4)


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
    assert step_ms(CROSSING, WIDE, batch) == pytest.approx(20 + 0.5 * batch)
    assert step_ms(CROSSING, EAGLE3, batch) == pytest.approx(30 + 1.75 * batch)


def test_crossing_crosses_at_40() -> None:
    assert CROSSING.crossover == 40
    assert crossover(CROSSING, WIDE, EAGLE3) == pytest.approx(40, abs=1e-6)
    assert decode_tok_s(CROSSING, BASELINE, 40) == pytest.approx(1000)
    assert decode_tok_s(CROSSING, EAGLE3, 40) == pytest.approx(1000)
    assert decode_tok_s(CROSSING, EAGLE3, 39) > decode_tok_s(CROSSING, BASELINE, 39)
    assert decode_tok_s(CROSSING, EAGLE3, 41) < decode_tok_s(CROSSING, BASELINE, 41)


def test_crossover_between_two_batches_is_interpolated() -> None:
    # One step: draft 1.95 + 0.125 C, verify 13.9 + 12.2 + 1.0 C, for 1 + p = 1.8228757 tokens (p = (√7 - 1) / 2).
    # 1.8228757 (20 + 0.5 C) = 28.05 + 1.125 C gives C = 8.407514 / 0.2135622.
    assert crossover(CROSSING, WIDE, WIDE.drafting(1)) == pytest.approx(39.368, abs=0.001)


def test_n_gram_crosses_where_the_comment_says() -> None:
    ngram = Mode(ngram=True, draft_tokens=8)
    assert step_ms(CROSSING, ngram, 10) == pytest.approx(66.2)
    assert accept_length(CROSSING, ngram) == pytest.approx(2.8)
    assert crossover(CROSSING, WIDE, ngram) == pytest.approx(29.8 / 2.6)
    # 6.2032 + 5.6 + 34.7456 + 0.3.
    assert step_ms(STORY, ngram, 1) == pytest.approx(46.8488)


def test_a_batch_above_the_captured_ones_pays_for_eager_launches() -> None:
    assert captured(STORY, BASELINE, 128)
    assert not captured(STORY, BASELINE, 129)
    # 122 all-reduces start 213.12 - 26.04 µs later each; the price of the graphs beyond 128 is saved.
    assert step_ms(STORY, BASELINE, 129) - step_ms(STORY, WIDE, 129) == pytest.approx(122 * 0.18708 - 1.021922)
    assert not captured(STORY, Mode(graph_max_batch=0), 1)


def test_the_verify_of_both_profiles_runs_outside_graphs() -> None:
    assert not captured(STORY, EAGLE3, 1)
    assert not captured(CROSSING, EAGLE3, 1)


def test_prefill_is_a_constant_and_a_price_per_token() -> None:
    assert prefill_ms(STORY, 512) == pytest.approx(21.36)
    assert prefill_ms(CROSSING, 512) == pytest.approx(3.06)


def test_accept_thresholds_are_powers_that_give_the_mean() -> None:
    # 1 + p + p² = 2.5 has p = (√7 - 1) / 2.
    assert accept_thresholds(CROSSING, EAGLE3) == pytest.approx((0.8228757, 0.6771243))
    assert accept_length(CROSSING, EAGLE3) == pytest.approx(2.5)


def test_a_longer_draft_is_accepted_with_the_same_chance_for_each_token() -> None:
    assert accept_length(STORY, BASELINE) == 1
    assert accept_length(STORY, EAGLE3) == pytest.approx(2.1)
    # p = (√5.4 - 1) / 2 = 0.661895 of 1 + p + p² = 2.1; p³ = 0.289979.
    assert accept_length(STORY, BASELINE.drafting(1)) == pytest.approx(1.661895)
    assert accept_length(STORY, BASELINE.drafting(3)) == pytest.approx(2.1 + 0.289979)


def test_every_profile_says_where_its_numbers_come_from() -> None:
    assert profile_names() == ["crossing", "story"]
    for name in profile_names():
        comments = json.loads((PROFILES / f"{name}.json").read_text())["comments"]
        assert {"source", "model", "compute", "graphs", "eagle", "ngram", "prefill", "memory"} <= set(comments)
        backends = load_profile(name).backends
        assert {f"allreduce.{backend}" for backend in backends} <= set(comments)


def test_an_unknown_profile_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ProfileError, match="'wonder' is unknown: choose one of crossing, story"):
        load_profile("wonder")
