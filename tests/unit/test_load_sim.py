"""The client against the double that is held against a real SGLang: its dialect in every API, under speculation."""

import json
from pathlib import Path
from typing import Any

import pytest
from sim_process import Sim

from servelab import bundle, verify
from servelab.cli import main

EAGLE3 = (
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d", "--enable-cache-report"),
    *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    *("--reasoning-parser", "qwen3"),
)


@pytest.fixture(scope="module")
def eagle3(tmp_path_factory: pytest.TempPathFactory):
    with Sim(tmp_path_factory.mktemp("sim"), *EAGLE3, time_scale=10) as sim:
        yield sim.wait_ready(60)


def load(sim: Sim, out: Path, *more: str) -> dict[str, Any]:
    words = ["load", "--url", f"http://127.0.0.1:{sim.port}", "--out", str(out), "--input-tokens", "64"]
    main([*words, "--output-tokens", "32", "--min-seconds", "3", "--warmup-requests", "1", *more])
    found = json.loads((out / "summary.json").read_text())
    (out / "run.json").write_text(json.dumps({"schema": "servelab.run/1", "mode": "eagle3", "status": "ok"}))
    assert [figure for figure in verify.figures(bundle.read(out)) if not figure.agrees] == []
    assert found["server"]["simulated"]["profile"] == "story"
    return dict(found)


@pytest.mark.parametrize("api", ["completions", "chat", "generate"])
def test_every_api_tells_tokens_steps_and_answers(eagle3: Sim, tmp_path: Path, api: str) -> None:
    found = load(eagle3, tmp_path / "o", "--api", api, "--levels", "2")
    (level,) = found["levels"]
    assert level["requests"]["failed"] == 0
    assert level["cache"] == "flushed"
    # 32 tokens: one from the prefill, the others in steps of 1 to 4
    assert level["accept_length_from"] == "requests"
    assert 1 < level["accept_length"] <= 4
    assert 1 < level["tokens_per_chunk"] <= 4
    rows = [json.loads(line) for line in (tmp_path / "o" / "levels" / "level-0002.jsonl").read_text().splitlines()]
    for row in rows:
        assert (row["completion_tokens"], row["finish_reason"], row["error"]) == (32, "length", None)
        assert 50 <= row["prompt_tokens"] <= 80  # --input-tokens counts words without a tokenizer
        assert 8 <= row["verify_steps"] <= 31
    if api == "chat":  # it thinks first
        assert level["ttfa_ms"]["mean"] > level["ttft_ms"]["mean"]
        assert level["reasoning_tokens_mean"] > 0
    else:
        assert level["ttfa_ms"]["mean"] == level["ttft_ms"]["mean"]


def test_half_of_each_prompt_is_in_the_cache_as_stated(eagle3: Sim, tmp_path: Path) -> None:
    (level,) = load(eagle3, tmp_path / "o", "--cached-share", "0.5", "--input-tokens", "200")["levels"]
    assert level["cached_tokens_mean"] / level["prompt_tokens_mean"] == pytest.approx(0.5, abs=0.05)
    assert not [notice for notice in level["notices"] if "should be cached" in notice]
    (level,) = load(eagle3, tmp_path / "n", "--input-tokens", "200")["levels"]
    assert (level["cached_tokens_mean"] or 0) < 10


def test_rates_are_per_reported_second(eagle3: Sim, tmp_path: Path) -> None:
    found = load(eagle3, tmp_path / "o", "--arrivals", "constant", "--rates", "1.5", "--min-seconds", "10")
    (level,) = found["levels"]
    rows = [
        json.loads(line) for line in (tmp_path / "o" / "levels" / "level-constant-1.5.jsonl").read_text().splitlines()
    ]
    dues = sorted(row["t_due"] for row in rows)
    assert dues[1] - dues[0] == pytest.approx(1 / 15, abs=1e-5)  # ten times as fast as reported
    assert level["arrived_per_s"] == pytest.approx(1.5, rel=0.15)
