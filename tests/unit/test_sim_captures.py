"""The double against a real SGLang 0.5.15: each answer's status, headers, keys, order and types; each log's lines.

What cannot be equal is data with a reason, in fixtures/sim/captures/differences.json.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
from sglang_wheels import unpack
from sim_process import Sim

CAPTURES = Path(__file__).parent / "fixtures" / "sim" / "captures"
ROWS = [json.loads(line) for line in (CAPTURES / "http.jsonl").read_text().splitlines()]
DIFFERENCES = json.loads((CAPTURES / "differences.json").read_text())
FLAGS = (
    *(
        "--served-model-name",
        "synth-llama",
        "--enable-metrics",
        "--enable-cache-report",
        "--sampling-backend",
        "pytorch",
    ),
    *("--random-seed", "1", "--tp-size", "2"),
    *("--attention-backend", "triton", "--mem-fraction-static", "0.5"),
    *("--cuda-graph-max-bs-decode", "128", "--context-length", "8192"),
)
ARMS: dict[str, tuple[str, ...]] = {
    "baseline": (),
    "eagle3": (
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/models/draft"),
        *("--speculative-num-steps", "3", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
        *("--max-running-requests", "128"),
    ),
    "ngram": ("--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"),
}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The real release's flags, so that /server_info has all of its arguments."""
    return str(unpack("0.5.15", tmp_path_factory.mktemp("wheel")))


def serve(directory: Path, arm: str, package: str) -> Sim:
    # That model was made to count from 100 to 115 and end.
    answers = {"w100": " ".join(f"w{n}" for n in range(101, 116))}
    return Sim(directory, *FLAGS, *ARMS[arm], sglang_package=package, time_scale=20, load_seconds=1, answers=answers)


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory, package: str) -> Iterator[dict[str, Sim]]:
    with (
        serve(tmp_path_factory.mktemp("b"), "baseline", package) as baseline,
        serve(tmp_path_factory.mktemp("e"), "eagle3", package) as eagle3,
    ):
        yield {"baseline": baseline.wait_ready(), "eagle3": eagle3.wait_ready()}


def ask(sim: Sim, row: dict[str, Any]) -> bytes:
    """Send a captured request; return the whole answer."""
    body = row["body"]
    if isinstance(body, dict):
        text = " ".join(["w5"] * body["words"])
        long: Any = [{"role": "user", "content": text}] if body["long"] == "messages" else text
        body = json.dumps({body["long"]: long, "max_tokens": 16, "stream": body["stream"]})
    head = f"{row['method']} {row['path']} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
    raw = (body or "").encode()
    if body is not None:
        head += f"content-type: {row['type']}\r\ncontent-length: {len(raw)}\r\n"
    with socket.create_connection(("127.0.0.1", sim.port), timeout=20) as connection:
        connection.sendall(head.encode() + b"\r\n" + raw)
        return b"".join(iter(lambda: connection.recv(65536), b""))


def shape(value: Any, path: str, out: list[str]) -> list[str]:
    """List every key in its order with its type. A list shows the shapes of its items, each once."""
    if isinstance(value, dict):
        out.append(f"{path}: object")
        for key, item in value.items():
            shape(item, f"{path}/{key}", out)
    elif isinstance(value, list):
        out.append(f"{path}: list")
        for item in value:
            for line in shape(item, f"{path}/*", []):
                if line not in out:
                    out.append(line)
    else:
        names = {type(None): "null", bool: "boolean", int: "integer", float: "number", str: "text"}
        out.append(f"{path}: {names[type(value)]}")
    return out


def described(answer: bytes, path: str) -> list[str]:
    """Describe an answer: status line, header names and values, framing and body."""
    head, _, body = answer.partition(b"\r\n\r\n")
    lines = []
    for line in head.decode().split("\r\n"):
        lines.append(re.sub(r"^(date|content-length): .*", r"\1", line))
    if b"text/event-stream" in head:
        return [*lines, *events(body, path)]
    if b"application/json" in head:
        return [*lines, *shape(json.loads(body), path, [])]
    return [*lines, body.decode()]


