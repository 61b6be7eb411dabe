"""The simulated server as a process: start, answers, children and ends, against what a real SGLang was seen to do."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from sglang_wheels import unpack
from sim_process import Sim

from servelab_lab.server.text import continuation

REAL = Path(__file__).parent / "cases" / "http-real"
EAGLE3 = ("--speculative-algorithm", "EAGLE3", "--speculative-num-steps", "2", "--speculative-num-draft-tokens", "3")


def real(name: str) -> bytes:
    return (REAL / f"{name}.raw").read_bytes().split(b"\r\n\r\n", 1)[1]


def eventually(true: Callable[[], bool], seconds: float = 10) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.02)


@pytest.fixture(scope="module")
def sim(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    flags = ("--served-model-name", "synth-llama", "--tp-size", "2", "--context-length", "8192")
    with Sim(tmp_path_factory.mktemp("sim"), *flags, answers={"sky": "deep blue"}) as running:
        yield running.wait_ready()


@pytest.fixture(scope="module")
def eagle(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sim]:
    with Sim(tmp_path_factory.mktemp("eagle"), *EAGLE3, "--decode-log-interval", "5") as running:
        yield running.wait_ready()


def stream(sim: Sim, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the events of a stream that must end with [DONE]."""
    status, content = sim.ask("POST", path, {**body, "stream": True})
    assert status == 200
    assert content.endswith(b"data: [DONE]\n\n")
    return [json.loads(line) for line in re.findall(rb"data: (\{.*\})", content)]


# Start


def test_the_log_says_simulated_first_and_then_what_sglang_says_in_its_order(sim: Sim) -> None:
    lines = sim.log().splitlines()
    stamp = r"\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d"
    assert re.match(stamp + r"\] simulated: profile=story, time_scale=50\.", lines[0])
    expected = [
        r"\] server_args=\{'model_path': '/m', ",
        r" TP1\] Init parallel begin\.$",
        r" TP0\] Init parallel ends\. elapsed=0\.05 s$",
        # 97887 MiB - 0.59 GiB; 41.83 GiB of weights; at 0.88 of 95.00 there remain 41.77 for 68.625 KiB a token.
        r" TP0\] Load weight begin\. avail mem=95\.00 GB$",
        r" TP1\] Load weight end\. elapsed=0\.35 s, type=KimiK25.*, avail mem=53\.17 GB, mem usage=41\.83 GB\.$",
        r" TP0\] KV Cache is allocated\. dtype: torch\.bfloat16, #tokens: 6382\d\d, KV size: 41\.77 GB$",
        r" TP0\] Memory pool end\. avail mem=11\.40 GB$",
        r" TP0\] Capture target decode CUDA graph begin\. backend=full, num_tokens_per_req=1, avail mem=11\.40 GB$",
        r" TP0\] Capture target decode CUDA graph end\. bs=\[1, 2, 4, .*, mem usage=1\.40 GB, avail mem=10\.00 GB\.$",
        r" TP0\] max_total_num_tokens=6382\d\d, chunked_prefill_size=8192, max_prefill_tokens=16384, "
        r"max_running_requests=4096, context_len=8192, available_gpu_mem=10\.00 GB$",
        r"\] INFO:     Application startup complete\.$",
        rf"\] INFO:     Uvicorn running on http://127\.0\.0\.1:{sim.port} \(Press CTRL\+C to quit\)$",
        r" TP0\] Prefill batch, #new-seq: 1, #new-token: 6, #cached-token: 0, token usage: 0\.00, ",
        r"\] The server is fired up and ready to roll!$",
    ]
    at = 0
    for pattern in expected:
        found = [n for n in range(at, len(lines)) if re.search(f"^{stamp}{pattern}", lines[n].rpartition("\r")[2])]
        assert found, f"{pattern} does not come after line {at}"
        at = found[0]


