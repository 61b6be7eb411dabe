"""Open loops, files, /generate and the rest of the options, run against a server whose truth is known. A machine
that is busy with something else may make a level invalid; what is asserted are counts, schedules and rows."""

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from known_truth_server import KnownTruthServer, Script
from test_load_wire import certificate  # noqa: F401 - a fixture

from servelab.cli import main

Serve = Callable[[Script], KnownTruthServer]
TOKENS = [1, 4, 2, 3, 4, 2]  # 16 tokens in 6 deltas, 30 ms to the first and 10 ms between


@pytest.fixture
def serve() -> Iterator[Serve]:
    servers = []

    def start(script: Script) -> KnownTruthServer:
        servers.append(KnownTruthServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def load(url: str, out: Path, *more: str) -> int:
    words = ["load", "--url", url, "--out", str(out), "--output-tokens", "16", "--input-tokens", "20"]
    return main([*words, "--min-seconds", "1", "--warmup-requests", "1", *more])


def level_of(out: Path) -> dict[str, Any]:
    (level,) = json.loads((out / "summary.json").read_text())["levels"]
    return dict(level)


def rows(out: Path, name: str) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (out / "levels" / f"level-{name}.jsonl").read_text().splitlines()]
    return sorted(found, key=lambda row: row["id"])


@pytest.mark.parametrize(("arrivals", "beginnings"), [("closed", 4), ("together", 1)])
def test_a_closed_loop_begins_spread_or_at_once(serve: Serve, tmp_path: Path, arrivals: str, beginnings: int) -> None:
    server = serve(Script(tokens=TOKENS))
    load(server.url, tmp_path / "o", "--arrivals", arrivals, "--levels", "4")
    level = level_of(tmp_path / "o")
    assert len({row["t_due"] for row in rows(tmp_path / "o", "0004")[:4]}) == beginnings
    assert level["concurrency"] == 4
    assert level["arrivals"]["shape"] == arrivals


def test_constant_arrivals_are_due_on_a_grid_whatever_the_server_does(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    load(server.url, tmp_path / "o", "--arrivals", "constant", "--rates", "25")
    found, level = rows(tmp_path / "o", "constant-25"), level_of(tmp_path / "o")
    assert all(b["t_due"] - a["t_due"] == pytest.approx(0.04, abs=3e-6) for a, b in pairwise(found))
    assert all(row["t_send"] >= row["t_due"] for row in found)
    start, end = level["window"]["start"], level["window"]["end"]
    assert end - start >= 1
    due = [row for row in found if start <= row["t_due"] <= end]
    assert level["requests"]["in_window"] == len(due) >= 25
    assert {row["error"] and row["error"]["kind"] for row in due} == {None}
    # the load goes on until the last of them has ended, and what is left then is no failure
    assert max(row["t_send"] for row in found) >= max(row["t_end"] for row in due) - 0.5
    assert {row["error"]["kind"] for row in found if row["error"]} <= {"cancelled"}
    ttft = [row["t_first"] - row["t_due"] for row in due]
    assert level["ttft_ms"]["mean"] == pytest.approx(1000 * sum(ttft) / len(ttft), rel=1e-3)
    assert (level["level"], level["concurrency"], level["steady"]) == ("constant-25", None, True)
    assert level["arrivals"] == {"shape": "constant", "rate": 25.0}
    assert level["arrived_per_s"] == pytest.approx(25, rel=0.1)
    assert level["in_flight_mean"] > 0.9 * 25 * 0.08  # Little: rate × duration, which is 80 ms at least


def test_poisson_arrivals_are_the_same_for_every_mode(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    offsets = []
    for out in (tmp_path / "a", tmp_path / "b"):
        load(server.url, out, "--arrivals", "poisson", "--rates", "40", "--min-seconds", "0.5")
        found = rows(out, "poisson-40")
        offsets.append([row["t_due"] - found[0]["t_due"] for row in found])
    assert min(map(len, offsets)) > 15
    assert all(a == pytest.approx(b, abs=3e-6) for a, b in zip(*offsets, strict=False))
    assert len({round(b - a, 4) for a, b in pairwise(offsets[0])}) > 10


def test_a_server_slower_than_the_rate_is_not_sustained(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=[1, 1], one_at_a_time=True))  # 40 ms each: at most 25 per second
    words = ["--arrivals", "constant", "--rates", "60", "--output-tokens", "2", "--min-seconds", "2"]
    assert load(server.url, tmp_path / "o", *words) == 3
    level = level_of(tmp_path / "o")
    assert level["invalid_reasons"][0].startswith("not sustained: ")
    assert level["ttft_ms"]["mean"] > 500  # what a user would have waited


def test_too_many_waiting_end_the_level(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=[1, 1], one_at_a_time=True))
    words = ["--arrivals", "constant", "--rates", "200", "--output-tokens", "2", "--min-seconds", "60"]
    began = time.monotonic()
    assert load(server.url, tmp_path / "o", *words, "--most-waiting", "30") == 3
    assert time.monotonic() - began < 20
    assert "requests were waiting for the server" in level_of(tmp_path / "o")["invalid_reasons"][-1]


