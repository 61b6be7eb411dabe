"""fuser's two streams. Expectations: cases/07, written by hand; and a real fuser on a real node."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from conftest import NODES

from servelab.shared.fuser import ERROR, HOLDERS, NOBODY, fuser, parse
from servelab.shared.gpu_holders import PROTECT, is_listed

CASE = Path(__file__).parent / "cases" / "07-fuser-streams"
EXPECTED = json.loads((CASE / "expected.json").read_text())
needs_fuser = pytest.mark.skipif(not shutil.which("fuser"), reason="psmisc is not installed")


def test_pids_come_from_stdout_only():
    answer = parse((CASE / "fuser_v.stdout").read_text(), (CASE / "fuser_v.stderr").read_text(), 0)
    assert answer.outcome == HOLDERS
    assert answer.pids == sorted(int(pid) for pid in EXPECTED["holders"])
    assert answer.incomplete is EXPECTED["incomplete_view"]


def test_the_protect_list_spares_what_it_must():
    killable = [int(pid) for pid, name in EXPECTED["holders"].items() if not is_listed([name], PROTECT)]
    assert sorted(killable) == EXPECTED["kill"]
    # fuser's table shows 15 characters of a name, and so does the kernel.
    assert is_listed(["nvidia-persiste"], PROTECT) == "nvidia-persistenced"


def test_status_1_is_nobody_or_an_error_and_the_two_are_told_apart():
    nobody = parse((CASE / "nobody.stdout").read_text(), "", EXPECTED["nobody"]["rc"])
    missing = parse("", (CASE / "glob_missing.stderr").read_text(), EXPECTED["glob_missing"]["rc"])
    assert nobody.outcome == NOBODY
    assert missing.outcome == ERROR and missing.detail == "/dev/nvidia* does not exist"


def test_nobody_in_an_incomplete_view_says_so():
    answer = parse("", "Cannot stat file /proc/1/fd/7: Permission denied\n", 1)
    assert answer.outcome == NOBODY and answer.incomplete and answer.pids == []


def test_a_missing_fuser_is_an_error(tmp_path):
    answer = fuser(["/dev/null"], executable=str(tmp_path / "fuser"))
    assert answer.outcome == ERROR and "psmisc" in answer.detail


@needs_fuser
def test_the_real_fuser_finds_a_holder_and_kills_it(gpu_dir, hold):
    process = hold(0)
    node = str(gpu_dir / NODES[0])
    assert fuser([node]).pids == [process.pid]
    assert fuser([str(gpu_dir / NODES[1])]).outcome == NOBODY
    assert fuser([str(gpu_dir / "nvidia7")]).outcome == ERROR
    assert fuser([node], "KILL").pids == [process.pid]
    assert process.wait(5) == -9
    assert fuser([node]).outcome == NOBODY
