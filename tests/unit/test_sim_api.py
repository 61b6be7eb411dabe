"""What the server does beyond plain completions: /generate, aborts, queues, thoughts, log probabilities, drafts."""

from __future__ import annotations

import json
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sim_process import Sim, release

EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3")


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    flags = (
        "--enable-metrics",
        "--enable-cache-report",
        "--reasoning-parser",
        "kimi_k2",
        "--max-running-requests",
        "2",
    )
    with Sim(tmp_path_factory.mktemp("sim"), *flags, "--max-running-requests", "2") as running:
        yield running.wait_ready()


@pytest.fixture
def idle(sim: Sim) -> Sim:
    assert sim.ask("POST", "/flush_cache?timeout=600")[0] == 200
    return sim


def events(sim: Sim, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    status, content = sim.ask("POST", path, {**body, "stream": True})
    assert status == 200
    assert content.endswith(b"data: [DONE]\n\n")
    return [json.loads(line) for line in re.findall(rb"data: (\{.*\})", content)]


def eventually(true: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


def metric(sim: Sim, name: str) -> float:
    text = sim.ask("GET", "/metrics")[1].decode()
    values = re.findall(rf"^sglang:{name}(?:\{{.*\}})? (\S+)$", text, re.MULTILINE)
    return float(values[0]) if values else 0.0


# /generate


def test_generate_tells_in_meta_info_what_happened(idle: Sim) -> None:
    body = {"text": "one two three four", "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}}
    first = idle.document("POST", "/generate", body)
    assert [f" w{token}" for token in first["output_ids"]] == re.findall(r" w\d+", first["text"])
    assert len(first["output_ids"]) == 5
    meta = first["meta_info"]
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"]) == (4, 5, 0)
    assert meta["finish_reason"] == {"type": "length", "length": 5}
    assert "spec_verify_ct" not in meta
    assert 0 < meta["e2e_latency"] < 5
    # The same prompt again: all but its last token is known.
    again = idle.document("POST", "/generate", body)["meta_info"]
    assert (again["cached_tokens"], again["cached_tokens_details"]) == (3, {"device": 3, "host": 0})


def test_generate_streams_the_text_so_far(idle: Sim) -> None:
    shown = events(idle, "/generate", {"text": "x y", "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}})
    assert [event["meta_info"]["completion_tokens"] for event in shown] == [1, 2, 3, 4]
    assert all(later["text"].startswith(former["text"]) for former, later in pairwise(shown))
    assert [event["meta_info"]["finish_reason"] for event in shown[:-1]] == [None] * 3


def test_generate_takes_ids_and_lists(idle: Sim) -> None:
    one = idle.document("POST", "/generate", {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 2}})
    assert one["meta_info"]["prompt_tokens"] == 2
    many = idle.document("POST", "/generate", {"text": ["w5 w6", "a"], "sampling_params": {"max_new_tokens": 2}})
    assert [each["meta_info"]["prompt_tokens"] for each in many] == [2, 1]
    assert many[0]["text"] == one["text"]


@pytest.mark.parametrize(
    ("version", "keys"),
    [
        (
            "0.5.10",
            "spec_accept_rate spec_accept_length spec_accept_token_num spec_draft_token_num spec_verify_ct "
            "spec_accept_histogram",
        ),
        (
            "0.5.23",
            "spec_accept_rate spec_accept_length spec_num_correct_drafts spec_num_proposed_drafts spec_verify_ct "
            "spec_accepted_drafts spec_proposed_drafts spec_correct_drafts_histogram spec_accept_histogram",
        ),
    ],
)
def test_speculation_is_told_per_request_as_the_release_tells_it(tmp_path: Path, version: str, keys: str) -> None:
    with Sim(tmp_path, *EAGLE3, sglang_package=release(version, tmp_path)) as eagle:
        eagle.wait_ready()
        body = {"text": "x", "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        meta = eagle.document("POST", "/generate", body)["meta_info"]
        assert [key for key in meta if key.startswith("spec_")] == keys.split()
        assert meta["spec_accept_length"] == pytest.approx(2.1, abs=0.05)
        assert sum(meta["spec_accept_histogram"]) == meta["spec_verify_ct"]
        # /ready came with 0.5.20, spec_tokens_details with 0.5.19.
        assert eagle.ask("GET", "/ready")[0] == (200 if version == "0.5.23" else 404)
        asked = {"prompt": "x", "max_tokens": 9, "ignore_eos": True, "return_spec_tokens_details": True}
        assert ("sglext" in eagle.document("POST", "/v1/completions", asked)) == (version == "0.5.23")


# Log probabilities


def test_log_probabilities_are_the_same_in_every_run_and_on_every_way(idle: Sim) -> None:
    asked = {"text": "p q", "sampling_params": {"max_new_tokens": 3, "ignore_eos": True}, "return_logprob": True}
    ways = [idle.document("POST", "/generate", asked)["meta_info"]["output_token_logprobs"] for _ in range(2)]
    assert ways[0] == ways[1]
    assert all(-0.05 <= logprob <= -0.02 for logprob, _, _ in ways[0])
    body = {"prompt": "p q", "max_tokens": 3, "ignore_eos": True, "logprobs": 2}
    choice = idle.document("POST", "/v1/completions", body)["choices"][0]["logprobs"]
    assert choice["token_logprobs"] == [logprob for logprob, _, _ in ways[0]]
    assert choice["tokens"] == [f" w{token}" for _, token, _ in ways[0]]
    assert [len(top) for top in choice["top_logprobs"]] == [2, 2, 2]
    streamed = [event["choices"][0]["logprobs"] for event in events(idle, "/v1/completions", body)]
    assert [one["token_logprobs"][0] for one in streamed] == choice["token_logprobs"]


def test_the_prompts_log_probabilities_begin_with_none(idle: Sim) -> None:
    asked = {"text": "w1 w2 w3", "sampling_params": {"max_new_tokens": 1}, "return_logprob": True}
    meta = idle.document("POST", "/generate", {**asked, "logprob_start_len": 0})["meta_info"]
    assert [token for _, token, _ in meta["input_token_logprobs"]] == [1, 2, 3]
    assert meta["input_token_logprobs"][0][0] is None
    assert meta["input_token_logprobs"][1][0] < 0


def test_chat_log_probabilities_have_bytes_and_alternatives(idle: Sim) -> None:
    messages = [{"role": "user", "content": "hello"}]
    asked = {"messages": messages, "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    content = idle.document("POST", "/v1/chat/completions", asked)["choices"][0]["logprobs"]["content"]
    assert len(content) == 2
    assert bytes(content[0]["bytes"]).decode() == content[0]["token"]
    chances = [top["logprob"] for top in content[0]["top_logprobs"]]
    assert len(chances) == 3 and chances == sorted(chances, reverse=True)


# Thoughts


def test_thoughts_come_in_their_own_channel_and_are_counted(idle: Sim) -> None:
    asked = {"messages": [{"role": "user", "content": "What is the capital of France ?"}]}
    answer = idle.document("POST", "/v1/chat/completions", asked)
    message, usage = answer["choices"][0]["message"], answer["usage"]
    assert message["content"] == " Paris"
    thoughts = message["reasoning_content"].split()
    # The thoughts and their end; then the answer and the end of the sequence.
    assert usage["reasoning_tokens"] == len(thoughts) + 1
    assert usage["completion_tokens"] == len(thoughts) + 3
    shown = events(idle, "/v1/chat/completions", {**asked, "stream_options": {"include_usage": True}})
    deltas = [event["choices"][0]["delta"] for event in shown if event["choices"]]
    assert "".join(delta.get("reasoning_content") or "" for delta in deltas) == message["reasoning_content"]
    assert "".join(delta.get("content") or "" for delta in deltas) == " Paris"
    assert not any(delta.get("reasoning_content") and delta.get("content") for delta in deltas)
    assert shown[-1]["usage"]["reasoning_tokens"] == usage["reasoning_tokens"]


def test_thinking_can_be_switched_off_or_left_in_the_text(idle: Sim) -> None:
    asked: dict[str, Any] = {"messages": [{"role": "user", "content": "What is the capital of France ?"}]}
    plain = idle.document("POST", "/v1/chat/completions", {**asked, "chat_template_kwargs": {"thinking": False}})
    assert plain["choices"][0]["message"]["content"] == " Paris"
    assert plain["choices"][0]["message"]["reasoning_content"] is None
    mixed = idle.document("POST", "/v1/chat/completions", {**asked, "separate_reasoning": False})
    assert mixed["choices"][0]["message"]["content"].endswith(" </think> Paris")


# Cached tokens, queues, aborts


def test_cached_tokens_are_reported_and_flushed(idle: Sim) -> None:
    body = {"prompt": "a b c d e f g h", "max_tokens": 1}
    details = [idle.document("POST", "/v1/completions", body)["usage"]["prompt_tokens_details"] for _ in range(2)]
    assert details == [None, {"cached_tokens": 7}]
    assert idle.ask("POST", "/flush_cache")[0] == 200
    assert idle.document("POST", "/v1/completions", body)["usage"]["prompt_tokens_details"] is None


def background(sim: Sim, body: dict[str, Any]) -> tuple[threading.Thread, list[bytes]]:
    """Send a completion from another thread; its answer's body is the list's only item once the thread has ended."""
    answers: list[bytes] = []
    thread = threading.Thread(target=lambda: answers.append(sim.ask("POST", "/v1/completions", body)[1]))
    thread.start()
    return thread, answers


def test_above_max_running_requests_a_request_waits_until_it_is_aborted(idle: Sim) -> None:
    body = {"prompt": "x", "max_tokens": 30000, "ignore_eos": True, "stream_options": {"include_usage": True}}
    running = [background(idle, {**body, "stream": True, "rid": f"r{n}"}) for n in range(2)]
    eventually(lambda: metric(idle, "num_running_reqs") == 2)
    waiting = background(idle, {**body, "rid": "late"})
    eventually(lambda: metric(idle, "num_queue_reqs") == 1)
    loads = idle.document("GET", "/v1/loads")["loads"][0]
    assert (loads["num_running_reqs"], loads["num_waiting_reqs"]) == (2, 1)
    before = metric(idle, "num_aborted_requests_total")
    # An unknown id and an empty one end nothing.
    assert idle.ask("POST", "/abort_request", {"rid": "nobody"}) == (200, b"")
    assert idle.ask("POST", "/abort_request", {"rid": ""}) == (200, b"")
    assert metric(idle, "num_running_reqs") == 2
    idle.ask("POST", "/abort_request", {"rid": "late"})
    waiting[0].join(10)
    late = json.loads(waiting[1][0])
    assert (late["choices"][0]["text"], late["choices"][0]["finish_reason"]) == ("", "abort")
    idle.ask("POST", "/abort_request", {"abort_all": True})
    for thread, answer in running:
        thread.join(10)
        last, usage = [json.loads(line) for line in re.findall(rb"data: (\{.*\})", answer[0])][-2:]
        assert last["choices"][0]["finish_reason"] == "abort"
        assert usage["usage"]["completion_tokens"] == answer[0].count(b'"text":" ')
        assert answer[0].endswith(b"data: [DONE]\n\n")
    assert metric(idle, "num_aborted_requests_total") == before + 3


def test_a_request_whose_client_has_gone_runs_on_for_two_seconds(tmp_path: Path) -> None:
    with Sim(tmp_path, "--enable-metrics", time_scale=4).wait_ready() as slow:
        body = b'{"prompt":"x","max_tokens":30000,"ignore_eos":true,"stream":true}'
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        with socket.create_connection(("127.0.0.1", slow.port)) as client:
            client.sendall(head + b"content-length: %d\r\n\r\n" % len(body) + body)
            assert client.recv(10)
        gone = time.monotonic()
        assert metric(slow, "num_running_reqs") == 1
        eventually(lambda: metric(slow, "num_running_reqs") == 0, seconds=5)
        # Two simulated seconds are half a wall second.
        assert 0.45 < time.monotonic() - gone < 1.5


def test_flush_gives_up_after_its_timeout(idle: Sim) -> None:
    thread, _ = background(idle, {"prompt": "x", "max_tokens": 20000, "ignore_eos": True, "rid": "long"})
    eventually(lambda: metric(idle, "num_running_reqs") == 1)
    assert idle.ask("POST", "/flush_cache?timeout=5") == (400, b"Timed out waiting for idle state.")
    idle.ask("POST", "/abort_request", {"rid": "long"})
    thread.join(10)


def test_without_its_flag_there_are_no_metrics(tmp_path: Path) -> None:
    with Sim(tmp_path).wait_ready() as plain:
        assert plain.ask("GET", "/metrics") == (404, b'{"detail":"Not Found"}')


def test_the_average_acceptance_is_reset_by_set_internal_state(tmp_path: Path) -> None:
    with Sim(tmp_path, *EAGLE3, "--decode-log-interval", "5").wait_ready() as eagle:
        eagle.document("POST", "/v1/completions", {"prompt": "x", "max_tokens": 100, "ignore_eos": True})
        assert "avg_spec_accept_length" in eagle.document("GET", "/server_info")["internal_states"][0]
        asked = {"server_args": {"speculative_accept_threshold_single": 1.0}}
        assert eagle.document("POST", "/set_internal_state", asked) == [True]
        assert "avg_spec_accept_length" not in eagle.document("GET", "/server_info")["internal_states"][0]


# Drafts


def test_n_grams_send_one_to_eight_tokens_at_a_time(tmp_path: Path) -> None:
    flags = ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8")
    with Sim(tmp_path, *flags).wait_ready() as ngram:
        log = ngram.log()
        assert "Max running requests is reset to 48 for speculative decoding." in log
        assert "LlamaForCausalLMEagle3" not in log
        shown = events(ngram, "/v1/completions", {"prompt": "x", "max_tokens": 800, "ignore_eos": True})
        counts = [event["choices"][0]["text"].count(" ") for event in shown]
        assert counts[0] == 1
        assert set(counts) == set(range(1, 9))
        assert sum(counts) == 800


def test_adaptive_drafts_follow_the_batch_and_the_log_says_so(tmp_path: Path) -> None:
    config = tmp_path / "adaptive.json"
    config.write_text('{"1": {"candidate_steps": [2]}, "2": {"candidate_steps": [0]}}')
    flags = (*EAGLE3, "--speculative-adaptive", "--speculative-adaptive-config", str(config))
    with Sim(tmp_path, *flags, "--decode-log-interval", "5").wait_ready() as adaptive:
        assert "AdaptiveSpeculativeParams initialized: steps=2, candidate_steps=[2]" in adaptive.log()
        both = [
            background(adaptive, {"prompt": "x", "max_tokens": length, "ignore_eos": True}) for length in (300, 600)
        ]
        for thread, _ in both:
            thread.join(20)
        log = adaptive.log()
        down = log.index("Switch adaptive runtime state: steps 2 -> 0, draft_tokens 3 -> 1")
        assert log.index("Switch adaptive runtime state: steps 0 -> 2, draft_tokens 1 -> 3") > down
        assert re.search(r"accept len: 1\.00, accept rate: 0\.00, cuda graph: True", log)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ('{"1": {"candidate_steps": [1, 3]}}', "ValueError: --speculative-num-steps=2 is not in the adaptive config"),
        ("{}", "ValueError: speculative_adaptive_config must contain at least one integer-string BS key"),
        (None, "FileNotFoundError: [Errno 2] No such file or directory: "),
    ],
)
def test_a_wrong_adaptive_configuration_ends_the_launcher(tmp_path: Path, config: str | None, words: str) -> None:
    path = tmp_path / "adaptive.json"
    if config is not None:
        path.write_text(config)
    with Sim(tmp_path, *EAGLE3, "--speculative-adaptive", "--speculative-adaptive-config", str(path)) as sim:
        assert sim.process.wait(10) == 1
        assert words in sim.log().splitlines()[-1]
        assert "Traceback (most recent call last):" in sim.log()
