"""Windows, percentiles, throughput: small numbers worked out by hand."""

import pytest

from servelab.load import metrics
from servelab.load.capture import Record
from servelab.load.metrics import Tally, Window, reasons_invalid, spread, steady_window
from servelab.shared.sse import Reply

S = 1_000_000_000


def test_window_opens_at_95_percent_and_closes_when_launching_stops() -> None:
    # 2 of 2 from t=1; the dip from 4 to 5 stays inside; stop at 9. 3 s × 2 + 1 s × 1 + 4 s × 2 in flight = 15 over 8 s.
    window = steady_window([(0, 4 * S), (1 * S, 10 * S), (5 * S, 12 * S)], 2, 9 * S)
    assert window == Window(1 * S, 9 * S, 15 / 8)


def test_window_of_twenty_needs_nineteen() -> None:
    intervals = [(i * S, 100 * S) for i in range(20)]
    window = steady_window(intervals, 20, 50 * S)
    assert window is not None
    assert window.start == 18 * S


def test_no_window_when_the_load_was_never_reached() -> None:
    assert steady_window([(0, 5 * S)], 2, 9 * S) is None
    assert steady_window([], 1, 9 * S) is None
    assert steady_window([(10 * S, 11 * S)], 1, 9 * S) is None


def test_an_end_and_a_start_at_one_moment_are_no_gap_in_the_mean() -> None:
    assert steady_window([(0, 5), (5, 10)], 1, 10) == Window(0, 10, 1.0)


def test_percentile_is_nearest_rank() -> None:
    found = spread([float(x) for x in (7, 2, 10, 4, 5, 6, 1, 8, 9, 3)], 662)
    assert (found["p50"], found["p90"], found["p99"]) == (5, 9, 10)
    assert spread([4.0, 2.0, 3.0], 662)["p50"] == 3


def test_percentiles_need_enough_requests() -> None:
    values = [float(x) for x in range(1, 663)]
    assert spread(values[:63], 63)["p90"] is None
    assert spread(values[:64], 64) == {"mean": 32.5, "p50": 32.0, "p90": 58.0, "p99": None, "n": 64}
    assert spread(values[:661], 661)["p99"] is None
    assert spread(values, 662)["p99"] == 656.0  # ceil(0.99 × 662) = 656
    assert spread([], 0) == {"mean": None, "p50": None, "p90": None, "p99": None, "n": 0}


def exchange(sent: int, ended: int, times: list[int], due: int | None = None, lag: int = 0) -> Record:
    reads = [time + lag for time in times]
    return Record(0, sent if due is None else due, sent, ended, b"", [0] * len(times), times, reads, 0, False, None)


def reply(chunks: list[tuple[int, int | None]], tokens: int, error: tuple[str, str] | None = None) -> Reply:
    return Reply(chunks=chunks, prompt_tokens=7, completion_tokens=tokens, error=error, done=True)


def test_a_level_by_hand() -> None:
    ms = 1_000_000
    tally = Tally(Window(0, 1000 * ms, 1.0))
    # sent at 100, text at 200 (3 tokens), 230 (4), 260 (4), 290 (1): case 15's stream, 10 ms per token
    chunks: list[tuple[int, int | None]] = [(200 * ms, 3), (230 * ms, 4), (260 * ms, 4), (290 * ms, 1)]
    tally.add(exchange(100 * ms, 291 * ms, [t for t, _ in chunks], due=99 * ms, lag=2 * ms), reply(chunks, 12))
    # sent before the window closes and ended after it: its first delta counts for the throughput, nothing for latencies
    late: list[tuple[int, int | None]] = [(990 * ms, 5), (1010 * ms, 7)]
    tally.add(exchange(900 * ms, 1020 * ms, [t for t, _ in late]), reply(late, 12))
    level = tally.summary(1, 1.0, True, 0.1)
    assert level["requests"]["completed"] == 2
    assert level["requests"]["in_window"] == 1
    assert level["output_tok_s"] == 17.0
    assert level["output_tok_s_naive"] == pytest.approx(24 / 0.910, rel=1e-5)
    assert level["ttft_ms"]["mean"] == 100.0
    assert level["chunk_gap_ms"] == {"mean": 30.0, "p50": 30.0, "p90": None, "p99": None, "n": 3}
    assert level["tpot_ms"]["mean"] == 10.0  # 90 ms for the 9 tokens behind the first delta, not for 11, not per delta
    assert level["e2e_ms"]["mean"] == 191.0
    assert level["tokens_per_chunk"] == 3.0
    assert level["self"]["lag_p99_ms"] == 2.0
    assert level["self"]["late_send_p99_ms"] == 1.0
    # Nothing between 290 and 990 ms: 69 whole slots of 10 ms.
    assert level["silence_s"] == 0.69


