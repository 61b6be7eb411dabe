"""The batching engine, stepped by hand: who runs when, and what a step yields."""

from __future__ import annotations

from collections.abc import Callable
from itertools import count, repeat
from pathlib import Path
from typing import Any

import pytest

from servelab_lab.server.adaptive import Adaptive
from servelab_lab.server.cost import Mode, load_profile
from servelab_lab.server.dialect import Dialect
from servelab_lab.server.engine import DecodeReport, Engine, PrefillReport, Request
from servelab_lab.server.prefix import PrefixCache

STORY = load_profile("story")
BASELINE = Mode(graph_max_batch=128)
EAGLE3 = Mode(draft_steps=2, draft_tokens=3)


class Out:
    """Collects what a request's sink gets."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int, str | None]] = []

    def __call__(self, text: str, tokens: int, reason: str | None) -> None:
        self.steps.append((text, tokens, reason))

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.steps)


def build(
    mode: Mode = BASELINE,
    *,
    max_running: int = 100,
    chunk: int = 8192,
    kv_tokens: int = 10**6,
    every: int = 40,
    **more: Any,
) -> tuple[Engine, list[PrefillReport], list[DecodeReport]]:
    prefills: list[PrefillReport] = []
    decodes: list[DecodeReport] = []
    engine = Engine(
        STORY,
        mode,
        max_running=max_running,
        chunked_prefill=chunk,
        kv_tokens=kv_tokens,
        report_every=every,
        on_prefill=prefills.append,
        on_decode=decodes.append,
        **more,
    )
    return engine, prefills, decodes


def ask(
    engine: Engine, sink: Callable[[str, int, str | None], None], prompt: int = 10, limit: int = 3, **more: int
) -> Request:
    request = Request(prompt, limit, repeat(" a"), sink, **more)
    engine.submit(request)
    return request


def run(engine: Engine) -> list[float]:
    """Step until nothing is left; return the lengths of the steps."""
    steps = []
    length = engine.begin()
    while length is not None:
        steps.append(length)
        length = engine.finish_step()
    return steps


def test_prefill_yields_the_first_token_and_every_step_one_more() -> None:
    engine, _, _ = build()
    out = Out()
    ask(engine, out)
    # Prefill: 6 + 10 x 0.03. Decode of one: 11.1732, twice.
    assert run(engine) == pytest.approx([6.3, 11.1732, 11.1732])
    assert out.steps == [(" a", 1, None), (" a", 1, None), (" a", 1, "length")]
    assert engine.requests == 0
    assert engine.idle


def test_a_batch_shares_its_steps() -> None:
    engine, prefills, _ = build()
    outs = [Out() for _ in range(10)]
    for out in outs:
        ask(engine, out, limit=2)
    # One prefill of 100 tokens, one decode step of 10 requests: 6.2032 + 0.7 x 10 + 122 x (26.04 + 89.6 µs) = 27.31128.
    assert run(engine) == pytest.approx([9.0, 27.31128])
    assert all(out.tokens == 2 for out in outs)
    assert prefills == [PrefillReport(new_requests=10, new_tokens=100, running=0, waiting=0, pending_tokens=0)]


def test_above_max_running_requests_wait() -> None:
    engine, prefills, _ = build(max_running=2)
    outs = [Out(), Out(), Out()]
    for out in outs:
        ask(engine, out, limit=2)
    engine.begin()
    engine.finish_step()
    assert [out.tokens for out in outs] == [1, 1, 0]
    assert engine.requests == 3
    engine.finish_step()
    engine.finish_step()
    assert [out.tokens for out in outs] == [2, 2, 1]
    assert [(report.new_requests, report.waiting) for report in prefills] == [(2, 1), (1, 0)]


def test_a_long_prompt_is_prefilled_in_chunks() -> None:
    engine, prefills, _ = build(chunk=100)
    out = Out()
    ask(engine, out, prompt=250, limit=1)
    assert run(engine) == pytest.approx([9.0, 9.0, 7.5])
    assert [(report.new_tokens, report.pending_tokens) for report in prefills] == [(100, 150), (100, 50), (50, 0)]
    assert out.steps == [(" a", 1, "length")]


def test_a_request_waits_until_the_cache_has_room_for_all_of_it() -> None:
    engine, _, _ = build(kv_tokens=30)
    first, second = Out(), Out()
    ask(engine, first, prompt=10, limit=5)
    ask(engine, second, prompt=10, limit=6)
    engine.begin()
    engine.finish_step()
    assert (first.tokens, second.tokens) == (1, 0)
    run(engine)
    assert (first.tokens, second.tokens) == (5, 6)


def test_speculation_yields_one_to_three_tokens_with_the_stated_mean() -> None:
    engine, _, decodes = build(EAGLE3, every=1)
    out = Out()
    ask(engine, out, limit=2101)
    run(engine)
    decoded = [tokens for _, tokens, reason in out.steps[1:] if reason is None]
    assert set(decoded) == {1, 2, 3}
    assert sum(decoded) / len(decoded) == pytest.approx(2.1, rel=0.005)
    # Chance of at least two: p = 0.6619 of 1 + p + p² = 2.1; of three: p² = 0.4381.
    assert decoded.count(1) / len(decoded) == pytest.approx(0.3381, abs=0.01)
    assert decoded.count(3) / len(decoded) == pytest.approx(0.4381, abs=0.01)
    assert out.tokens == 2101
    assert engine.total_accepted / engine.total_verify_steps == pytest.approx(2.1, rel=0.005)
    assert decodes[0].captured is False


def test_what_a_verify_accepts_beyond_the_limit_is_dropped() -> None:
    engine, _, _ = build(EAGLE3)
    outs = [Out() for _ in range(20)]
    for seed, out in enumerate(outs):
        ask(engine, out, limit=2, seed=seed)
    run(engine)
    assert all(out.steps[-1] == (" a", 1, "length") for out in outs)


def test_requests_with_different_seeds_accept_differently() -> None:
    engine, _, _ = build(EAGLE3)
    one, other = Out(), Out()
    ask(engine, one, limit=30, seed=1)
    ask(engine, other, limit=30, seed=2)
    run(engine)
    assert [tokens for _, tokens, _ in one.steps] != [tokens for _, tokens, _ in other.steps]


def test_end_of_sequence_is_a_token_without_text() -> None:
    engine, _, _ = build()
    out = Out()
    ask(engine, out, limit=10, stops_at=2)
    run(engine)
    assert out.steps == [(" a", 1, None), (" a", 1, None), ("", 1, "stop")]


def test_end_of_sequence_inside_a_verify_cuts_it() -> None:
    engine, _, _ = build(EAGLE3)
    for stops_at in range(1, 12):
        out = Out()
        numbers = count()
        engine.submit(Request(1, 50, (f" {n}" for n in numbers), out, stops_at=stops_at, seed=stops_at))
        run(engine)
        assert out.tokens == stops_at + 1
        assert "".join(text for text, _, _ in out.steps).split() == [str(n) for n in range(stops_at)]
        assert out.steps[-1][2] == "stop"


def test_a_cancelled_request_hears_nothing_more() -> None:
    engine, _, _ = build()
    waiting, running = Out(), Out()
    engine.begin()
    request = ask(engine, running, limit=100)
    engine.begin()
    engine.finish_step()
    engine.cancel(request)
    engine.cancel(ask(engine, waiting))
    run(engine)
    assert running.tokens == 1
    assert waiting.tokens == 0
    assert engine.requests == 0


def test_reports_count_what_happened_since_the_last() -> None:
    engine, _, decodes = build(every=40)
    for _ in range(4):
        ask(engine, Out(), prompt=100, limit=81)
    run(engine)
    assert len(decodes) == 2
    # The first tokens came with the prefill: 4, and then 4 a step.
    assert (decodes[0].running, decodes[0].tokens, decodes[0].tokens_held) == (4, 164, 4 * 141)
    assert decodes[1].tokens == 160


# The prefix cache


def test_the_longest_known_beginning_is_found() -> None:
    cache = PrefixCache(100)
    cache.add(["the", "quick", "brown", "fox"])
    assert cache.match(["the", "quick", "red", "fox"]) == 2
    assert cache.match(["the", "quick", "brown", "fox", "jumps"]) == 4
    assert cache.match(["quick", "brown"]) == 0
    cache.clear()
    assert cache.match(["the"]) == 0


def test_a_full_cache_forgets_the_oldest() -> None:
    cache = PrefixCache(4)
    cache.add(["a", "b"])
    cache.add(["c", "d", "e"])
    assert len(cache) == 4
    assert cache.match(["a", "b"]) == 0
    assert cache.match(["c", "d", "e"]) == 3


def said(engine: Engine, words: str, limit: int = 3) -> Request:
    prompt = words.split()
    request = Request(len(prompt), limit, repeat(" a"), Out(), words=prompt, again=lambda: repeat(" a"))
    engine.submit(request)
    run(engine)
    return request


def test_a_known_beginning_is_not_prefilled_again() -> None:
    engine, prefills, _ = build(cache=PrefixCache(1000))
    assert said(engine, "p q r s").cached_tokens == 0
    # The last token of a prompt is always computed.
    assert said(engine, "p q r s").cached_tokens == 3
    # What was answered is known too: p q r s a a a.
    assert said(engine, "p q r s a a b").cached_tokens == 6
    assert [(report.new_tokens, report.cached_tokens) for report in prefills] == [(4, 0), (1, 3), (1, 6)]
    engine.flush()
    assert said(engine, "p q r s").cached_tokens == 0


def test_eagle_keeps_pairs_and_knows_one_token_less() -> None:
    engine, _, _ = build(EAGLE3, cache=PrefixCache(1000))
    said(engine, "1 2 3 4 5 6 7 8 9")
    # As captured: a prompt of 9 tokens, 7 of them cached.
    assert said(engine, "1 2 3 4 5 6 7 8 9").cached_tokens == 7


def test_without_a_cache_nothing_is_known() -> None:
    engine, _, _ = build()
    said(engine, "p q r s")
    assert said(engine, "p q r s").cached_tokens == 0


# Aborts, n-grams, adaptive drafts


def test_an_abort_ends_a_waiting_request_at_once_and_a_running_one_with_its_next_token() -> None:
    engine, _, _ = build(max_running=1)
    running, waiting = Out(), Out()
    first = ask(engine, running, limit=100)
    second = ask(engine, waiting, limit=100)
    engine.begin()
    engine.finish_step()
    engine.abort(first)
    engine.abort(second)
    assert waiting.steps == [("", 0, "abort")]
    run(engine)
    assert running.steps == [(" a", 1, None), (" a", 1, "abort")]
    assert engine.requests == 0
    engine.abort(first)
    assert len(running.steps) == 2


def test_n_grams_yield_one_to_eight_tokens() -> None:
    engine, _, _ = build(Mode(ngram=True, draft_tokens=8))
    out = Out()
    ask(engine, out, limit=3001)
    run(engine)
    decoded = [tokens for _, tokens, reason in out.steps[1:] if reason is None]
    assert set(decoded) == set(range(1, 9))
    assert sum(decoded) / len(decoded) == pytest.approx(1.9, rel=0.01)


def test_a_large_batch_stops_drafting_and_a_small_one_starts_again(tmp_path: Path) -> None:
    path = tmp_path / "adaptive.json"
    path.write_text('{"1": {"candidate_steps": [2]}, "3": {"candidate_steps": [0]}}')
    switches: list[tuple[int, int]] = []
    engine, _, decodes = build(
        Mode(graph_max_batch=128, draft_steps=2, draft_tokens=3),
        every=1,
        adaptive=Adaptive(2, str(path), Dialect.of("0.5.23"), [1, 2, 3]),
        on_switch=lambda old, new: switches.append((old.draft_steps, new.draft_steps)),
    )
    outs = [Out() for _ in range(3)]
    for number, out in enumerate(outs):
        ask(engine, out, limit=50 if number else 10)
    steps = run(engine)
    # Three requests without drafts cost what the baseline's do: 6.2032 + 2.1 + 122 x (26.04 + 26.88 µs).
    assert steps[1] == pytest.approx(14.75944)
    assert switches == [(2, 0), (0, 2)]
    assert {tokens for _, tokens, _ in outs[0].steps} == {1}
    assert decodes[0].accept_length == 1.0
    assert max(report.accept_length for report in decodes) > 1.0
    assert all(out.tokens == 50 for out in outs[1:])