def events(body: bytes, path: str) -> list[str]:
    """Describe a stream: every chunk is one event; equal neighbours are told once."""
    lines: list[str] = []
    rest = body
    while rest:
        size, _, rest = rest.partition(b"\r\n")
        piece, rest = rest[: int(size, 16)], rest[int(size, 16) + 2 :]
        found = re.fullmatch(rb"data: (.*)\n\n", piece, re.DOTALL)
        if not piece:
            event = "end of the body"
        elif found and found[1].startswith(b"{"):
            event = "\n".join(shape(json.loads(found[1]), path, []))
        else:
            event = piece.decode()
        if not lines or lines[-1] != event:
            lines.append(event)
    return lines


def wanted(line: str) -> bool:
    """Say whether a described line has to be equal."""
    return not any(fnmatch(line.partition(":")[0], entry["where"]) for entry in DIFFERENCES["http"])


ANSWERS = [row for row in ROWS if not row["name"].startswith("metrics")]


@pytest.mark.parametrize("row", ANSWERS, ids=[f"{row['arm']}-{row['name']}" for row in ANSWERS])
def test_every_answer_has_the_real_ones_shape(servers: dict[str, Sim], row: dict[str, Any]) -> None:
    sim, name = servers[row["arm"]], f"{row['arm']}/{row['name']}"
    real = described(row["answer"].encode(), name)
    if row["name"].startswith("flush_busy") and "timeout" not in row["name"]:
        with socket.create_connection(("127.0.0.1", sim.port)) as busy:
            body = b'{"prompt":"x","max_tokens":4000,"ignore_eos":true,"stream":true}'
            busy.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
                b"content-length: %d\r\n\r\n%b" % (len(body), body)
            )
            assert busy.recv(10)
            ours = described(ask(sim, row), name)
        ask(sim, {**row, "path": "/flush_cache?timeout=60"})
    else:
        # A known prompt shows cached tokens, and whether it was known then is not in the capture.
        if b"cached_tokens" in row["answer"].encode() and row["body"]:
            ask(sim, row)
        elif row["body"]:
            ask(sim, {"method": "POST", "path": "/flush_cache?timeout=60", "body": None})
        ours = described(ask(sim, row), name)
    assert [line for line in ours if wanted(line)] == [line for line in real if wanted(line)]


def series(text: str) -> dict[str, tuple[str, str, set[tuple[str, ...]]]]:
    """Return each metric's type, help and the sets of label names it comes with (values of ranks are one)."""
    found: dict[str, tuple[str, str, set[tuple[str, ...]]]] = {}
    helps: dict[str, str] = {}
    for line in text.splitlines():
        if line.startswith("# HELP "):
            _, _, name, words = line.split(" ", 3)
            helps[name] = words
        elif line.startswith("# TYPE "):
            _, _, name, kind = line.split(" ")
            found[name] = (kind, helps[name], set())
        elif match := re.match(r"([a-z0-9_:]+)(?:\{(.*)\})? (\S+)$", line):
            float(match[3])
            name = next(name for name in (match[1], re.sub(r"_(bucket|sum|count)$", "", match[1])) if name in found)
            found[name][2].add(tuple(re.findall(r'(\w+)="', match[2] or "")))
    return found


def test_metrics_are_the_real_series_with_their_types_and_labels(servers: dict[str, Sim]) -> None:
    sim = servers["eagle3"]
    for _ in range(2):
        sim.document("POST", "/v1/completions", {"prompt": "a b c d e f", "max_tokens": 200, "ignore_eos": True})
    (row,) = [row for row in ROWS if row["name"] == "metrics_after_api"]
    answer = ask(sim, row).decode()
    head, _, body = answer.partition("\r\n\r\n")
    undated = re.compile(r"date: .*?\r\n")
    real_head, _, real_body = row["answer"].partition("\r\n\r\n")
    assert undated.sub("", head) == undated.sub("", real_head)
    ours, real = series(body.partition("\r\n")[2]), series(real_body)
    assert list(ours) == list(real)
    for name, (kind, words, labels) in real.items():
        assert ours[name][:2] == (kind, words)
        if not any(entry["series"] == name for entry in DIFFERENCES["metrics"]):
            # Most buckets were cut out of the capture.
            cut = kind == "histogram" and not any("le" in names for names in labels)
            assert {names for names in ours[name][2] if not (cut and "le" in names)} == labels, name
    # What a benchmark reads must be there.
    values = dict(re.findall(r"^(sglang:\w+)\{[^}]*\} (\S+)$", body, re.MULTILINE))
    assert float(values["sglang:spec_accept_length"]) == pytest.approx(2.39, abs=0.25)
    assert float(values["sglang:num_requests_total"]) >= 2
    assert float(values["sglang:generation_tokens_total"]) >= 400
    assert float(values["sglang:cached_tokens_total"]) >= 4
    assert float(values["sglang:num_running_reqs"]) == 0


