"""Ready means it answered, and the last state wins. Logs: real ones of sglang 0.5.15, and the invented cases."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from servelab.shared.readiness import Answer, Look, judge
from servelab.shared.readiness_diagnosis import Exit, diagnose
from servelab.shared.readiness_log import decode_batches, kv_pools, records, start_progress, warnings

CASES = Path(__file__).parent / "cases"
REAL = CASES / "sglang-real"


def log(name: str) -> str:
    with (REAL / f"{name}.log").open(encoding="utf-8", newline="") as handle:
        return handle.read()


def completion(tokens: int, prompt: int = 9, text: str = " w1 w2", model: str = "synth-llama") -> Answer:
    return Answer(
        200,
        {
            "model": model,
            "choices": [{"text": text, "finish_reason": "length"}],
            "usage": {"prompt_tokens": prompt, "completion_tokens": tokens},
        },
    )


def serving() -> Look:
    """A server on which every rung holds."""
    return Look(
        active="active", log=log("eagle3_start"), elapsed=61.2, port=30000, owner="ours", health=Answer(200, ""),
        models=["synth-llama"], expected_model="synth-llama", short=completion(8), short_tokens=8,
        long=completion(4, prompt=2100), long_tokens=1000,
    )  # fmt: skip


# -- the log ------------------------------------------------------------------------------------------------------


def test_case_12_formats_of_all_releases() -> None:
    case = CASES / "12-log-line-formats"
    text = (case / "lines.log").read_text()
    expected = json.loads((case / "expected.json").read_text())
    pools = kv_pools(text)
    assert [pool.tokens for pool in pools] == expected["kv_tokens"]
    assert [pool.gb for pool in pools] == expected["kv_gb"]
    assert [pool.ranks for pool in pools] == expected["ranks"]
    for found, wanted in zip(decode_batches(text), expected["decode"], strict=True):
        assert (found.accept_len, found.tps) == (wanted["accept_len"], wanted["tps"])
        if "cuda_graph" in wanted:
            assert found.cuda_graph is wanted["cuda_graph"]
    joined = [line for line in text.splitlines() if "TP1" in line and "TP2" in line]
    assert [record.ranks for record in records(joined[0])] == ["TP1", "TP2"]
    (warning,) = warnings(start_progress(text))
    assert warning.startswith("1 decode report(s) without a CUDA graph")  # the first of three says False


def test_fields_are_told_apart_in_any_order() -> None:
    line = "[2026-01-01 00:01:04 TP0] Decode batch, block accept len: 2.10, {}cuda graph: True, #queue-req: 0\n"
    (behind,) = decode_batches(line.format("accept len: 2.40, "))
    (alone,) = decode_batches(line.format(""))
    assert (behind.accept_len, alone.accept_len) == (2.4, None)


def test_a_prefill_without_a_graph_is_no_warning() -> None:
    line = "[2026-01-01 00:01:04 TP0] Prefill batch, #new-seq: 1, cuda graph: False\n"
    assert warnings(start_progress(line)) == []


def test_0_5_23_has_no_pool_line() -> None:
    text = "[2026-01-01 00:00:00 TP0] max_total_num_tokens=5000, context_len=4096, available_gpu_mem=3.00 GB\n"
    assert [(pool.tokens, pool.gb) for pool in kv_pools(text)] == [(5000, None)]


@pytest.mark.parametrize(
    "until, phase, detail",
    [
        ("server_args=ServerArgs(", "importing", ""),
        ("TP1] Init torch distributed begin", "joining ranks", ""),
        ("50% Completed | 1/2", "loading weights", "50 % (1 of 2 shards)"),
        ("Memory pool end. avail mem=69", "allocating the KV cache", "2098692 tokens"),
        ("Capture target verify CUDA graph begin", "capturing CUDA graphs", "target verify"),
        ("The server is fired up", "listening", ""),
    ],
)
def test_progress_of_a_real_start(until: str, phase: str, detail: str) -> None:
    text = log("eagle3_start")
    start = start_progress(text[: text.index(until) + len(until)])
    assert (start.phase, start.detail) == (phase, detail)


def test_graph_capture_is_counted_and_access_lines_are_no_news() -> None:
    head = "[2026-01-01 00:00:00 TP0] Capture cuda graph begin. This can take up to several minutes.\n"
    bar = "\rCapturing batches (bs=96 avail_mem=67.20 GB):  10%|█         | 2/20 [00:04<02:47,  4.92s/it]"
    start = start_progress(head + bar)
    assert (start.phase, start.detail) == ("capturing CUDA graphs", "2 of 20")
    probed = (
        head
        + bar
        + '\n[2026-01-01 00:00:09] INFO:     127.0.0.1:4711 - "GET /health HTTP/1.1" 503 Service Unavailable\n'
    )
    assert start_progress(probed).news == start.news


# -- the ladder ---------------------------------------------------------------------------------------------------


def test_ready_when_every_rung_holds() -> None:
    verdict = judge(serving())
    assert (verdict.state, verdict.phase) == ("done", "ready")
    assert "61 s" in verdict.progress


@pytest.mark.parametrize(
    "change, phase",
    [
        ({"owner": None}, "listening"),
        ({"health": None}, "health"),
        ({"health": Answer(503)}, "health"),
        ({"health": Answer(None, None, "no answer within 5 s")}, "health"),
        ({"short": None}, "completion"),
        ({"short": Answer(503, "busy")}, "completion"),
        ({"long": None}, "long prompt"),
        ({"long": Answer(None, None, "timed out")}, "long prompt"),
    ],
)
def test_every_missing_rung_is_work_in_progress(change: dict, phase: str) -> None:
    verdict = judge(replace(serving(), **change))
    assert (verdict.state, verdict.phase) == ("working", phase)
    assert verdict.cause is None


@pytest.mark.parametrize(
    "change, words",
    [
        ({"owner": "pid 77, sshd.service"}, "held by another process (pid 77, sshd.service)"),
        ({"restarts": 2}, "restarted 2 time(s)"),
        ({"models": ["other"]}, "serves other, not synth-llama"),
        ({"short": completion(8, text="  ")}, "the text is empty"),
        ({"short": completion(3)}, "3 completion tokens where 8 were asked for"),
        ({"short": completion(8, model="other")}, "comes from model other"),
        ({"short": Answer(200, {"error": {"message": "no"}})}, "an error instead of a completion"),
        ({"long": completion(4, prompt=12)}, "12 prompt tokens where at least 1000 were sent"),
        ({"active": "failed", "end": Exit("killed", 9, "signal")}, "somebody killed the server with signal 9"),
    ],
)
def test_every_broken_rung_fails_with_a_cause_and_a_remedy(change: dict, words: str) -> None:
    verdict = judge(replace(serving(), **change))
    assert verdict.state == "failed"
    assert verdict.cause is not None and words in verdict.cause
    assert verdict.remedy


def test_a_start_that_nobody_made_is_told_from_one_that_ended_with_0() -> None:
    gone = Look(port=30000, active="inactive")
    assert judge(gone).cause == "the unit is not running and nobody started it"
    silent = judge(replace(gone, watched=True))
    assert silent.cause == "the server ended by itself with exit status 0, and nobody asked it to"
    # systemd forgets how a unit ended that ended well.
    ended = judge(replace(gone, watched=True, log=log("eagle3_start")))
    assert (ended.state, ended.cause) == ("failed", silent.cause)


RANK_1 = """[2026-01-01 00:00:01] server_args=ServerArgs(model_path='/m', tp_size=4, nnodes=2, node_rank=1)
[2026-01-01 00:00:02 TP2] Init torch distributed begin.
[2026-01-01 00:00:09 TP2] Load weight begin. avail mem=94.00 GB
[2026-01-01 00:02:01] Dummy health check server started in background thread at 127.0.0.1:30000
"""
PEER_GONE = (
    "[2026-01-01 00:02:09 TP2] Scheduler hit an exception: Traceback (most recent call last):\n"
    "RuntimeError: [/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:547] Connection closed by peer [10.0.0.1]:63\n"
    "[2026-01-01 00:02:09] Received sigquit from a child process. It usually means the child failed.\n"
)


def test_a_guest_other_than_the_first_is_up_and_never_done() -> None:
    at_work = judge(Look(port=30000, active="active", rank=1, log=RANK_1[: RANK_1.index("[2026-01-01 00:02")]))
    assert (at_work.state, at_work.progress) == ("working", "loading weights")
    up = judge(Look(port=30000, active="active", rank=1, log=RANK_1, owner="ours"))
    assert (up.state, up.progress) == ("working", "rank 1 is up; waiting for the first guest to answer")
    other = judge(Look(port=30000, active="active", rank=1, log=RANK_1, owner="pid 77, sshd.service"))
    assert other.state == "failed"


def test_what_only_follows_from_another_rank_s_end_says_so() -> None:
    verdict = judge(Look(port=30000, active="failed", rank=1, log=RANK_1 + PEER_GONE, end=Exit("killed", 9, "signal")))
    assert (verdict.state, verdict.peer_lost) == ("failed", True)
    assert verdict.cause == "a rank on another guest is gone (10.0.0.1), and no other goes on without it"
    killed = judge(Look(port=30000, active="failed", rank=1, log=RANK_1, end=Exit("killed", 9, "signal")))
    assert (killed.state, killed.peer_lost) == ("failed", False)
    assert "killed the server with signal 9" in str(killed.cause)


def test_a_dead_log_beats_an_open_port() -> None:
    verdict = judge(replace(serving(), log=log("port_in_use")))
    assert verdict.state == "failed"
    assert verdict.cause == "port 30000 on 127.0.0.1 belongs to another process"


def test_case_10_ready_then_dead() -> None:
    case = CASES / "10-ready-then-dead"
    text = (case / "server.log").read_text()
    expected = json.loads((case / "expected.json").read_text())
    assert expected["state"] == "DEAD"
    verdict = judge(replace(serving(), active="active", log=text))
    assert verdict.state == "failed"
    assert verdict.cause == expected["cause"]
    assert verdict.facts["kv_tokens"] == expected["kv_tokens"]
    assert verdict.warnings == expected["warnings"]
    # Until the exception it was not dead, and the tool's own completion decides.
    before = judge(replace(serving(), log=text[: text.index("Scheduler hit")], short=None))
    assert before.state == "working"
    said = json.dumps(verdict.__dict__)
    assert not [secret for secret in expected["redact"] if secret in said]


def test_the_marker_moves_with_progress_and_only_then() -> None:
    text = log("eagle3_start")
    cuts = [text.index("Load weight begin"), text.index("Load weight begin") + 5, text.index("Memory pool end")]
    marks = [judge(Look(active="active", log=text[:cut])).marker for cut in cuts]
    assert marks[0] != marks[2]
    same = [judge(Look(active="active", log=text[: cuts[2]], elapsed=age)).marker for age in (10.0, 900.0)]
    assert same[0] == same[1]
    assert judge(serving()).marker != judge(replace(serving(), long=None)).marker


# -- the diagnosis ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name, end, cause, remedy",
    [
        ("oom_memfrac_099", Exit("killed", 9, "signal"), "out of GPU memory while CUDA graphs were captured",
         "Lower sglang_server_mem_fraction_static"),
        ("oom_pool_too_small", Exit("killed", 9, "signal"), "no GPU memory is left for the KV cache",
         "Raise sglang_server_mem_fraction_static"),
        ("port_in_use", Exit("exited", 3, "exit-code"), "port 30000 on 127.0.0.1 belongs to another process",
         "sport = :30000"),
        ("bad_model_path", Exit("exited", 1, "exit-code"), "'/nonexistent/model'", "sglang_server_model_path"),
        ("usage_bad_flag", Exit("exited", 2, "exit-code"), "unrecognized arguments: --no-such-flag 1",
         "Correct the mode's args"),
        ("sigkill_scheduler", Exit("killed", 9, "signal"), "a child process of the server died without an error",
         "Look for who did"),
        ("usage_missing_model", Exit("exited", 2, "exit-code"), "required: --model-path/--model",
         "Correct the mode's args"),
    ],
)  # fmt: skip
def test_real_failures_are_named(name: str, end: Exit, cause: str, remedy: str) -> None:
    found = diagnose(log(name), end)
    assert cause in found.cause
    assert remedy in found.remedy
    assert found.evidence


def test_wording_of_older_launchers() -> None:
    text = "launch_server.py: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, --x"
    assert "ambiguous option: --cuda-graph-max-bs" in diagnose(text, Exit("exited", 2)).cause


def test_a_refused_check_before_the_start_is_not_a_server_error() -> None:
    assert "device node" in diagnose("", Exit("exited", 1, "exit-code", started=False)).cause


def test_a_refused_check_names_its_node() -> None:
    end = Exit("exited", 1, "exit-code", started=False, node="/dev/nvidia3")
    assert diagnose("", end).cause.startswith("a check before the start refused: /dev/nvidia3 is missing or is not")
    log = "supervise: /usr/bin/test -c /dev/nvidia9 refused: status 1\n"
    assert "/dev/nvidia9 is missing" in diagnose(log, Exit(started=False)).cause


def test_a_guest_that_gives_no_namespaces_is_not_one_without_device_nodes() -> None:
    """The check before the start fails with it, as it runs in the same namespaces."""
    log = "servelab-baseline.service: Failed at step NAMESPACE spawning /usr/bin/test: Permission denied"
    told = diagnose(log, Exit("exited", 226, "exit-code", started=False, sandboxed=False))
    assert (told.name, told.evidence) == ("sandbox", log)
    assert "feature nesting, or set sglang_server_sandbox to false" in told.remedy


def test_host_memory_is_not_gpu_memory() -> None:
    found = diagnose("[2026-01-01 00:00:00 TP0] Load weight begin.\n", Exit("killed", 9, "oom-kill"))
    assert found.name == "host out of memory"


def test_the_unknown_stays_unknown_with_its_last_40_lines() -> None:
    lines = [f"[2026-01-01 00:00:00 TP0] line {number}" for number in range(100)]
    found = diagnose("\n".join([*lines, "api_key='sk-SENTINEL-333'"]), Exit("exited", 7))
    assert found.name == "unknown"
    assert "exit status 7" in found.cause
    assert len(found.tail) == 40
    assert found.tail[0] == "line 61"
    assert found.tail[-1] == "api_key='[redacted]'"


def test_a_lost_child_with_an_error_of_its_own_is_not_called_killed() -> None:
    text = log("sigkill_scheduler") + "\nZeroDivisionError: division by zero\n"
    assert diagnose(text, Exit("killed", 9, "signal")).name == "unknown"