def test_progress_bars_are_redrawn_in_place(sim: Sim) -> None:
    log = sim.log()
    assert "\rMulti-thread loading shards:   0% Completed | 0/64 [00:00<?, ?it/s]\r" in log
    assert "\rMulti-thread loading shards: 100% Completed | 64/64 [00:00<00:00, " in log
    assert re.search(
        r"\rCapturing batches \(bs=256 avail_mem=11\.40 GB\):   0%\|          \| 0/36 \[00:00<\?, \?it/s\]", log
    )


def test_tcp_answers_before_the_server_is_ready(tmp_path: Path) -> None:
    with Sim(tmp_path, time_scale=2) as sim:
        eventually(lambda: "Uvicorn running" in sim.log())
        assert sim.ask("GET", "/health") == (503, b"")
        assert sim.ask("GET", "/ready") == (503, b"")
        assert sim.ask("GET", "/v1/models")[0] == 200
        sim.wait_ready()
        assert sim.ask("GET", "/ready") == (200, b"")


def test_a_usage_error_is_argparses_and_ends_with_2(tmp_path: Path) -> None:
    with Sim(tmp_path, "--cuda-graph-max-bs", "128") as sim:
        assert sim.process.wait(10) == 2
        lines = sim.log().splitlines()
        assert any(line.startswith("usage: sglang serve [-h] --model-path MODEL_PATH") for line in lines)
        assert lines[-1] == (
            "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match "
            "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill"
        )


@pytest.mark.parametrize(
    ("config", "sentence"),
    [
        ({"profile": "x"}, "profile 'x' is unknown; known are crossing, story."),
        ({"time_scale": 0}, "time_scale must be a number of at least 0.01, not 0."),
        ({"survivor": True}, "'survivor' is unknown; known are sglang_package, profile, "),
        ({"sglang_package": "/nowhere/*"}, "sglang_package '/nowhere/*' matches 0 directories"),
    ],
)
def test_a_bad_configuration_of_the_double_is_one_sentence(
    tmp_path: Path, config: dict[str, Any], sentence: str
) -> None:
    with Sim(tmp_path, **config) as sim:
        assert sim.process.wait(10) == 1
        assert sentence in sim.log()
        assert "Traceback" not in sim.log()


def test_what_the_model_does_not_know_is_refused(tmp_path: Path) -> None:
    with Sim(tmp_path, "--speculative-algorithm", "STANDALONE") as sim:
        assert sim.process.wait(10) == 1
        assert "has no cost model for --speculative-algorithm STANDALONE" in sim.log()


def test_a_port_in_use_is_noticed_late_and_greeted_all_the_same(sim: Sim, tmp_path: Path) -> None:
    with Sim(tmp_path, port=sim.port) as second:
        assert second.process.wait(20) == 3
        log = second.log()
        assert "KV Cache is allocated" in log
        assert f"ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', {sim.port})" in log
        assert log.index("address already in use") < log.index("The server is fired up and ready to roll!")


# Answers


@pytest.mark.parametrize(
    ("name", "method", "path"),
    [
        ("err_404", "GET", "/nothing"),
        ("err_405", "GET", "/v1/completions"),
        ("err_models_404", "GET", "/v1/models/none"),
        ("flush_idle_post", "POST", "/flush_cache"),
    ],
)
def test_plain_answers_are_a_real_servers(sim: Sim, name: str, method: str, path: str) -> None:
    with socket.create_connection(("127.0.0.1", sim.port)) as connection:
        connection.sendall(f"{method} {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".encode())
        ours = b"".join(iter(lambda: connection.recv(65536), b""))
    undated = re.compile(rb"date: .*?\r\n")
    assert undated.sub(b"", ours) == undated.sub(b"", (REAL / f"{name}.raw").read_bytes())


def test_models_list(sim: Sim) -> None:
    undated = re.compile(rb'"created":\d+')
    assert undated.sub(b"", sim.ask("GET", "/v1/models")[1]) == undated.sub(b"", real("v1_models"))


