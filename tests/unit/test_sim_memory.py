"""What a start takes of each card and where it fails, against hand-computed figures and a real SGLang's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from servelab_lab.gpu.cards import Card
from servelab_lab.gpu.client import DriverError, Gpu, State
from servelab_lab.gpu.scan import Holder
from servelab_lab.server import cards
from servelab_lab.server.cards import Seat, seats
from servelab_lab.server.cost import Mode, load_profile
from servelab_lab.server.dialect import Dialect
from servelab_lab.server.memory import StartFailure, plan
from servelab_lab.server.startup import progress_bar

STORY = load_profile("story")
EAGLE3 = Mode(draft_steps=2, draft_tokens=3)
NOW = Dialect.of("0.5.23")
EMPTY = [0] * 8
LOGS = Path(__file__).parent / "cases" / "sglang-real"


def test_a_fraction_of_055_leaves_the_storys_10_42_gb_of_cache() -> None:
    division = plan(STORY, Mode(), 0.55, EMPTY, NOW)
    # 97887 MiB are 95.593 GiB, less 0.59 for a context: 95.00. 0.55 x 95.00 - 41.83 = 10.42.
    assert division.available == pytest.approx(95.003, abs=0.001)
    assert division.kv == pytest.approx(10.42, abs=0.005)
    # 10.42 GiB at 68.625 KiB a token.
    assert division.tokens == pytest.approx(159_230, rel=0.001)
    assert division.claim_mib == 53838


def test_auto_claims_88_percent_of_a_card() -> None:
    division = plan(STORY, EAGLE3, 0.88, EMPTY, NOW)
    assert division.claim_mib == 86141
    # The draft's weights and cache come out of the same share.
    assert division.kv + division.draft_kv == pytest.approx(0.88 * 95.003 - 41.83 - 1.2, abs=0.01)


def test_the_custom_all_reduces_buffers_leave_090_gb() -> None:
    division = plan(STORY, Mode(backend="custom_ar", limit=1 << 20), 0.55, EMPTY, NOW)
    # 0.55 x 95.00 - 41.83 - 9.52.
    assert division.kv == pytest.approx(0.90, abs=0.005)


def test_n_gram_drafts_need_no_second_model() -> None:
    ngram, baseline = (plan(STORY, mode, 0.55, EMPTY, NOW) for mode in (Mode(ngram=True, draft_tokens=8), Mode()))
    assert (ngram.draft, ngram.draft_kv, ngram.tokens) == (0, 0, baseline.tokens)


def test_up_to_0_5_13_a_cache_without_room_is_worded_otherwise() -> None:
    with pytest.raises(StartFailure) as caught:
        plan(STORY, Mode(), 0.4, EMPTY, Dialect.of("0.5.12"))
    assert (caught.value.kind, caught.value.text) == (
        "RuntimeError",
        "Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.4",
    )


def failure(fraction: float, used: list[int]) -> StartFailure:
    with pytest.raises(StartFailure) as caught:
        plan(STORY, Mode(), fraction, used, NOW)
    return caught.value


def test_too_small_a_fraction_is_worded_as_the_real_one() -> None:
    real = re.search(r"ValueError: (Loaded weights leave .*)", (LOGS / "oom_pool_too_small.log").read_text())
    assert real
    ours = failure(0.4, EMPTY)
    assert ours.kind == "ValueError"
    assert ours.ranks == list(range(8))
    digits = re.compile(r"\d+\.\d+")
    assert digits.sub("#", ours.text) == digits.sub("#", real[1])
    # 41.83 / 95.003 = 0.4403
    assert digits.findall(ours.text) == ["0.4", "0.441", "0.4403"]


def test_one_occupied_card_is_an_imbalance_that_the_others_report() -> None:
    ours = failure(0.88, [0, 20000, 0])
    assert ours.text.startswith(
        "The memory capacity is unbalanced. Some GPUs may be occupied by other processes. pre_m"
    )
    assert ours.ranks == [0]


def test_evenly_occupied_cards_leave_a_smaller_cache() -> None:
    # 20,000 MiB are 19.53 GiB: 0.88 x 75.47 - 41.83.
    assert plan(STORY, Mode(), 0.88, [20000] * 8, NOW).kv == pytest.approx(24.58, abs=0.01)


def test_full_cards_are_an_nccl_error_and_nearly_full_ones_out_of_memory() -> None:
    assert failure(0.88, [97500] * 8).text.startswith("NCCL error: unhandled cuda error")
    assert failure(0.88, [60000] * 8).kind == "torch.OutOfMemoryError"


# Which cards


def visible(*used: int) -> State:
    holders = [Holder(1, minor, mib, "x") for minor, mib in enumerate(used) if mib]
    gpus = [Gpu(n, Card(n + 2), [h for h in holders if h.card == n]) for n in range(len(used))]
    return State("580", "13.0", gpus)


def test_ranks_sit_on_the_visible_cards_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "look", lambda path: visible(0, 700, 0, 0))
    assert seats(2, 0, 1, {}) == [Seat(2, 0), Seat(3, 700)]
    assert seats(2, 1, 2, {}) == [Seat(3, 700), Seat(5, 0)]
    assert seats(2, 0, 1, {"CUDA_VISIBLE_DEVICES": "3,1"}) == [Seat(5, 0), Seat(3, 700)]


def test_too_few_cards_and_no_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cards, "look", lambda path: visible(0, 0))
    with pytest.raises(StartFailure, match="invalid device ordinal") as caught:
        seats(4, 0, 1, {})
    assert caught.value.ranks == [2, 3]

    def silent(path: Path) -> State:
        raise DriverError("No devices were found\n", 6)

    monkeypatch.setattr(cards, "look", silent)
    with pytest.raises(StartFailure, match=r"^No accelerator .*\(No devices were found\)$"):
        seats(1, 0, 1, {})


def test_progress_bars_read_as_tqdms() -> None:
    log = (LOGS / "eagle3_start.log").read_text()
    # A third of 35 steps in 2 s; from the same capture.
    assert progress_bar("Multi-thread loading shards", "Completed", 0, 2, 0.0) == (
        "Multi-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]"
    )
    assert "Multi-thread loading shards:   0% Completed | 0/2 [00:00<?, ?it/s]" in log
    assert progress_bar("Capturing batches", "(bs=128 avail_mem=68.17 GB)", 1, 20, 2.03) == (
        "Capturing batches (bs=128 avail_mem=68.17 GB):   5%|▌         | 1/20 [00:02<00:38, 2.03s/it]"
    )
