"""Once through HTTP: a whole campaign against two simulated servers whose crossover is known to be C = 40.

Three minutes on two cores, so only with SERVELAB_SLOW=1; the statistics alone are proved in test_stats_crossover.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from sim_process import ROOT, Sim

from servelab import bundle, verify
from servelab.campaign import spec
from servelab.campaign.drive import Outcome, drive
from servelab.compare import answer, pairs

COMMON = ["--cuda-graph-max-bs-decode", "128", "--max-running-requests", "256"]
FLAGS = {
    "baseline": [],
    "eagle3": [
        *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d"),
        *("--speculative-num-steps", "2", "--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
    ],
}
WANTED = {"description": "x", "modes": ["baseline", "eagle3"], "levels": [10, 30, 70], "repetitions": 3}


@pytest.mark.skipif(not os.environ.get("SERVELAB_SLOW"), reason="takes minutes: SERVELAB_SLOW=1 runs it")
def test_the_interval_of_a_measured_campaign_holds_the_truth(tmp_path: Path) -> None:
    made = 0

    def runner(
        mode: str,
        levels: list[int],
        seed: int,
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
        variables: Mapping[str, Any],
    ) -> Outcome:
        nonlocal made
        made += 1
        run_id = f"20261129T18{made:02d}00Z-{mode}"
        path = tmp_path / "http" / run_id
        words = ["--levels", ",".join(map(str, levels)), "--mode", mode, "--seed", str(seed), "--out", str(path)]
        words += ["--min-seconds", "20", "--min-waves", "1.5", "--input-tokens", "64", "--output-tokens", "128"]
        with Sim(tmp_path, *COMMON, *FLAGS[mode], time_scale=4, profile="crossing") as sim:
            _ready(sim)
            command = [sys.executable, "-m", "servelab", "load", "--url", f"http://127.0.0.1:{sim.port}", *words]
            subprocess.run(command, env={**os.environ, "PYTHONPATH": f"{ROOT}/src"}, check=False)
        summary = json.loads((path / "summary.json").read_text())
        run = {
            "schema": "servelab.run/1",
            "run_id": run_id,
            "mode": mode,
            "status": "ok",
            "started": f"2026-11-29T18:{made:02d}:00Z",
            "simulated": summary["server"]["simulated"],
        }
        (path / "run.json").write_text(json.dumps(run))
        bundle.seal(path)
        return Outcome("ok", run_id, None)

    drive(spec.check("http", WANTED), tmp_path, runner, print)
    (comparison,) = answer.compare_all(pairs.of_campaign(tmp_path / "http"))
    assert comparison.outcome == "below"
    found = comparison.crossing
    assert found is not None
    assert (found.low or 0) <= 40 <= (found.high or 1000)
    assert found.estimate == pytest.approx(40, rel=0.08)
    for run in comparison.runs:
        assert [figure for figure in verify.figures(run) if not figure.agrees] == []


def _ready(sim: Sim) -> None:
    until = time.monotonic() + 60
    while time.monotonic() < until:
        try:
            if sim.ask("GET", "/health")[0] == 200:
                return
        except OSError:
            pass
        time.sleep(0.3)
    raise AssertionError(sim.log()[-2000:])
