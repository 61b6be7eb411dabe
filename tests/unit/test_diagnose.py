"""`servelab diagnose`: what it prints, its exit statuses, and that no secret gets out."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from servelab.cli import main

CASES = Path(__file__).parent / "cases"
REAL = CASES / "sglang-real"


def test_a_named_cause_with_its_line_and_remedy(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(REAL / "usage_bad_flag.log"), "--exit-status", "2"]) == 0
    first, line, remedy = capsys.readouterr().out.splitlines()
    assert first == (
        "usage: the server refused its command line (unrecognized arguments: --no-such-flag 1); nothing was started"
    )
    assert line == "  line:   sglang serve: error: unrecognized arguments: --no-such-flag 1"
    assert remedy.startswith("  remedy: Correct the mode's args")


def test_case_10_says_what_else_is_wrong_and_keeps_the_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(CASES / "10-ready-then-dead" / "server.log")]) == 0
    out = capsys.readouterr().out
    assert out.startswith("kernel does not fit the GPU: kernel needs more shared memory than sm_120 has\n")
    assert "KV pool 4400 tokens < one request of context 262144" in out
    assert "SENTINEL" not in out


@pytest.mark.parametrize("status", ["137", "-9"])
def test_a_killed_server(status: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(REAL / "eagle3_start.log"), "--exit-status", status]) == 0
    assert "killed: somebody killed the server with signal 9" in capsys.readouterr().out


def test_no_failure_is_told_from_an_unknown_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["diagnose", str(REAL / "sigterm_adaptive.log")]) == 4
    assert main(["diagnose", str(REAL / "eagle3_start.log")]) == 4
    log = tmp_path / "server.log"
    log.write_text("\n".join(f"line {number}" for number in range(50)) + "\napi_key='sk-SENTINEL-77'\n")
    capsys.readouterr()
    assert main(["diagnose", str(log), "--exit-status", "7"]) == 3
    out = capsys.readouterr().out
    assert out.startswith("unknown: the server ended for a reason this catalogue does not know (exit status 7)\n")
    assert "The last 40 lines:\n  line 11\n" in out
    assert out.endswith("  api_key='[redacted]'\n")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\xff\n[Errno 98] bind ('0.0.0.0', 8000)\n")))
    assert main(["diagnose", "-"]) == 0
    assert "port in use: port 8000 on 0.0.0.0" in capsys.readouterr().out


def test_the_kernels_log_is_asked_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kernel = tmp_path / "dmesg"
    kernel.write_text("[ 99.1] NVRM: Xid (PCI:0000:c1:00): 79, pid=1, GPU has fallen off the bus.\n")
    assert main(["diagnose", str(REAL / "eagle3_start.log"), "--exit-status", "-9", "--kernel", str(kernel)]) == 0
    assert "GPU lost: the node's driver reported Xid 79 on PCI:0000:c1:00" in capsys.readouterr().out


def test_wrong_use_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["diagnose", str(tmp_path / "none.log")]) == 2
    assert capsys.readouterr().err == f"{tmp_path}/none.log cannot be read: No such file or directory.\n"
    (tmp_path / "empty").touch()
    assert main(["diagnose", str(tmp_path / "empty")]) == 2
    assert "is empty" in capsys.readouterr().err
