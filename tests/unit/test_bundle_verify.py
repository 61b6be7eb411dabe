"""verify-bundle: its figures are worked out by hand from a few rows, and it agrees with the client that makes them."""

import copy
import json

import pytest
from known_truth_server import KnownTruthServer, Script

from servelab import bundle, verify
from servelab.cli import main

T = 1_800_000_000.0


def row(at, first, last, end, tokens=(1, 3), error=None):
    """A request sent at T + *at* with two deltas, *first* and *last* seconds after it."""
    return {
        "t_send": T + at,
        "t_end": T + at + end,
        "chunks": [[first, tokens[0]], [last, tokens[1]]],
        "prompt_tokens": 10,
        "cached_tokens": None,
        "completion_tokens": sum(tokens),
        "error": error,
    }


# C=1: three requests one after the other; the window is [T, T + 2.2], which the third outlives.
ROWS = [row(0, 0.1, 0.7, 0.7), row(0.8, 0.2, 0.8, 0.8), row(1.6, 0.1, 0.7, 0.7)]
LEVEL = {
    "concurrency": 1,
    "valid": False,
    "invalid_reasons": ["not sustained"],
    "requests": {"completed": 3, "failed": 0, "cancelled": 0, "in_window": 2, "errors": {}},
    "window": {"start": T, "end": T + 2.2},
    "window_s": 4.4,  # time scale 2
    # 4 + 4 tokens and the third's first: 9 in 4.4 s
    "output_tok_s": 9 / 4.4,
    "output_tok_s_naive": 12 / 4.6,  # 12 tokens in 2.3 s
    "in_flight_mean": 2.1 / 2.2,  # 0.7 + 0.8 + 0.6 s of 2.2
    "ttft_ms": {"mean": 300.0, "p50": 200.0, "p90": None, "p99": None, "n": 2},  # 0.1 and 0.2 s, doubled
    "tpot_ms": {"mean": 400.0, "p50": 400.0, "p90": None, "p99": None, "n": 2},  # 0.6 s for 3 tokens, doubled
    "chunk_gap_ms": {"mean": 1200.0, "p50": 1200.0, "p90": None, "p99": None, "n": 2},
    "e2e_ms": {"mean": 1500.0, "p50": 1400.0, "p90": None, "p99": None, "n": 2},
    "prompt_tokens_mean": 10.0,
    "cached_tokens_mean": None,
    "tokens_per_chunk": 3.0,
}


def write(tmp_path, rows=ROWS, level=LEVEL):
    path = tmp_path / "20261129T101500Z-baseline"
    (path / "levels").mkdir(parents=True)
    run = {"schema": "servelab.run/1", "run_id": path.name, "mode": "baseline", "status": "ok"}
    summary = {"server": {"simulated": {"profile": "story", "time_scale": 2}}, "levels": [level]}
    (path / "run.json").write_text(json.dumps(run))
    (path / "summary.json").write_text(json.dumps(summary))
    (path / "levels" / "level-0001.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    bundle.seal(path)
    return path


def disagreeing(path):
    return {f.name for f in verify.figures(bundle.read(path)) if not f.agrees}


def test_figures_by_hand_agree(tmp_path, capsys):
    path = write(tmp_path)
    assert disagreeing(path) == set()
    assert main(["verify-bundle", str(path)]) == 0
    assert "figures recomputed, all agree" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (("output_tok_s",), 12 / 4.4),
        (("output_tok_s_naive",), 9 / 4.6),
        (("in_flight_mean",), 1.0),
        (("window_s",), 2.2),
        (("ttft_ms", "mean"), 150.0),
        (("ttft_ms", "p90"), 400.0),
        (("tpot_ms", "mean"), 300.0),
        (("chunk_gap_ms", "n"), 3),
        (("e2e_ms", "p50"), 1600.0),
        (("tokens_per_chunk",), 2.0),
        (("requests", "in_window"), 3),
        (("requests", "completed"), 2),
        (("prompt_tokens_mean",), 11.0),
    ],
)
def test_each_figure_that_is_wrong_is_named(tmp_path, keys, value):
    level = copy.deepcopy(LEVEL)
    target = level
    for key in keys[:-1]:
        target = target[key]
    target[keys[-1]] = value
    name = " ".join(keys).removeprefix("requests ")
    assert disagreeing(write(tmp_path, level=level)) == {f"C=1 {name}"}


def test_a_valid_level_that_its_rows_contradict(tmp_path):
    # 0.954 of 1 in flight is not sustained, whatever the summary says.
    assert disagreeing(write(tmp_path, level={**LEVEL, "valid": True})) == {"C=1 valid"}


def test_a_failure_that_is_only_in_the_rows(tmp_path):
    rows = [*ROWS, {**row(2.4, 0.1, 0.2, 0.2), "chunks": [], "error": {"kind": "refused", "detail": ""}}]
    assert disagreeing(write(tmp_path, rows=rows)) == {"C=1 failed", "C=1 errors"}


def test_rows_that_are_missing(tmp_path, capsys):
    path = write(tmp_path)
    (path / "levels" / "level-0001.jsonl").unlink()
    assert main(["verify-bundle", str(path)]) == 1
    assert "without its rows a level cannot be verified" in capsys.readouterr().err


def test_a_changed_file_is_named_beside_the_figures(tmp_path, capsys):
    path = write(tmp_path)
    (path / "run.json").write_text((path / "run.json").read_text() + " ")
    assert main(["verify-bundle", str(path)]) == 1
    assert "run.json was changed after the run" in capsys.readouterr().out