# Logs


def normal(text: str, side: str) -> list[str]:
    """Return the lines of the launcher and the first rank, with numbers and names of models taken out."""
    lines = []
    for line in re.split(r"[\r\n]+", text):
        match = re.match(r"\[[-\d]+ [:\d]+(?: (TP\d+))?\] (.*)", line)
        rank, words = (match[1], match[2]) if match else (None, line)
        if rank not in (None, "TP0") or not words:
            continue
        if any(entry["side"] in (side, "both") and re.search(entry["line"], words) for entry in DIFFERENCES["log"]):
            continue
        words = re.sub(r"server_args=.*", "server_args=", words)
        words = re.sub(r"^.*/launch_server\.py:\d+", "launch_server.py", words)
        words = re.sub(r"type=\w+", "type=", words)
        # A model with one latent per token has one size.
        words = re.sub(r"K(V)? size.*", "size", words)
        words = re.sub(r"\[[\d, ]+…?\]", "[#]", words)
        lines.append(re.sub(r"\d+(\.\d+)*(e[+-]\d+)?", "#", words).rstrip())
    return lines


def until_ready(lines: list[str]) -> list[str]:
    return lines[: lines.index("The server is fired up and ready to roll!") + 1]


@pytest.mark.parametrize("arm", ARMS)
def test_a_start_writes_the_real_ones_lines_in_their_order(tmp_path: Path, package: str, arm: str) -> None:
    with serve(tmp_path, arm, package) as sim:
        sim.wait_ready()
        ours = until_ready(normal(sim.log(), "double"))
    real = until_ready(normal((CAPTURES / f"{arm}.log").read_text(), "real"))
    assert [re.sub("cuda graph: (True|False)", "cuda graph: ?", line) for line in ours] == [
        re.sub("cuda graph: (True|False)", "cuda graph: ?", line) for line in real
    ]


def test_sigterm_writes_the_real_ends_lines_and_has_its_status(tmp_path: Path, package: str) -> None:
    real = normal((CAPTURES / "baseline.log").read_text(), "real")
    at = next(n for n, line in enumerate(real) if line.startswith("SIGTERM received."))
    with serve(tmp_path, "baseline", package) as sim:
        sim.wait_ready()
        sim.process.terminate()
        assert sim.process.wait(20) == -signal.SIGKILL
        ours = normal(sim.log(), "double")
    begin = next(n for n, line in enumerate(ours) if line.startswith("SIGTERM received."))
    assert ours[begin:] == real[at:]


def test_a_killed_scheduler_writes_the_real_ends_lines(tmp_path: Path, package: str) -> None:
    real = normal((CAPTURES / "ngram.log").read_text(), "real")
    at = next(n for n, line in enumerate(real) if line.startswith("SIGQUIT received."))
    with serve(tmp_path, "ngram", package) as sim:
        sim.wait_ready()
        victim = next(pid for pid, title in sim.children().items() if title == "sglang::scheduler_TP1")
        # A child of the process that this test started, in its session.
        os.kill(victim, signal.SIGKILL)
        assert sim.process.wait(20) == -signal.SIGKILL
        ours = normal(sim.log(), "double")
    begin = next(n for n, line in enumerate(ours) if line.startswith("SIGQUIT received."))
    assert ours[begin:] == real[at:]


def test_every_difference_has_a_reason() -> None:
    assert all(len(entry["reason"]) > 5 for part in DIFFERENCES.values() for entry in part)
