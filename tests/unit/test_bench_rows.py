"""Rows of sglang.bench_serving: case 14, and what else its files do."""

import json
from pathlib import Path

import pytest

from servelab import bench_rows
from servelab.cli import main

CASE = Path(__file__).parent / "cases" / "14-bench-jsonl"


def test_the_case() -> None:
    expected = json.loads((CASE / "expected.json").read_text())
    rows, lost = bench_rows.read(CASE / "results.jsonl", requested=100)
    assert len(rows) + len(lost) == expected["rows"] == 5
    assert sum(row.usable for row in rows) == expected["usable"] == 2
    assert lost == [lost[0]]
    assert lost[0].startswith("results.jsonl:5 is cut off")
    first, second, third, fourth = rows
    assert first.values["request_rate"] is None  # Infinity
    assert second.ms_per_token == 19.53  # 10 streams / 512 tok/s, not 43
    assert second.notices[0] == "its inter-token latency is per chunk, not per token"
    assert bench_rows.differences(first, second) == ["mem_fraction_static: 0.88 and 0.55"]
    assert third.problems[0].startswith("39 of 100 requests failed or are missing")
    assert fourth.problems == ["no request was completed: its zeros are no latencies"]
    assert fourth.ms_per_token is None
    assert "half of it on average" in first.notices[-1]


def test_what_is_printed_is_strict_json_without_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read-bench", str(CASE / "results.jsonl"), "--requested", "100", "--json"]) == 1
    said = capsys.readouterr().out
    assert "SENTINEL" not in said

    def refuse(name: str) -> None:
        raise AssertionError(name)

    lines = said.splitlines()
    assert [json.loads(line, parse_constant=refuse)["usable"] for line in lines[:4]] == [True, True, False, False]


def test_for_a_person(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read-bench", str(CASE / "results.jsonl"), "--requested", "100"]) == 1
    said = capsys.readouterr().out
    assert "SENTINEL" not in said
    assert "not comparable with line 1 as it is: mem_fraction_static: 0.88 and 0.55" in said
    assert said.count("NOT USABLE") == 2


def test_without_the_number_asked_for_it_says_what_cannot_be_seen(tmp_path: Path) -> None:
    line = {"completed": 7, "output_throughput": 70.0, "max_concurrency": 1, "random_range_ratio": 1.0}
    (tmp_path / "r.jsonl").write_text(json.dumps(line) + "\n\n[1]\n")
    (row,), lost = bench_rows.read(tmp_path / "r.jsonl")
    assert (row.usable, row.ms_per_token, len(lost)) == (True, 14.29, 1)
    assert row.notices == ["the row does not say how many requests were asked for: failed ones cannot be seen"]
    (more,), _ = bench_rows.read(tmp_path / "r.jsonl", requested=6)
    assert more.problems == ["7 requests completed where 6 were asked for"]


def test_a_file_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["read-bench", str(tmp_path / "none")]) == 2
    assert "none" in capsys.readouterr().err