def test_server_info_has_the_real_structure_and_says_simulated(sim: Sim) -> None:
    info = sim.document("GET", "/server_info")
    keys = json.loads((REAL / "server_info_keys.json").read_text())
    assert set(keys["after_the_arguments"]) <= set(info)
    state = info["internal_states"][0]
    # Only speculation has an average; the rest is private bookkeeping of the release that was watched.
    private = {key for key in keys["internal_state_only"] if key.startswith(("_", "enable_grpc", "grpc_port"))}
    assert set(keys["internal_state_only"]) - private - {"avg_spec_accept_length"} <= set(state)
    assert "avg_spec_accept_length" not in state
    assert state["memory_usage"].keys() == {"weight", "kvcache", "token_capacity", "graph"}
    assert info["simulated"] == {"profile": "story", "time_scale": 50}
    assert (info["version"], info["tp_size"], info["mem_fraction_static"]) == ("0.5.23", 2, 0.88)


def test_a_completion_is_the_known_text(sim: Sim) -> None:
    body = {"prompt": "one two three", "max_tokens": 7, "ignore_eos": True}
    answer = sim.document("POST", "/v1/completions", body)
    assert answer["choices"][0]["text"] == continuation("one two three", 7)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["usage"]["completion_tokens"] == 7
    events = stream(sim, "/v1/completions", body)
    assert "".join(event["choices"][0]["text"] for event in events) == continuation("one two three", 7)


def test_known_questions_are_answered_and_the_answer_ends(sim: Sim) -> None:
    france = sim.document("POST", "/v1/completions", {"prompt": "The capital of France is"})
    assert (france["choices"][0]["text"], france["choices"][0]["finish_reason"]) == (" Paris", "stop")
    sky = {"messages": [{"role": "user", "content": "Colour of the sky?"}]}
    answer = sim.document("POST", "/v1/chat/completions", sky)
    assert answer["choices"][0]["message"]["content"] == " deep blue"
    assert answer["choices"][0]["matched_stop"] == 2


def test_stop_strings_end_the_text_before_them(sim: Sim) -> None:
    words = continuation("stop here", 9).split()
    body = {"prompt": "stop here", "max_tokens": 50, "ignore_eos": True, "stop": [words[8], words[4]]}
    choice = sim.document("POST", "/v1/completions", body)["choices"][0]
    assert choice["text"] == " " + " ".join(words[:4]) + " "
    assert (choice["finish_reason"], choice["matched_stop"]) == ("stop", words[4])
    events = stream(sim, "/v1/completions", {**body, "stream_options": {"include_usage": True}})
    assert "".join(event["choices"][0]["text"] for event in events[:-1]) == choice["text"]
    assert events[-1]["usage"]["completion_tokens"] == 5


def test_speculation_sends_several_tokens_at_a_time(eagle: Sim) -> None:
    asked = {"prompt": "x", "max_tokens": 64, "ignore_eos": True, "return_spec_tokens_details": True}
    events = stream(eagle, "/v1/completions", {**asked, "stream_options": {"include_usage": True}})
    counts = [event["choices"][0]["text"].count(" ") for event in events if event["choices"]]
    assert counts[0] == 1
    assert set(counts) == {1, 2, 3}
    assert sum(counts) == 64 == events[-1]["usage"]["completion_tokens"]
    details = events[-2]["sglext"]["spec_tokens_details"]
    assert details["spec_verify_ct"] == len(counts) - 1
    assert sum(details["spec_correct_drafts_histogram"]) == len(counts) - 1
    assert re.search(r"accept len: \d\.\d\d, accept rate: 0\.\d\d, cuda graph: False, gen", eagle.log())


def test_flush_resets_the_average_acceptance(eagle: Sim) -> None:
    eagle.document("POST", "/v1/completions", {"prompt": "x", "max_tokens": 100, "ignore_eos": True})
    state = eagle.document("GET", "/server_info")["internal_states"][0]
    assert 1.9 < state["avg_spec_accept_length"] < 2.3
    assert eagle.ask("POST", "/flush_cache")[0] == 200
    assert "avg_spec_accept_length" not in eagle.document("GET", "/server_info")["internal_states"][0]