def test_scale_turns_wall_into_reported_seconds() -> None:
    tally = Tally(Window(0, 2 * S, 1.0))
    chunks: list[tuple[int, int | None]] = [(1 * S // 10, 1), (2 * S // 10, 1)]
    tally.add(exchange(0, 3 * S // 10, [t for t, _ in chunks]), reply(chunks, 2))
    level = tally.summary(1, 5.0, True, 0.1)
    assert level["window_s"] == 10.0
    assert level["output_tok_s"] == 0.2
    assert level["ttft_ms"]["mean"] == 500.0
    assert level["tpot_ms"]["mean"] == 500.0


def test_without_usage_per_delta_tokens_are_spread_evenly() -> None:
    tally = Tally(Window(0, 10, 1.0))
    tally.add(exchange(1, 14, [4, 8, 12]), reply([(4, None), (8, None), (12, None)], 12))
    assert tally.tokens_in_window == pytest.approx(8)
    assert tally.summary(1, 1.0, True, 0.0)["tokens_per_chunk"] is None


def test_failures_are_counted_by_kind_and_make_the_level_invalid() -> None:
    tally = Tally(Window(0, 1000, 10.0))
    for kind in ("http_500", "cut", "cut", "cancelled"):
        tally.add(exchange(1, 5, [2]), Reply(error=(kind, "")))
    tally.add(exchange(1, 5, [2, 3]), reply([(2, 1), (3, 1)], 2))
    level = {"concurrency": 10} | tally.summary(10, 1.0, True, 0.1)
    assert level["requests"]["errors"] == {"cut": 2, "http_500": 1}
    assert (level["requests"]["failed"], level["requests"]["cancelled"], level["requests"]["completed"]) == (3, 1, 1)
    assert reasons_invalid(level) == ["2 requests failed: cut", "1 request failed: http_500"]


@pytest.mark.parametrize(
    ("mean", "cpu", "stamped", "words"),
    [
        (9.7, 0.1, True, "not sustained"),
        (10.0, 0.91, True, "bottleneck"),
        (10.0, 0.71, False, "bottleneck"),
        (None, 0.1, True, "never reached"),
    ],
)
def test_reasons(mean: float | None, cpu: float, stamped: bool, words: str) -> None:
    tally = Tally(None if mean is None else Window(0, 1000, mean))
    tally.add(exchange(1, 5, [2, 3]), reply([(2, 1), (3, 1)], 2))
    reasons = reasons_invalid({"concurrency": 10} | tally.summary(10, 1.0, stamped, cpu))
    assert len(reasons) == 1
    assert words in reasons[0]


@pytest.mark.parametrize(("lag", "ours"), [(0, False), (6_000_000, True)])
def test_deltas_read_together_are_the_clients_doing_only_when_it_reads_late(lag: int, ours: bool) -> None:
    ms = 1_000_000
    tally = Tally(Window(0, 100 * ms, 1.0))
    # gaps of 10, 0 and 20: 10 on average, of which 6 are late
    times = [20 * ms, 30 * ms, 30 * ms, 50 * ms]
    tally.add(exchange(1, 99 * ms, times, lag=lag), reply([(time, 1) for time in times], 4))
    level = {"concurrency": 1} | tally.summary(1, 1.0, True, 0.1)
    assert level["self"]["merged_share"] == pytest.approx(1 / 3, abs=1e-5)
    assert bool(reasons_invalid(level)) == ours
    assert "33.3% of the deltas" in (reasons_invalid(level) if ours else metrics.notices(level, None))[0]


def test_a_first_delta_that_was_read_with_the_second_is_told_because_its_time_is_the_seconds() -> None:
    tally = Tally(Window(0, 1000, 2.0))
    tally.add(exchange(1, 50, [20, 20, 30]), reply([(20, 1), (20, 1), (30, 1)], 3))
    tally.add(exchange(1, 50, [10, 20, 30]), reply([(10, 1), (20, 1), (30, 1)], 3))
    tally.add(exchange(1, 50, [10, 20, 20]), reply([(10, 1), (20, 1), (20, 1)], 3))
    level = {"concurrency": 3} | tally.summary(3, 1.0, True, 0.1)
    assert level["self"]["merged_first_share"] == pytest.approx(1 / 3, abs=1e-5)
    assert [said for said in metrics.notices(level, None) if "TTFT" in said] == [
        "33.3% of the requests had their first delta in one read with the second: unless the server sent them "
        "together, their TTFT is too high"
    ]


def test_every_figure_that_needs_it_has_a_definition() -> None:
    tally = Tally(Window(0, 1000, 1.0))
    figures = {key for key in tally.summary(1, 1.0, True, 0.0) if key.endswith(("_ms", "tok_s", "naive"))}
    assert figures <= set(metrics.DEFINITIONS)


@pytest.mark.parametrize(("share", "valid"), [(None, True), (0.0, True), (0.05, True), (0.06, False)])
def test_a_simulated_server_that_is_behind_its_time_voids_the_level(share: float | None, valid: bool) -> None:
    tally = Tally(Window(0, 1000, 10.0))
    tally.add(exchange(1, 5, [2, 3]), reply([(2, 1), (3, 1)], 2))
    level = {"concurrency": 10, "simulator_late_share": share} | tally.summary(10, 1.0, True, 0.1)
    reasons = reasons_invalid(level)
    assert [reason.split(":")[0] for reason in reasons] == (
        [] if valid else ["the simulated server fell 6% behind its own time"]
    )


# Open loops: what counts was due in the window, from when it was due.

MS = 1_000_000


def two_tokens(first: int, last: int) -> Reply:
    return reply([(first * MS, 1), (last * MS, 1)], 2)


def test_an_open_level_by_hand() -> None:
    tally = Tally(Window(100 * MS, 1100 * MS, 2.0), open_loop=True)
    # due at 150 and sent 5 ms late: its user has waited since 150
    tally.add(exchange(155 * MS, 270 * MS, [250 * MS, 270 * MS], due=150 * MS), two_tokens(250, 270))
    # due in the window, answered after it: counted, or the slow ones would be missing
    tally.add(exchange(1000 * MS, 1500 * MS, [1300 * MS, 1500 * MS], due=1000 * MS), two_tokens(1300, 1500))
    # due before the window and after it: not counted
    tally.add(exchange(90 * MS, 300 * MS, [200 * MS, 300 * MS], due=90 * MS), two_tokens(200, 300))
    tally.add(exchange(1200 * MS, 1400 * MS, [1300 * MS, 1400 * MS], due=1200 * MS), two_tokens(1300, 1400))
    # load kept up behind the window and ended by us
    tally.add(exchange(1050 * MS, 1600 * MS, []), Reply(error=("cancelled", "")))
    level = tally.summary(None, 1.0, True, 0.1)
    assert level["concurrency"] is None
    assert level["requests"]["in_window"] == 2
    assert level["ttft_ms"]["mean"] == 200.0  # 100 and 300
    assert level["e2e_ms"]["mean"] == 310.0  # 120 and 500
    assert level["tpot_ms"]["mean"] == 110.0  # 20 and 200
    assert level["output_tok_s"] == 4.0  # 250, 270, 200 and 300
    assert level["self"]["late_send_p99_ms"] == 5.0
    assert (level["arrived_per_s"], level["ended_per_s"]) == (3.0, 2.0)
    assert reasons_invalid(level) == []


def open_level(came: float, went: float, late: float = 1.0, **more: object) -> dict[str, object]:
    tally = Tally(Window(0, 10 * S, 3.0), open_loop=True)
    tally.add(exchange(1, 5, [2, 3], due=0), two_tokens(2, 3))
    level = tally.summary(None, 1.0, True, 0.1) | {"arrived_per_s": came, "ended_per_s": went} | more
    level["self"]["late_send_p99_ms"] = late
    return level


@pytest.mark.parametrize(
    ("came", "went", "grows"),
    [
        (10.0, 9.5, False),  # 5 of 100: within three times the scatter of 100, which is 10
        (10.0, 6.9, True),  # 31 of 100
        (1000.0, 960.0, False),  # 400 of 10 000 is more than 3 × 100, but less than 5 %
        (1000.0, 940.0, True),
    ],
)
def test_a_queue_that_grows_voids_an_open_level(came: float, went: float, grows: bool) -> None:
    reasons = reasons_invalid(open_level(came, went))
    assert [reason.split(",")[0] for reason in reasons] == (
        [f"not sustained: {came * 10:.0f} requests came within the window and {went * 10:.0f} ended"] if grows else []
    )
    assert reasons_invalid(open_level(came, went, steady=False)) == []  # a trace may end with a queue


def test_requests_sent_late_are_another_load() -> None:
    assert reasons_invalid(open_level(10, 10, late=10.0)) == []
    assert "it sent requests 10.1 ms late" in reasons_invalid(open_level(10, 10, late=10.1))[0]
    # 40 reported ms of a simulation five times as fast are 8 real ones
    assert reasons_invalid(open_level(10, 10, late=40.0), scale=5.0) == []


def test_the_window_of_an_open_level_knows_who_was_in_flight() -> None:
    # 2 s alone, 1 s both, of 4
    window = metrics.open_window([(0, 3 * S), (2 * S, 9 * S)], 1 * S, 5 * S)
    assert window == Window(1 * S, 5 * S, 5 / 4)
    assert metrics.open_window([], 5, 5) is None


# Figures per token, per user, under limits.


def test_inter_token_latency_by_hand() -> None:
    tally = Tally(Window(0, 1000 * MS, 1.0))
    # 30 ms for 3 tokens, 50 ms for 1; a delta without a token passes its 5 ms on to the next
    chunks: list[tuple[int, int | None]] = [(100 * MS, 2), (130 * MS, 3), (135 * MS, 0), (180 * MS, 1)]
    tally.add(exchange(1, 181 * MS, [time for time, _ in chunks]), reply(chunks, 6))
    level = tally.summary(1, 1.0, True, 0.1)
    assert level["itl_ms"] == {"mean": 20.0, "p50": 10.0, "p90": None, "p99": None, "n": 4}  # 10 10 10 50
    assert level["chunk_gap_ms"]["n"] == 3
    assert level["tpot_ms"]["mean"] == 20.0
    assert level["output_tok_s_per_user"] == 50.0
    assert tally.summary(1, 5.0, True, 0.1)["output_tok_s_per_user"] == 10.0  # five times as slow in reported time


def test_weighted_percentiles() -> None:
    found = metrics.weighted_spread({1: [3.0], 98: [1.0], 901: [2.0]}, 1000)
    assert (found["p50"], found["p90"], found["p99"], found["n"]) == (2.0, 2.0, 2.0, 1000)
    assert metrics.weighted_spread({11: [3.0], 989: [1.0]}, 1000)["p99"] == 3.0  # the 990th of 1000
    assert metrics.weighted_spread({2: [4.0, 1.0, 3.0, 2.0]}, 1000)["p50"] == 2.0  # the 4th of 1 1 2 2 3 3 4 4
    assert metrics.weighted_spread({1: [5.0], 2: [1.0]}, 1000, 10)["mean"] == pytest.approx(70 / 3, rel=1e-5)
    assert found["mean"] == pytest.approx(1.903)


def test_goodput_counts_who_met_every_limit_and_those_that_failed() -> None:
    tally = Tally(Window(0, 2 * S, 1.0), slos={"ttft_ms": 100.0, "tpot_ms": 50.0})
    tally.add(exchange(1 * MS, 200 * MS, [101 * MS, 151 * MS]), two_tokens(101, 151))  # 100 and 50: just good
    tally.add(exchange(1 * MS, 200 * MS, [102 * MS, 140 * MS]), two_tokens(102, 140))  # late
    tally.add(exchange(1 * MS, 200 * MS, [50 * MS, 101 * MS]), two_tokens(50, 101))  # slow
    tally.add(exchange(1 * MS, 200 * MS, []), Reply(error=("cut", "")))
    found = tally.summary(1, 1.0, True, 0.1)["goodput"]
    assert found == {"slo": {"ttft_ms": 100.0, "tpot_ms": 50.0}, "requests_s": 0.5, "share": 0.25}
    assert Tally(Window(0, S, 1.0)).summary(1, 1.0, True, 0.1)["goodput"] is None


def test_accept_length_of_the_requests_themselves() -> None:
    tally = Tally(Window(0, 1000 * MS, 1.0))
    for steps, tokens in ((25, 64), (10, 36), (None, 8)):
        answer = two_tokens(2, 3)
        answer.verify_steps, answer.completion_tokens = steps, tokens
        tally.add(exchange(1, 5 * MS, [2, 3]), answer)
    level = tally.summary(1, 1.0, True, 0.1)
    assert (level["accept_length"], level["accept_length_from"]) == (2.85714, "requests")  # 100 tokens in 35 steps


def test_a_budget_for_failures() -> None:
    tally = Tally(Window(0, 1000, 10.0))
    tally.add(exchange(1, 5, [2]), Reply(error=("http_503", "")))
    for _ in range(9):
        tally.add(exchange(1, 5, [2, 3]), reply([(2, 1), (3, 1)], 2))
    level = {"concurrency": 10} | tally.summary(10, 1.0, True, 0.1)
    assert reasons_invalid(level | {"failures_allowed": 0.09}) == ["1 request failed: http_503"]
    allowed = level | {"failures_allowed": 0.1}
    assert reasons_invalid(allowed) == []
    assert metrics.notices(allowed, None) == ["1 requests failed: http_503 1"]


@pytest.mark.parametrize(
    ("cached", "said"),
    [
        (50, []),
        (35, ["50% of each prompt should be cached; the server says 35%"]),
        (None, ["50% of each prompt should"]),
    ],
)
def test_a_stated_cache_share_is_held_against_what_the_server_says(cached: int | None, said: list[str]) -> None:
    tally = Tally(Window(0, 1000, 1.0))
    answer = reply([(2, 1), (3, 1)], 2)
    answer.prompt_tokens, answer.cached_tokens = 100, cached
    tally.add(exchange(1, 5, [2, 3]), answer)
    found = metrics.notices({"concurrency": 1} | tally.summary(1, 1.0, True, 0.1), None, cached_share=0.5)
    assert [notice[: len(words)] for notice, words in zip(found, said, strict=True)] == said


def test_estimated_tokens_are_said() -> None:
    tally = Tally(Window(0, 1000, 1.0))
    answer = reply([(2, None), (3, None)], 2)
    answer.estimated = True
    tally.add(exchange(1, 5, [2, 3]), answer)
    found = metrics.notices({"concurrency": 1} | tally.summary(1, 1.0, True, 0.1), None)
    assert found[0].startswith("tokens of 1 requests are estimated")


@pytest.mark.parametrize(("stall_s", "voids"), [(2.3, True), (0.4, False)])
def test_a_server_that_stood_still_voids_the_level(stall_s: float, voids: bool) -> None:
    """Two streams of requests of 0.2 s, a delta each 20 ms; after a second nothing comes for a while."""
    tally = Tally(Window(0, 6 * S, 2.0))
    for stream in range(2):
        for number in range(30):
            sent = round((number * 0.2 + (stall_s if number > 4 else 0)) * S)
            times = [sent + S // 50 * k + S // 200 * stream for k in range(1, 11)]
            tally.add(exchange(sent, times[-1], times), reply([(time, 1) for time in times], 10))
    level = {"concurrency": 2} | tally.summary(2, 1.0, True, 0.1)
    (said,) = reasons_invalid(level) or [""]
    # The last delta before it came at 1.005 s, the first one after it at 3.32 s.
    assert said.startswith("the server stood still: for 2.31 s nothing came on any connection, ") is voids


def test_a_long_prefill_is_no_silence() -> None:
    """One stream whose first token takes 3 s of the 4 s that a request takes."""
    tally = Tally(Window(0, 12 * S, 1.0))
    for number in range(3):
        times = [number * 4 * S + 3 * S + k * S // 10 for k in range(11)]
        tally.add(exchange(number * 4 * S, times[-1], times), reply([(time, 1) for time in times], 11))
    level = tally.summary(1, 1.0, True, 0.1)
    assert level["silence_s"] == 3.0
    assert reasons_invalid({"concurrency": 1} | level) == []
