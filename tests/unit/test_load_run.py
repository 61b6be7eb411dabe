"""The whole client against a server whose truth is known. This machine may be busy, and the server shares even the
interpreter with most of these clients: its notes of when it sent what are the truth, not the schedule that it meant to
keep, and nothing is expected to be done within some time."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import fmean, median
from typing import Any

import pytest
from known_truth_server import KnownTruthServer, Script

from servelab.cli import main
from servelab.load.wire import kernel_stamps_work

TOKENS = [1, 4, 2, 3, 4, 2]  # 16 tokens in 6 deltas


@pytest.fixture
def serve() -> Iterator[Callable[[Script], KnownTruthServer]]:
    servers = []

    def start(script: Script) -> KnownTruthServer:
        servers.append(KnownTruthServer(script))
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def load(url: str, out: Path, *more: str) -> int:
    words = ["load", "--url", url, "--out", str(out), "--output-tokens", "16", "--input-tokens", "20"]
    return main([*words, "--min-seconds", "0.3", "--min-waves", "2", "--warmup-requests", "1", *more])


def summary(out: Path) -> dict[str, Any]:
    return dict(json.loads((out / "summary.json").read_text()))


def complete(status: int, out: Path) -> bool:
    """Whether the run is valid but for what a busy machine does to a client that shares it (and here even the
    interpreter) with the server. That such a level is called invalid is tested with numbers, in test_load_metrics."""
    busy = ("the client was the bottleneck", "not sustained", "the server stood still")
    reasons = [reason for level in summary(out)["levels"] for reason in level["invalid_reasons"]]
    return status == (3 if reasons else 0) and all(reason.startswith(busy) for reason in reasons)


def rows(out: Path, level: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (out / "levels" / f"level-{level:04d}.jsonl").read_text().splitlines()]


def figures_are_of(level: dict[str, Any], found: list[dict[str, Any]], scale: float = 1.0) -> None:
    """That the figures of a level are those of its rows, worked out as the definitions say: requests that were sent and
    ended inside the window, tokens that arrived inside it. The server takes 30 ms for the first delta."""
    start, end = level["window"]["start"], level["window"]["end"]
    counted = [row for row in found if start <= row["t_send"] and row["t_end"] <= end and not row["error"]]
    ttft = fmean(row["t_first"] - row["t_send"] for row in counted) * 1e3
    assert ttft >= 30
    assert level["ttft_ms"]["mean"] == pytest.approx(ttft * scale, rel=1e-3)
    tpot = fmean((row["t_last"] - row["t_first"]) / 15 for row in counted) * 1e3
    assert tpot > 0
    assert level["tpot_ms"]["mean"] == pytest.approx(tpot * scale, rel=1e-3)
    arrived = [(row["t_send"] + at, tokens) for row in found for at, tokens in row["chunks"]]
    # The row's times are rounded, so that a delta at an end of the window may be in or out.
    rate = sum(tokens for at, tokens in arrived if start < at <= end) / (end - start) / scale
    assert level["output_tok_s"] == pytest.approx(rate, abs=8 / (end - start) / scale)
    busy = sum(max(0, min(row["t_end"], end) - max(row["t_send"], start)) for row in found)
    assert level["in_flight_mean"] == pytest.approx(busy / (end - start), rel=1e-3)


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_times_and_tokens_are_the_servers(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, api: str
) -> None:
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    assert complete(load(server.url, out, "--levels", "1,3", "--api", api), out)
    levels = summary(out)["levels"]
    assert [level["concurrency"] for level in levels] == [1, 3]
    assert server.flushes == 2
    assert server.most_at_once == 3
    truth = {served.prompt: served for served in server.served}
    sent = {(request.get("prompt") or request["messages"][0]["content"]) for request in server.requests}  # type: ignore[index]
    assert len(sent) == len(server.requests)  # no prompt twice
    late = []
    checked = 0
    for level in levels:
        found = rows(out, level["concurrency"])
        for row in found:
            assert row["error"] is None
            assert [tokens for _, tokens in row["chunks"]] == TOKENS
            assert (row["prompt_tokens"], row["completion_tokens"], row["finish_reason"]) == (11, 16, "length")
            # the server noted when it sent each delta; find its note by the time of the first
            served = min(truth.values(), key=lambda s: abs(s.sent[0] / 1e9 - row["t_first"]))
            assert row["t_send"] <= served.received / 1e9 + 1e-5
            if kernel_stamps_work():
                for (arrived, _), stamp in zip(row["chunks"], served.sent, strict=True):
                    # Stamped by the kernel: not before it was sent. How much later is up to what delays the server's
                    # own send() and, where a busy client read two at once, to the second of them.
                    late.append(row["t_send"] + arrived - stamp / 1e9)
                    assert late[-1] > -1e-4
            checked += 1
        assert level["requests"]["failed"] == 0
        assert level["requests"]["completed"] == len(found)
        assert level["tokens_per_chunk"] == 3.0  # 15 tokens in the 5 deltas behind the first
        figures_are_of(level, found)
    assert checked == len(server.requests) - 1  # the warm-up is not in the results
    assert not late or median(late) < 0.02
    progress = json.loads((out / "progress.json").read_text())
    assert progress["state"] == "done"
    assert progress["valid"] == all(level["valid"] for level in levels)
    assert not list(out.rglob("*.capture"))


def test_a_level_is_valid_on_a_machine_that_has_a_moment_for_it(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    server = serve(Script(tokens=TOKENS))
    assert any(load(server.url, tmp_path / str(attempt), "--levels", "1,2") == 0 for attempt in range(8))


def test_connections_are_kept_and_a_closing_server_gets_new_ones(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    server = serve(Script(tokens=TOKENS))
    assert complete(load(server.url, tmp_path / "kept", "--levels", "4"), tmp_path / "kept")
    level = summary(tmp_path / "kept")["levels"][0]
    assert level["self"]["connections"] == 4
    server.script.close_each = True
    assert complete(load(server.url, tmp_path / "closed", "--levels", "4"), tmp_path / "closed")
    level = summary(tmp_path / "closed")["levels"][0]
    assert level["self"]["connections"] == level["requests"]["completed"]


def test_prompts_are_the_same_for_every_mode(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    prompts = []
    for mode in ("baseline", "eagle3"):
        server = serve(Script(tokens=TOKENS))
        status = load(server.url, tmp_path / mode, "--levels", "2", "--mode", mode, "--warmup-requests", "0")
        assert complete(status, tmp_path / mode)
        prompts.append([request["prompt"] for request in server.requests])
    # one mode may get through more of them, but neither gets a prompt that the other would not have got next
    assert len(set(prompts[0]) & set(prompts[1])) >= 6
    assert not set(prompts[0]) - set(prompts[1]) or not set(prompts[1]) - set(prompts[0])


def test_requests_ask_for_what_the_measurement_needs(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    server = serve(Script(tokens=TOKENS))
    assert complete(load(server.url, tmp_path / "out"), tmp_path / "out")
    request = server.requests[-1]
    assert request["model"] == "known-truth"
    assert (request["temperature"], request["ignore_eos"], request["max_tokens"]) == (0, True, 16)
    assert request["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}


@pytest.mark.parametrize("fault", ["http_500", "in_band", "cut", "no_usage", "wrong_token_count"])
def test_one_failed_request_makes_its_level_invalid_and_no_other(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, fault: str
) -> None:
    server = serve(Script(tokens=TOKENS, fault=fault, faulty=frozenset({2})))
    out = tmp_path / "out"
    assert load(server.url, out, "--levels", "2,1") == 3
    first, second = summary(out)["levels"]
    assert first["requests"]["errors"] == {fault: 1}
    assert first["invalid_reasons"][0] == f"1 request failed: {fault}"
    assert not first["valid"]
    assert second["requests"]["failed"] == 0
    failed = [row for row in rows(out, 2) if row["error"]]
    assert [row["error"]["kind"] for row in failed] == [fault]
    assert first["output_tok_s"] > 0  # kept, though not to be used


def test_a_request_that_hangs_times_out(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, fault="hang", faulty=frozenset({3})))
    out = tmp_path / "out"
    assert load(server.url, out, "--levels", "2", "--timeout", "1", "--min-seconds", "1.5") == 3
    level = summary(out)["levels"][0]
    assert level["requests"]["errors"] == {"timeout": 1}


def test_a_server_that_fails_always_is_not_hammered(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    server = serve(Script(tokens=TOKENS, fault="http_500", faulty=frozenset(range(1, 100_000))))
    assert load(server.url, tmp_path / "out", "--levels", "2", "--min-seconds", "60") == 3
    level = summary(tmp_path / "out")["levels"][0]
    assert level["requests"]["completed"] == 0
    assert 10 <= level["requests"]["failed"] < 40
    assert level["output_tok_s"] is None or level["output_tok_s"] == 0


def test_a_server_that_dies_during_a_level(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    client = launch(server.url, out, "--levels", "2,4", "--min-seconds", "60")
    wait_for(lambda: len(server.served) > 4)
    server.close()
    assert client.wait(timeout=60) == 3
    levels = summary(out)["levels"]
    assert set(levels[0]["requests"]["errors"]) <= {"cut", "reset", "refused"}
    assert "refused" in levels[0]["requests"]["errors"]
    assert not any(level["valid"] for level in levels)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_cleanly_with_what_there_is(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, number: int
) -> None:
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    client = launch(server.url, out, "--levels", "2,4", "--min-seconds", "60")
    wait_for(lambda: len(server.served) > 8)
    client.send_signal(number)
    assert client.wait(timeout=60) == 3
    found = summary(out)
    assert found["partial"]
    assert [level["concurrency"] for level in found["levels"]] == [2]
    assert found["levels"][0]["invalid_reasons"][-1] == "interrupted"
    assert found["levels"][0]["requests"]["completed"] >= 8
    assert json.loads((out / "progress.json").read_text())["state"] == "done"


def test_an_interruption_before_there_is_anything_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("servelab.load.setup.options", interrupted)
    assert load("http://127.0.0.1:1", tmp_path / "out") == 130
    assert capsys.readouterr().err == "servelab load: interrupted\n"


def test_what_a_killed_client_had_measured_can_be_recovered(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    client = launch(server.url, out, "--levels", "2", "--min-seconds", "60")
    wait_for(lambda: len(server.served) > 8)
    client.kill()
    client.wait()
    (left,) = (out / "levels").iterdir()
    left.write_bytes(left.read_bytes() + left.read_bytes()[30:90])  # and a record that was cut off
    assert main(["load", "--recover", str(out)]) == 0
    assert "0 of them failed" in capsys.readouterr().out
    found = rows(out, 2)
    assert len(found) >= 6
    assert [row["id"] for row in found] == sorted(row["id"] for row in found)
    for row in found:
        assert (row["error"], [tokens for _, tokens in row["chunks"]]) == (None, TOKENS)
    assert left.exists()
    assert main(["load", "--recover", str(tmp_path)]) == 4


def test_refused_connection_cannot_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    assert load(f"http://127.0.0.1:{port}", tmp_path / "out") == 4
    assert "no answer from" in capsys.readouterr().out
    progress = json.loads((tmp_path / "out" / "progress.json").read_text())
    assert progress["state"] == "failed"


def test_another_server_than_expected_cannot_start(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    assert load(server.url, tmp_path / "a", "--expect-model", "kimi") == 4
    assert load(server.url, tmp_path / "b", "--expect-version", "0.5.8") == 4
    assert not server.requests


def test_a_warm_up_that_fails_cannot_start(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, fault="in_band", faulty=frozenset({0})))
    assert load(server.url, tmp_path / "out") == 4


def test_accept_length_only_when_it_is_of_this_level(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    info: dict[str, object] = {
        "speculative_algorithm": "EAGLE3",
        "internal_states": [{"avg_spec_accept_length": 2.5, "effective_max_running_requests_per_dp": 1}],
        "api_key": "sk-SENTINEL-555",
        "admin_api_key": "sk-SENTINEL-556",
    }
    server = serve(Script(tokens=TOKENS, info=info))
    load(server.url, tmp_path / "flushed", "--levels", "2")
    level = summary(tmp_path / "flushed")["levels"][0]
    assert level["accept_length"] == 2.5
    assert level["notices"][0] == "the server runs at most 1 requests at a time: 1 of 2 queue"
    server.script.flush_status = 404
    load(server.url, tmp_path / "absent")
    assert summary(tmp_path / "absent")["levels"][0]["accept_length"] is None
    server.script.flush_status = 200
    server.script.info = info | {"speculative_algorithm": None}
    load(server.url, tmp_path / "off")
    assert summary(tmp_path / "off")["levels"][0]["accept_length"] is None
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or b"SENTINEL" not in path.read_bytes()


def test_simulated_results_say_so_and_are_in_reported_seconds(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path
) -> None:
    server = serve(Script(tokens=TOKENS, info={"simulated": {"profile": "story", "time_scale": 5}}))
    assert complete(load(server.url, tmp_path / "out", "--min-seconds", "1.5"), tmp_path / "out")
    found = summary(tmp_path / "out")
    assert found["server"]["simulated"] == {"profile": "story", "time_scale": 5}
    level = found["levels"][0]
    # raw rows stay in wall seconds
    figures_are_of(level, rows(tmp_path / "out", 1), scale=5)


def test_a_restarted_server_is_noticed(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS, info={"random_seed": 1}))
    out = tmp_path / "out"
    client = launch(server.url, out, "--min-seconds", "1")
    wait_for(lambda: len(server.served) > 2)
    server.script.info = {"random_seed": 2}
    assert client.wait(timeout=60) == 3
    assert "random_seed" in summary(out)["levels"][0]["invalid_reasons"][-1]


def test_without_kernel_stamps_the_result_says_so(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("servelab.load.session.kernel_stamps_work", lambda: False)
    server = serve(Script(tokens=TOKENS))
    before = time.time()
    assert complete(load(server.url, tmp_path / "out", "--levels", "2"), tmp_path / "out")
    found = summary(tmp_path / "out")
    assert found["client"]["clock"] == "CLOCK_MONOTONIC at each read"
    assert found["levels"][0]["self"]["lag_p99_ms"] is None
    figures_are_of(found["levels"][0], rows(tmp_path / "out", 2))
    for row in rows(tmp_path / "out", 2):
        assert before < row["t_send"] < row["t_first"] < row["t_last"] <= row["t_end"] < time.time()


def test_cancelled_requests_are_no_failures(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    assert complete(load(server.url, out, "--levels", "9", "--after-window", "cancel"), out)
    level = summary(tmp_path / "out")["levels"][0]
    assert level["requests"]["cancelled"] > 0
    assert level["requests"]["failed"] == 0
    kinds = {row["error"]["kind"] for row in rows(tmp_path / "out", 9) if row["error"]}
    assert kinds == {"cancelled"}


@pytest.mark.parametrize(
    "words",
    [
        ["--levels", "0"],
        ["--levels", "1,x"],
        ["--levels", "1,1"],
        ["--url", "ftp://127.0.0.1:1"],
        ["--url", "127.0.0.1:1"],
        ["--min-seconds", "-1"],
        ["--min-seconds", "nan"],
        ["--api-key-file", "/nonexistent"],
        ["--level", "1"],
    ],
)
def test_wrong_usage(tmp_path: Path, words: list[str]) -> None:
    try:
        status = load("http://127.0.0.1:1", tmp_path / "out", *words)
    except SystemExit as left:
        status = int(left.code or 0)
    assert status == 2
    assert not (tmp_path / "out").exists()


def test_results_are_never_overwritten(serve: Callable[[Script], KnownTruthServer], tmp_path: Path) -> None:
    server = serve(Script(tokens=TOKENS))
    assert complete(load(server.url, tmp_path / "out"), tmp_path / "out")
    before = (tmp_path / "out" / "summary.json").read_bytes()
    assert load(server.url, tmp_path / "out") == 2
    assert (tmp_path / "out" / "summary.json").read_bytes() == before


def test_interface(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["load", "--interface"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["interface"], said["version"]) == (1, "0.1.0")
    assert {"--url", "--out", "--mode", "--levels", "--output-tokens", "--input-tokens", "--api", "--seed"} <= set(
        said["options"]
    )


def test_the_command_imports_nothing_slow() -> None:
    code = "import sys; from servelab.cli import main; main(['load', '--interface']); print(sorted(sys.modules))"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment())
    for module in ("asyncio", "http.client", "ssl", "matplotlib", "jinja2"):
        assert f"'{module}'" not in said.stdout


def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}


def launch(url: str, out: Path, *more: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "servelab", "load", "--url", url, "--out", str(out)]
    command += ["--output-tokens", "16", "--warmup-requests", "1", *more]
    return subprocess.Popen(command, env=environment(), stdout=subprocess.DEVNULL)


def wait_for(true: Callable[[], bool]) -> None:
    until = time.monotonic() + 60
    while not true():
        assert time.monotonic() < until
        time.sleep(0.01)


def test_the_cards_are_watched_beside_the_load(
    serve: Callable[[Script], KnownTruthServer], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that keeps all it has to say until it is ended: every reading counts all the same."""
    tool = tmp_path / "nvidia-smi"
    tool.write_text(
        f"#!{sys.executable}\n"
        "import datetime, signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit())\n"
        "while True:\n"
        "    now = datetime.datetime.now(datetime.UTC)\n"
        "    print(f'{now:%Y/%m/%d %H:%M:%S}.{now.microsecond // 1000:03d}, 0, 90000, 60, 500.00, 2400, 5, 0x4')\n"
        "    time.sleep(0.02)\n"
    )
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    server = serve(Script(tokens=TOKENS))
    out = tmp_path / "out"
    assert complete(load(server.url, out, "--levels", "1,2", "--watch-cards", "0.02"), out)
    for level in summary(out)["levels"]:
        assert level["cards"].pop("readings") > 3
        assert level["cards"] == {
            "power_w": 500.0,
            "clock_sm_mhz": 2400.0,
            "temperature_c": 60,
            "memory_used_mib": 90000,
            "throttle": {"sw_power_cap": 1.0},
        }
    assert not (out / "cards.csv").exists()