def test_flush_while_busy_is_refused_or_waits(tmp_path: Path) -> None:
    with Sim(tmp_path).wait_ready() as sim, socket.create_connection(("127.0.0.1", sim.port)) as busy:
        send_completion(busy, max_tokens=1000)
        eventually(lambda: sim.ask("POST", "/flush_cache") == (400, real("flush_busy_post")))
        assert sim.ask("GET", "/flush_cache?timeout=3000") == (200, real("flush_idle_post"))


def send_completion(connection: socket.socket, max_tokens: int) -> None:
    body = json.dumps({"prompt": "x", "max_tokens": max_tokens, "ignore_eos": True, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    connection.sendall(head % len(body) + body)


def test_keys_are_asked_for(tmp_path: Path) -> None:
    with Sim(tmp_path, "--api-key", "k1", "--admin-api-key", "k2").wait_ready() as sim:
        assert sim.ask("GET", "/v1/models") == (401, b'{"error":"Unauthorized"}')
        assert sim.ask("GET", "/v1/models", headers={"Authorization": "Bearer k2"})[0] == 401
        assert sim.ask("GET", "/v1/models", headers={"Authorization": "Bearer k1"})[0] == 200
        assert sim.ask("POST", "/flush_cache", headers={"Authorization": "Bearer k1"})[0] == 401
        assert sim.ask("POST", "/flush_cache", headers={"Authorization": "Bearer k2"})[0] == 200


# HTTP


def test_one_connection_serves_many_requests_even_pipelined(sim: Sim) -> None:
    with socket.create_connection(("127.0.0.1", sim.port)) as connection:
        connection.sendall(b"GET /ping HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
            b'transfer-encoding: chunked\r\n\r\n7\r\n{"promp\r\n12\r\nt":"a","max_tokens\r\n4\r\n":1}\r\n0\r\n\r\n'
            b"GET /ping HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n"
        )
        answers = b"".join(iter(lambda: connection.recv(65536), b""))
    assert re.findall(rb"HTTP/1\.1 (\d+)", answers) == [b"200"] * 4
    assert b'"completion_tokens":1' in answers
    # Only the last answer announces the end.
    assert answers.count(b"Connection: close") == 1


def test_what_is_not_http_is_refused(sim: Sim) -> None:
    with socket.create_connection(("127.0.0.1", sim.port)) as connection:
        connection.sendall(b"hello\r\n\r\n")
        assert connection.recv(65536).startswith(b"HTTP/1.1 400 Bad Request\r\n")


def test_access_log_is_on_stdout(sim: Sim) -> None:
    sim.ask("GET", "/v1/models?x=1")
    line = r'\[\d{4}-\d\d-\d\d \d\d:\d\d:\d\d\] INFO:     127\.0\.0\.1:\d+ - "GET /v1/models\?x=1 HTTP/1\.1" 200 OK\n'
    assert re.search(line, sim.out.read_text())
    assert "/v1/models" not in sim.log()


def test_a_client_that_goes_away_does_not_hold_its_slot_for_ever(sim: Sim) -> None:
    with socket.create_connection(("127.0.0.1", sim.port)) as connection:
        send_completion(connection, max_tokens=8000)
        assert connection.recv(10)
    # 8000 tokens take 89 simulated seconds; an abandoned request runs for two more: 0.04 s here.
    eventually(lambda: sim.ask("POST", "/flush_cache")[0] == 200, seconds=1)


# Children and ends


def test_children_look_like_sglangs(sim: Sim) -> None:
    children = sim.children()
    assert sorted(children.values()) == ["sglang::detokenizer", "sglang::scheduler_TP0", "sglang::scheduler_TP1"]
    comms = {Path(f"/proc/{pid}/comm").read_text().strip() for pid in children}
    assert comms == {"sglang::schedul", "sglang::detoken"}


def test_sigterm_lets_streams_finish_and_ends_by_sigkill(tmp_path: Path) -> None:
    with Sim(tmp_path, time_scale=20).wait_ready() as sim, socket.create_connection(("127.0.0.1", sim.port)) as busy:
        send_completion(busy, max_tokens=900)
        got = busy.recv(100)
        sim.process.terminate()
        while not got.endswith(b"0\r\n\r\n"):
            more = busy.recv(65536)
            assert more, "the stream was cut"
            got = (got + more)[-2000:]
        assert b'"finish_reason":"length"' in got
        assert sim.process.wait(10) == -signal.SIGKILL
        assert sim.children() == {}
        log = sim.log()
        assert "SIGTERM received. signum=None frame=None. Draining requests and shutting down..." in log
        assert "Gracefully exiting... Remaining number of requests 1." in log
        assert "Gracefully exiting... Remaining number of requests 0." in log


def test_sigint_ends_with_0(tmp_path: Path) -> None:
    with Sim(tmp_path).wait_ready() as sim:
        sim.process.send_signal(signal.SIGINT)
        assert sim.process.wait(10) == 0
        assert sim.children() == {}


def test_schedulers_die_with_a_killed_launcher(tmp_path: Path) -> None:
    with Sim(tmp_path).wait_ready() as sim:
        assert len(sim.children()) == 2
        sim.process.kill()
        sim.process.wait()
        eventually(lambda: sim.children() == {}, seconds=2)


def test_survivors_do_not(tmp_path: Path) -> None:
    with Sim(tmp_path, survivors=True).wait_ready() as sim:
        sim.process.kill()
        sim.process.wait()
        eventually(lambda: list(sim.children().values()) == ["sglang::scheduler_TP0"], seconds=2)
        (survivor,) = sim.children()
        os.kill(survivor, signal.SIGTERM)
        time.sleep(0.2)
        assert survivor in sim.children()
        os.kill(survivor, signal.SIGKILL)
        eventually(lambda: sim.children() == {}, seconds=2)


def test_a_killed_scheduler_takes_the_server_and_its_streams_down(tmp_path: Path) -> None:
    with Sim(tmp_path).wait_ready() as sim, socket.create_connection(("127.0.0.1", sim.port)) as busy:
        send_completion(busy, max_tokens=20000)
        scheduler = next(pid for pid, title in sim.children().items() if title == "sglang::scheduler_TP0")
        os.kill(scheduler, signal.SIGKILL)
        got = b""
        try:
            while more := busy.recv(65536):
                got = (got + more)[-100:]
        except ConnectionResetError:
            pass
        assert not got.endswith(b"0\r\n\r\n")
        assert b"[DONE]" not in got
        assert sim.process.wait(10) == -signal.SIGKILL
        log = sim.log()
        order = [
            "SIGQUIT received. signum=None, frame=None. It usually means one child failed.",
            "Sleeping 5 seconds before crash diagnostics to let GPU activity settle.",
            "No live scheduler processes found; skipping py-spy and CUDA coredump.",
            f"kill_process_tree called: parent_pid={sim.process.pid}, include_parent=True, pid={sim.process.pid}",
        ]
        assert [log.index(line) for line in order] == sorted(log.index(line) for line in order)


def test_the_real_0_5_23_starts_with_the_modes_flags_and_refuses_the_old_ones(tmp_path: Path) -> None:
    package = str(unpack("0.5.23", tmp_path))
    flags = ("--tp", "2", "--trust-remote-code", "--cuda-graph-max-bs-decode", "128", *EAGLE3)
    with Sim(tmp_path, *flags, sglang_package=package).wait_ready() as sim:
        info = sim.document("GET", "/server_info")
        assert (info["tp_size"], info["trust_remote_code"], info["max_running_requests"]) == (2, True, 48)
        assert info["cuda_graph_config"]["decode"]["max_bs"] == 128
        # All but a few of the arguments that 0.5.15 had are still there.
        names = set(json.loads((REAL / "server_info_keys.json").read_text())["some_arguments"])
        assert names <= set(info)
    with Sim(tmp_path, "--cuda-graph-max-bs", "128", sglang_package=package) as sim:
        assert sim.process.wait(20) == 2
        assert sim.log().splitlines()[-1] == (
            "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match "
            "--cuda-graph-max-bs-decode, --cuda-graph-max-bs-prefill"
        )
