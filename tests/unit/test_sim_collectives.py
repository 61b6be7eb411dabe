"""The lab's collectives are the cost model's, decided as the simulated server decides, and say so: simulated."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from sim_process import PACKAGE, ROOT

from servelab.cli import main
from servelab_lab.server.collectives import events
from servelab_lab.server.config import VARIABLE, Config

CONFIG = Config(sglang_package=str(PACKAGE))
FORCED = {"SGLANG_FORCE_CUSTOM_AR_PCIE": "1", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}


def test_the_default_costs_what_the_profile_says() -> None:
    told = events(CONFIG, PACKAGE, "nccl", 8, [14336, 43008], 7168, {})
    assert told[0]["simulated"] == {"profile": "story", "time_scale": 1.0}
    rows = {(event["bytes"], event["mode"]): event["median_us"] for event in told if event["event"] == "row"}
    # 213.12 + 43008 B / 1.6 GB/s = 240 µs eager, and one token under a graph 26.04 + 8.96 = 35 µs: the story's figures.
    assert rows[43008, "eager"] == 240
    assert rows[14336, "graph"] == 35
    assert told[-1] == {"event": "end"}


def test_what_sglang_refuses_is_refused_in_its_words() -> None:
    (refused,) = events(CONFIG, PACKAGE, "custom_ar", 8, [43008], 7168, FORCED)
    assert refused["event"] == "refused"
    assert "not supported on more than two PCIe-only GPUs" in refused["reason"], "the fixture's sources are not patched"
    (v2,) = events(CONFIG, PACKAGE, "custom_ar_v2", 8, [43008], 7168, {})
    assert v2["reason"].startswith("CustomAllReduceV2 is disabled")


def test_a_patched_release_is_taken_up_to_its_limit_and_garbage_is_played(tmp_path: Path) -> None:
    package = tmp_path / "sglang"
    directory = package / "srt/distributed/device_communicators"
    directory.mkdir(parents=True)
    (package / "version.py").write_text('__version__ = "0.5.23"\n')
    for name in ("custom_all_reduce.py", "custom_all_reduce_utils.py"):
        (directory / name).write_text("# servelab-patch\n")
    sizes = [43008, 2097152]
    told = events(CONFIG, package, "custom_ar", 8, sizes, 7168, FORCED)
    assert [event["bytes"] for event in told if event["event"] == "row"] == [43008, 43008]
    assert {"event": "not_taken", "bytes": 2097152} in told
    assert all(event["wrong"] == 0 for event in told if event["event"] == "check")
    broken = Config(sglang_package="", faults=["garbage_output"])
    played = events(broken, package, "custom_ar", 8, sizes, 7168, FORCED)
    assert [event["wrong"] for event in played if event["event"] == "check"] == [516096, 516096]
    assert all(not e["wrong"] for e in events(broken, package, "nccl", 8, sizes, 7168, {}) if e["event"] == "check")


def test_the_whole_command_with_the_double(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "server.json"
    config.write_text(json.dumps({"sglang_package": str(PACKAGE), "time_scale": 5}))
    monkeypatch.setenv(VARIABLE, str(config))
    monkeypatch.setenv("PYTHONPATH", f"{ROOT}/roles/lab_node/files:{ROOT}/src")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    words = [
        "collectives",
        f"--out={tmp_path}",
        "--world=8",
        f"--worker={sys.executable} -m servelab_lab.server.collectives",
    ]
    assert main([*words, "--arms=nccl,nccl_no_p2p,custom_ar_pcie"]) == 0
    result = json.loads((tmp_path / "collectives.json").read_text())
    assert result["simulated"] == {"profile": "story", "time_scale": 5}
    assert result["prediction"]["steps"][1]["arms"]["nccl"]["eager"] == {"us": 240, "step_ms": 29.28, "gain_ms": 0}
    said = capsys.readouterr().out
    assert said.startswith("# All-reduce on 8 GPUs (simulated)\n")
    assert "simulated: these figures come from the lab's cost model (profile story), not from GPUs." in said
    # 26.04 + s/1600 = 39.06 + s/3200 at 41664 bytes, eager 13.02 more on both sides.
    assert result["prediction"]["crossovers"][0]["arm"] == "nccl_no_p2p"
    assert all(36000 < size < 47000 for crossing in result["prediction"]["crossovers"] for size in crossing["bytes"])