def test_bursts(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    load(server.url, tmp_path / "o", "--arrivals", "burst", "--rates", "20", "--burst", "5")
    dues = Counter(row["t_due"] for row in rows(tmp_path / "o", "burst-20"))
    assert set(list(dues.values())[:-1]) == {5}
    moments = sorted(dues)
    assert all(b - a == pytest.approx(0.25, abs=3e-6) for a, b in pairwise(moments))
    assert server.most_at_once >= 5  # a burst takes 80 ms, the next one comes after 250


def test_a_ramp_has_no_steady_state_and_says_so(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    load(server.url, tmp_path / "o", "--arrivals", "ramp", "--rates", "40", "--min-seconds", "1.5")
    found, level = rows(tmp_path / "o", "ramp-40"), level_of(tmp_path / "o")
    assert len(found) == level["requests"]["in_window"] == 30  # 0 to 40 per second: 20 on average, 1.5 s
    half = found[0]["t_due"] + 0.75
    assert sum(row["t_due"] < half for row in found) == 8  # a quarter of them in the first half
    assert level["steady"] is False
    assert level["notices"] == ["the load changes along the level: its figures are means over all of it"]


def test_a_trace_is_replayed_with_its_times_and_lengths(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    lines = [{"timestamp": 5000 + t, "input_length": 20 + t // 10, "output_length": 16} for t in (0, 100, 110, 600)]
    (tmp_path / "trace.jsonl").write_text("\n".join(map(json.dumps, lines)))
    words = ["--arrivals", "trace", "--dataset", str(tmp_path / "trace.jsonl"), "--trace-speed", "2", "--salt", "none"]
    load(server.url, tmp_path / "o", *words, "--warmup-requests", "0")
    found = rows(tmp_path / "o", "trace")
    assert [round(row["t_due"] - found[0]["t_due"], 3) for row in found] == [0, 0.05, 0.055, 0.3]
    assert [row["error"] for row in found] == [None] * 4
    sent = [str(request["prompt"]).replace(".", " .").split() for request in server.requests]
    assert sorted(map(len, sent)) == [20, 30, 31, 80]


@pytest.mark.parametrize("incremental", [False, True])
def test_generate_with_random_token_ids(serve: Serve, tmp_path: Path, incremental: bool) -> None:
    server = serve(Script(tokens=TOKENS, incremental=incremental))
    words = ["--api", "generate", "--prompt-form", "ids", "--token-range", "100:32000", "--levels", "2"]
    load(server.url, tmp_path / "o", *words)
    found, level = rows(tmp_path / "o", "0002"), level_of(tmp_path / "o")
    for row in found:
        assert row["error"] is None
        assert [tokens for _, tokens in row["chunks"]] == TOKENS
        assert (row["verify_steps"], row["cached_tokens"], row["completion_tokens"]) == (5, 3, 16)
    assert len(server.requests[-1]["input_ids"]) == 20  # type: ignore[arg-type]
    assert (level["accept_length"], level["accept_length_from"]) == (3.2, "requests")


def test_reasoning_and_answer_have_their_own_times(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, reasoning=3))
    load(server.url, tmp_path / "o", "--api", "chat")
    level = level_of(tmp_path / "o")
    assert level["ttfa_ms"]["mean"] - level["ttft_ms"]["mean"] > 29  # three deltas, at least 10 ms apart
    for row in rows(tmp_path / "o", "0001"):
        assert row["t_answer"] == pytest.approx(row["t_send"] + row["chunks"][3][0], abs=3e-6)


def test_a_dataset_with_a_key_per_request(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    (tmp_path / "d.jsonl").write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(7)))
    load(server.url, tmp_path / "o", "--dataset", str(tmp_path / "d.jsonl"), "--levels", "2")
    asked = [request["prompt"] for request in server.requests]
    assert set(asked) == {f"question {i}" for i in range(7)}
    keys = [request["extra_key"] for request in server.requests]
    assert len(set(keys)) == len(keys)
    workload = json.loads((tmp_path / "o" / "summary.json").read_text())["workload"]
    assert (workload["prompts"], workload["salt"]) == ("7 entries of d.jsonl", "key")


def test_a_shared_beginning_is_put_into_the_cache_before_the_level(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, cached=5))
    load(server.url, tmp_path / "o", "--cached-share", "0.5", "--levels", "1", "--warmup-requests", "0")
    first, second = str(server.requests[0]["prompt"]), str(server.requests[1]["prompt"])
    shared = first[: next(i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b)]
    assert 9 <= len(shared.split()) <= 11
    assert len(server.requests) == len(rows(tmp_path / "o", "0001")) + 1  # the primer is no result
    assert level_of(tmp_path / "o")["notices"] == []  # the server says 5 of 11


def test_natural_lengths_are_whatever_the_model_wants(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    load(server.url, tmp_path / "o", "--stop-at-eos", "--output-tokens", "500")
    assert level_of(tmp_path / "o")["requests"]["errors"] == {}
    assert server.requests[-1]["ignore_eos"] is False


def test_goodput_per_gpu_and_a_failure_within_the_budget(serve: Serve, tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, fault="http_500", faulty=frozenset({3}), info={"tp_size": 2, "pp_size": 1}))
    words = ["--levels", "3", "--slo", "e2e_ms=60000", "--slo", "ttft_ms=0.001", "--failures-allowed", "0.2"]
    load(server.url, tmp_path / "o", *words)
    level = level_of(tmp_path / "o")
    assert level["goodput"] == {"slo": {"e2e_ms": 60000, "ttft_ms": 0.001}, "requests_s": 0.0, "share": 0.0}
    assert level["requests"]["errors"] == {"http_500": 1}
    assert not [reason for reason in level["invalid_reasons"] if "failed" in reason]
    assert "1 requests failed: http_500 1" in level["notices"]
    # Both are rounded to six digits.
    assert level["output_tok_s_per_gpu"] == pytest.approx(level["output_tok_s"] / 2, rel=1e-5)


def test_a_server_that_is_not_well_is_not_measured(
    serve: Serve, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Script(tokens=TOKENS, health_status=503))
    assert load(server.url, tmp_path / "o") == 4
    assert "/health says HTTP 503" in capsys.readouterr().out
    assert not server.requests


def test_over_tls_the_result_says_how(tmp_path: Path, certificate: Any) -> None:  # noqa: F811
    ca_file, context = certificate
    server = KnownTruthServer(Script(tokens=TOKENS), context)
    load(server.url, tmp_path / "o", "--levels", "2", "--ca-file", str(ca_file))
    found = json.loads((tmp_path / "o" / "summary.json").read_text())
    assert found["client"]["way"] == "TLS"
    assert found["client"]["clock"] == "CLOCK_MONOTONIC at each read"
    level = found["levels"][0]
    assert level["requests"]["failed"] == 0
    assert level["ttft_ms"]["mean"] >= 30
    assert level["self"]["connections"] == 2
    server.close()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--arrivals", "poisson"], "--arrivals poisson needs --rates"),
        (["--rates", "3"], "--rates is for an open loop"),
        (["--arrivals", "poisson", "--rates", "3", "--levels", "2"], "--levels is for a closed loop"),
        (["--arrivals", "poisson", "--rates", "3,3"], "names a rate twice"),
        (["--arrivals", "constant", "--rates", "3", "--after-window", "cancel"], "--after-window cancel"),
        (["--arrivals", "ramp", "--rates", "0.5"], "a ramp from 0 to 0.5"),
        (["--arrivals", "trace"], "needs --dataset"),
        (["--dataset", "/nonexistent"], "/nonexistent cannot be read"),
        (["--tokenizer", "/nonexistent"], "there is no /nonexistent"),
        (["--proxy", "http://me:secret@10.0.0.1:3128"], "belong in SERVELAB_PROXY"),
        (["--proxy", "socks5://10.0.0.1"], "the proxy is not an address like"),
        (["--ca-file", "x"], "--ca-file is for https"),
        (["--url", "https://127.0.0.1:1", "--ca-file", "/nonexistent"], "--ca-file /nonexistent"),
        (["--slo", "ttft=1"], "ttft_ms, ttfa_ms, tpot_ms, e2e_ms"),
        (["--cached-share", "1"], "not a share"),
        (["--token-range", "9:3"], "LO below HI"),
    ],
)
def test_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    try:
        status = load("http://127.0.0.1:1", tmp_path / "out", *words)
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    error = capsys.readouterr().err
    assert said in error
    assert "secret" not in error
    assert not (tmp_path / "out").exists()


def test_all_that_is_wrong_is_said_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--arrivals", "burst", "--levels", "2", "--dataset", "/nonexistent", "--api-key-file", "/nonexistent"]
    assert load("ftp://x", tmp_path / "out", *words) == 2
    assert len(capsys.readouterr().err.splitlines()) == 5
