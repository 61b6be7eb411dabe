"""The P2P probe's supervisor: what hangs or crashes costs its own step only, and every step gets a result."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).parent
SOURCES = HERE.parents[1] / "roles/gpu_p2p/files/p2p"


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++ here")
    binary = tmp_path_factory.mktemp("p2p") / "supervise"
    flags = ["-std=c++17", "-Wall", "-Wextra", "-Werror", "-pthread", f"-I{SOURCES}"]
    subprocess.run([compiler, *flags, "-o", binary, HERE / "p2p_supervise.cc"], check=True)
    done = subprocess.run([binary], capture_output=True, text=True, check=True, timeout=60)
    return {step["name"]: step for step in map(json.loads, done.stdout.splitlines())}


def test_every_step_has_a_result_of_its_kind(results):
    assert {name: step["state"] for name, step in results.items()} == {
        "first": "done",
        "second": "done",
        "hangs": "hung",
        "after a hang": "done",
        "throws": "error",
        "after an error": "done",
        "crashes": "error",
        "leaves": "error",
        "after leaving": "done",
        "alone": "done",
        "alone too": "done",
        "last": "done",
    }


def test_what_went_wrong_is_said(results):
    assert results["hangs"]["error"] == "no answer within 1 s"
    assert results["throws"]["error"] == 'a "quoted" reason '
    assert results["crashes"]["error"] == "the process ended by signal 6"
    assert results["leaves"]["error"] == "the process ended without a result"


def test_steps_share_a_process_until_something_goes_wrong(results):
    process = {name: step.get("measured", {}).get("pid") for name, step in results.items()}
    assert process["first"] == process["second"]
    after = [process[name] for name in ("first", "after a hang", "after an error", "after leaving")]
    assert len(set(after)) == 4


def test_a_step_that_must_be_alone_is_alone(results):
    process = {name: step.get("measured", {}).get("pid") for name, step in results.items()}
    assert len({process[name] for name in ("after leaving", "alone", "alone too", "last")}) == 4
