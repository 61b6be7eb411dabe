"""What playbooks/status.yml says, from answers of a real server and from servers that say less."""

from __future__ import annotations

import pytest

from servelab.shared.server_status import age, figures, lines

# A real SGLang 0.5.15 with EAGLE3, two seconds after a sweep: /server_info shortened, and /v1/loads while idle.
INFO = {
    "version": "0.5.15",
    "served_model_name": "synth-llama",
    "internal_states": [
        {
            "last_gen_throughput": 16189.560041222932,
            "memory_usage": {"weight": 0.85, "kvcache": 64.05, "token_capacity": 2098692, "graph": 0.25},
            "avg_spec_accept_length": 2.5339509703000496,
        }
    ],
}
LOADS = {
    "version": "0.5.15",
    "loads": [
        {"dp_rank": 0, "num_running_reqs": 4, "num_waiting_reqs": 2, "token_usage": 0.26, "gen_throughput": 455.25},
        {"dp_rank": 1, "num_running_reqs": 3, "num_waiting_reqs": 0, "token_usage": 0.41, "gen_throughput": 100.0},
    ],
}
GPU = {"index": 0, "name": "NVIDIA RTX PRO 6000", "memory_used_mib": 88000, "memory_total_mib": 97887}


def test_the_figures_of_a_real_server() -> None:
    found = figures(INFO, LOADS)
    assert (found["tok_s"], found["running"], found["queue"], found["kv_use"]) == (555.25, 7, 2, 0.41)
    assert (found["kv_tokens"], found["release"], found["model"]) == (2098692, "0.5.15", "synth-llama")
    assert found["accept_length"] == pytest.approx(2.534, abs=0.001)


def test_without_loads_the_last_throughput_counts_and_the_rest_is_unknown() -> None:
    found = figures(INFO, None)
    assert (round(found["tok_s"], 2), found["running"], found["kv_use"]) == (16189.56, None, None)


@pytest.mark.parametrize(
    "broken", [None, {}, {"internal_states": None}, {"internal_states": ["x", {"memory_usage": None}]}]
)
def test_what_nobody_says_is_unknown_and_not_zero(broken: dict | None) -> None:
    found = figures(broken, {"loads": [{"gen_throughput": None, "num_running_reqs": True}]})
    assert {key: value for key, value in found.items() if value is not None} == {}


def test_the_lines() -> None:
    server = {
        "mode": "eagle3", "unit": "servelab-eagle3.service", "owner": "serve", "seconds": 11520.0, "health": "healthy",
        "release": "0.5.15", "figures": figures(INFO, LOADS),
    }  # fmt: skip
    assert lines([server], True, [GPU]) == [
        "eagle3 runs since 3 h 12 min (servelab-eagle3.service, started for use; healthy)",
        "  stack: SGLang 0.5.15, all-reduce patch in place; model synth-llama",
        "  now: 555.2 tok/s, accept length 2.53, KV cache 41% of 2098692 tokens, 7 running, 2 waiting",
        "  GPU 0: 88000 of 97887 MiB, NVIDIA RTX PRO 6000",
    ]


def test_of_a_server_of_the_stack_before_the_patch_is_not_known() -> None:
    """The link has moved since it was started, and who looked for the patch looked behind the link."""
    server = {
        "mode": "eagle3", "unit": "servelab-eagle3.service", "owner": "serve", "seconds": 11520.0, "health": "healthy",
        "release": "0.5.23", "figures": figures(INFO, LOADS),
    }  # fmt: skip
    said = "  stack: SGLang 0.5.15, while the stack in use is 0.5.23 by now, patch state unknown; model synth-llama"
    assert lines([server], True, [], "0.5.23")[1] == said
    assert (
        lines([server], True, [], "0.5.15")[1] == "  stack: SGLang 0.5.15, all-reduce patch in place; model synth-llama"
    )


def test_a_server_that_starts_says_nothing_yet() -> None:
    server = {
        "mode": "baseline", "unit": "servelab-baseline.service", "owner": None, "seconds": 42.7,
        "health": "health: HTTP 503", "release": "0.5.23", "figures": figures(None, None),
    }  # fmt: skip
    assert lines([server], None, [{**GPU, "memory_used_mib": None}]) == [
        "baseline runs since 42 s (servelab-baseline.service, started by hand or at boot; health: HTTP 503)",
        "  stack: SGLang 0.5.23, patch state unknown; model ?",
        "  now: ? tok/s, accept length none, KV cache ? of ? tokens, ? running, ? waiting",
        "  GPU 0: ? of 97887 MiB, NVIDIA RTX PRO 6000",
    ]


def test_simulated_figures_say_so_and_nothing_is_nothing() -> None:
    info = {**INFO, "simulated": {"profile": "story", "time_scale": 5}}
    server = {
        "mode": "baseline", "unit": "servelab-baseline.service", "owner": "bench", "seconds": 1.0, "health": "healthy",
        "release": None, "figures": figures(info, LOADS),
    }  # fmt: skip
    assert "  simulated: profile story" in lines([server], False, [])
    assert lines([], False, []) == ["No server of a mode runs."]


def test_ages() -> None:
    assert [age(seconds) for seconds in (0, 59.9, 60, 3661, 90000)] == [
        "0 s",
        "59 s",
        "1 min 0 s",
        "1 h 1 min",
        "1 d 1 h",
    ]