def test_it_agrees_with_the_client(tmp_path):
    """Two programs that share no code, one real run between them."""
    server = KnownTruthServer(Script(tokens=[1, 4, 2, 3, 4, 2]))
    path = tmp_path / "20261129T101500Z-baseline"
    words = ["load", "--url", server.url, "--out", str(path), "--output-tokens", "16", "--input-tokens", "20"]
    try:
        main([*words, "--levels", "1,3", "--min-seconds", "0.3", "--min-waves", "2", "--warmup-requests", "1"])
    finally:
        server.close()
    (path / "run.json").write_text(json.dumps({"schema": "servelab.run/1", "mode": "baseline", "status": "ok"}))
    figures = verify.figures(bundle.read(path))
    assert len(figures) > 60
    assert [f for f in figures if not f.agrees] == []


@pytest.mark.parametrize(
    "words",
    [
        ["--arrivals", "poisson", "--rates", "30", "--min-seconds", "1", "--slo", "e2e_ms=90", "--slo", "ttft_ms=40"],
        ["--arrivals", "ramp", "--rates", "40", "--min-seconds", "1"],
        ["--api", "chat", "--levels", "2", "--min-seconds", "0.4", "--slo", "tpot_ms=4", "--slo", "ttfa_ms=65"],
        ["--api", "generate", "--levels", "2", "--min-seconds", "0.4"],
    ],
)
def test_it_agrees_with_the_client_whatever_the_shape(tmp_path, words):
    server = KnownTruthServer(Script(tokens=[1, 4, 2, 3, 4, 2], reasoning=3))
    path = tmp_path / "20261129T101500Z-baseline"
    try:
        main(["load", "--url", server.url, "--out", str(path), "--output-tokens", "16", "--input-tokens", "20", *words])
    finally:
        server.close()
    (path / "run.json").write_text(json.dumps({"schema": "servelab.run/1", "mode": "baseline", "status": "ok"}))
    figures = verify.figures(bundle.read(path))
    assert len(figures) > 38
    assert [f for f in figures if not f.agrees] == []


def test_an_open_loop_counts_from_the_intended_time(tmp_path):
    # due at 0.1 and 1.1, both sent 0.1 s late; window [T, T + 2]
    rows = [{**row(0.2, 0.1, 0.7, 0.7), "t_due": T + 0.1}, {**row(1.2, 0.2, 0.7, 0.7), "t_due": T + 1.1}]
    level = {
        **LEVEL,
        "level": "constant-1",
        "concurrency": None,
        "requests": {"completed": 2, "failed": 0, "cancelled": 0, "in_window": 2, "errors": {}},
        "window": {"start": T, "end": T + 2},
        "window_s": 4.0,
        "output_tok_s": 2.0,  # 8 tokens
        "output_tok_s_naive": 8 / 3.4,  # 1.7 s
        "in_flight_mean": 0.7,
        "arrived_per_s": 0.5,
        "ended_per_s": 0.5,
        "ttft_ms": {"mean": 500.0, "p50": 400.0, "p90": None, "p99": None, "n": 2},  # 0.2 and 0.3 s, doubled
        "e2e_ms": {"mean": 1600.0, "p50": 1600.0, "p90": None, "p99": None, "n": 2},
        "tpot_ms": {"mean": 1100 / 3, "p50": 1000 / 3, "p90": None, "p99": None, "n": 2},
        "chunk_gap_ms": {"mean": 1100.0, "p50": 1000.0, "p90": None, "p99": None, "n": 2},
    }
    path = write(tmp_path, rows, level)
    (path / "levels" / "level-0001.jsonl").rename(path / "levels" / "level-constant-1.jsonl")
    assert disagreeing(path) == set()


def test_what_is_said_of_the_cards_is_recomputed_from_their_readings(tmp_path):
    def reading(at, *gpus):
        keys = ("power_w", "clock_sm_mhz", "temperature_c", "memory_used_mib", "throttle_reasons")
        return {"t": T + at, "gpus": [dict(zip(keys, gpu, strict=True)) for gpu in gpus]}

    said = {
        "readings": 2,
        "power_w": 1100.0,  # 1000 and 1200
        "clock_sm_mhz": 2200.0,  # 2300 and 2100
        "temperature_c": 71,
        "memory_used_mib": 90012,
        "throttle": {"sw_power_cap": 0.5},
    }
    readings = [
        reading(-1, (80, 180, 30, 4, ["gpu_idle"]), (80, 180, 30, 4, ["gpu_idle"])),
        reading(0.5, (500, 2400, 60, 90000, []), (500, 2300, 61, 90012, [])),
        reading(1.5, (600, 2100, 71, 90000, ["sw_power_cap"]), (600, 2400, 70, 90000, [])),
    ]
    path = write(tmp_path, level={**LEVEL, "cards": said})
    (path / "cards.jsonl").write_text("".join(json.dumps(r) + "\n" for r in readings))
    found = {figure.name: figure for figure in verify.figures(bundle.read(path)) if "cards" in figure.name}
    assert len(found) == 6
    assert all(figure.agrees for figure in found.values())
    wrong = {**said, "power_w": 1200.0, "throttle": {"sw_power_cap": 1.0}}
    (path / "summary.json").write_text(json.dumps({"levels": [{**LEVEL, "cards": wrong}]}))
    disagree = [
        figure.name for figure in verify.figures(bundle.read(path)) if "cards" in figure.name and not figure.agrees
    ]
    assert disagree == ["C=1 cards power_w", "C=1 cards sw_power_cap"]
