"""The ledger: nothing is lost, what was measured and what others reported stay apart."""

from pathlib import Path

import pytest

from servelab import ledger
from servelab.cli import main

REPORTED = Path(__file__).parents[2] / "campaigns" / "reported.jsonl"


def line(time, mode, status="ok", reason=None, best=100.0, simulated=None):
    return {
        "schema": ledger.SCHEMA,
        "time": time,
        "campaign": "c",
        "mode": mode,
        "status": status,
        "reason": reason,
        "bundle": f"c/{mode}",
        "simulated": simulated,
        "best_tok_s": best,
        "sglang_version": "0.5.23",
    }


def test_failures_are_first_class_and_the_newest_is_first():
    lines = [
        line("2026-11-28", "baseline"),
        line("2026-11-29", "eagle3", "failed", "out of memory | at\ncapture", None),
    ]
    text = ledger.render(lines, [])
    assert "2 runs, 1 without a usable result, 0 simulated" in text
    assert "| 2026-11-29 | eagle3 | failed: out of memory \\| at | — | 0.5.23 | `c/eagle3` |" in text
    assert text.index("2026-11-29") < text.index("2026-11-28")


def test_simulated_is_in_the_row():
    text = ledger.render([line("t", "baseline", simulated={"profile": "story", "time_scale": 5})], [])
    assert "simulated (story, ×5) ok" in text


def test_the_reported_results_are_complete_and_marked_as_such():
    reported = ledger.read(REPORTED, ledger.REPORTED_SCHEMA)
    # The nine ways that the story tried; eagle3 in two setups.
    assert {entry["mode"] for entry in reported} == {
        "baseline",
        "baseline_graph512",
        "eagle3",
        "custom_ar_pcie",
        "eagle3_custom_ar",
        "flashinfer_fusion",
        "nccl_fewer_channels",
        "torch_symm_mem",
        "expert_parallel",
    }
    assert all("not measured here" in entry["source"] for entry in reported)
    text = ledger.render([line("t", "baseline", best=999.0)], reported)
    measured, _, others = text.partition("## Reported, not measured here")
    assert "999.0" in measured
    assert "89.5 tok/s" in others
    assert "89.5" not in measured


def test_the_command_writes_beside_the_ledger(tmp_path, capsys):
    ledger.append(tmp_path / ledger.FILE, line("t", "baseline"))
    assert main(["ledger", "--results", str(tmp_path), "--reported", str(REPORTED)]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "LEDGER.md")
    assert "| t | baseline | ok |" in (tmp_path / "LEDGER.md").read_text()


@pytest.mark.parametrize(
    ("text", "sentence"), [("{torn\n", "line 2, is no JSON"), ('{"schema": "x"}\n', "line 2, is not of schema")]
)
def test_a_line_that_is_none_is_named(tmp_path, text, sentence):
    path = tmp_path / ledger.FILE
    ledger.append(path, line("t", "baseline"))
    with path.open("a") as stream:
        stream.write(text)
    with pytest.raises(ledger.LedgerError, match=sentence):
        ledger.read(path)


def test_no_ledger_yet_is_an_empty_one(tmp_path):
    assert ledger.read(tmp_path / ledger.FILE) == []
