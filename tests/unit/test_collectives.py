"""The measurement of ways to all-reduce: what an arm came to, and what its latencies would make of a model's step."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import yaml

from servelab.cli import main
from servelab.collectives.arms import ARMS, Arm, environment
from servelab.collectives.command import devices, model_from
from servelab.collectives.drive import judge, run_arm
from servelab.collectives.predict import Model, crossovers, latency_us, model_of, predict
from servelab.collectives.words import report
from servelab.shared.modes import merge

KIMI = Model(61, 7168, "config.json")
MODES = Path(__file__).parents[2] / "roles/sglang_server/vars/modes"


def row(median: float, spread: float = 0.0) -> dict[str, Any]:
    return {"median_us": median, "min_us": median - spread, "p90_us": median + spread, "samples": 30}


def arm(name: str, mode: str, points: dict[int, dict[str, Any]], status: str = "ok", **more: Any) -> dict[str, Any]:
    rows = {str(size): {mode: point} for size, point in points.items()}
    return {"name": name, "status": status, "reason": None, "rows": rows, "not_taken": [], "ready": {}, **more}


def test_the_storys_verify_step_is_122_all_reduces_of_42_kib() -> None:
    assert (KIMI.allreduces, KIMI.message(1), KIMI.message(3)) == (122, 14336, 43008)
    slow = arm("nccl", "eager", {14336: row(222), 43008: row(240)})
    fast = arm("pcie_ipc", "eager", {14336: row(12), 43008: row(20)})
    _, verify = predict([slow, fast], KIMI, [1, 3], "nccl")["steps"]
    # 122 x 240 µs = 29.28 ms, 122 x 20 µs = 2.44 ms.
    assert verify["arms"]["nccl"]["eager"] == {"us": 240, "step_ms": 29.28, "gain_ms": 0}
    assert verify["arms"]["pcie_ipc"]["eager"] == {"us": 20, "step_ms": 2.44, "gain_ms": 26.84}


def test_the_model_is_read_where_its_config_keeps_it() -> None:
    assert model_of({"num_hidden_layers": 16, "hidden_size": 2048}, "x") == Model(16, 2048, "x")
    kimi = {"model_type": "kimi_k25", "text_config": {"num_hidden_layers": 61, "hidden_size": 7168}}
    assert model_of(kimi, "x").allreduces == 122
    with pytest.raises(ValueError, match=r"x names no num_hidden_layers and hidden_size: give --layers and --hidden"):
        model_of({"hidden_size": 2048}, "x")


def test_between_two_measured_sizes_it_is_straight_in_log_log_and_outside_unknown() -> None:
    one = arm("nccl", "graph", {1024: row(10), 4096: row(40)})
    assert latency_us(one, "graph", 4096) == 40
    assert latency_us(one, "graph", 2048) == pytest.approx(20)
    assert latency_us(one, "graph", 512) is latency_us(one, "graph", 8192) is latency_us(one, "eager", 2048) is None


def test_wrong_sums_have_no_latency_and_no_crossover() -> None:
    right = arm("nccl", "graph", {1024: row(10), 4096: row(10)})
    wrong = arm("custom_ar_pcie", "graph", {1024: row(1), 4096: row(99)}, status="wrong")
    assert latency_us(wrong, "graph", 1024) is None
    assert crossovers(wrong, right, "graph") == []
    assert list(predict([right, wrong], KIMI, [1], "nccl")["steps"][0]["arms"]) == []


def test_a_crossover_is_between_the_sizes_that_decide() -> None:
    nccl = arm("nccl", "graph", {1024: row(40), 16384: row(40), 65536: row(40)})
    # Half at 1 KiB, twice at 64 KiB; at 16 KiB the samples overlap. In log-log the middle is sqrt(1024 x 65536) = 8192.
    custom = arm("custom", "graph", {1024: row(20), 16384: row(39, spread=5), 65536: row(80)})
    assert crossovers(custom, nccl, "graph") == [pytest.approx(8192)]
    assert crossovers(arm("noise", "graph", {1024: row(39, 3), 65536: row(41, 3)}), nccl, "graph") == []


def events(*kinds: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"event": "ready", "world_size": 2}, *kinds]


LATENCY = {"event": "row", "bytes": 1024, "mode": "eager", **row(9)}
RIGHT = {"event": "check", "bytes": 1024, "mode": "eager", "elements": 1536, "wrong": 0}
GARBAGE = {"event": "check", "bytes": 43008, "mode": "graph", "elements": 64512, "wrong": 64500}
END = {"event": "end"}


def test_an_arm_is_ok_only_when_it_ended_and_every_sum_was_right() -> None:
    assert judge(events(RIGHT, LATENCY, END), [0, 0], None, "")["status"] == "ok"
    cut = judge(events(RIGHT, LATENCY), [0, 0], None, "")
    assert (cut["status"], cut["reason"]) == ("failed", "Its processes ended with 0, 0: It wrote nothing.")
    assert cut["rows"] == {"1024": {"eager": row(9)}}
    died = judge(events(), [1, -9], None, "Traceback\nRuntimeError: invalid device ordinal\n")
    assert died["reason"] == "Its processes ended with 1, -9: RuntimeError: invalid device ordinal"
    # Of a real one (SGLang 0.5.15, two cards): torch has the last word, which says nothing.
    torn = (
        "[rank0]: AssertionError: world group is not initialized\n"
        "[rank0]:[W1130 03:48:06 ProcessGroupNCCL.cpp:1575] Warning: WARNING: destroy_process_group() was not called\n"
    )
    found = judge(events(), [1, 1], None, torn)["reason"]
    assert found == "Its processes ended with 1, 1: AssertionError: world group is not initialized"


def test_wrong_sums_are_named_before_everything_else() -> None:
    assert judge(events(RIGHT, GARBAGE, LATENCY, END), [0, 0], None, "") | {"rows": 0, "ready": 0} == {
        "status": "wrong",
        "reason": "Wrong sums: 64500 of 64512 elements at 43008 bytes (graph).",
        "rows": 0,
        "checked": 2,
        "not_taken": [],
        "ready": 0,
    }


def test_a_hang_says_where_it_was() -> None:
    begun = {"event": "begin", "bytes": 8192, "what": "graph"}
    hung = judge(events(RIGHT, LATENCY, begun), [-9, -9], 300, "")
    assert (hung["status"], hung["reason"]) == (
        "hung",
        "It did not end within 300 s and was killed in graph at 8192 bytes.",
    )
    before = judge([], [-9, -9], 300, "")
    assert before["reason"] == "It did not end within 300 s and was killed before the first size."


def test_a_backend_that_does_not_come_up_is_refused_in_its_own_words() -> None:
    words = "CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs."
    refused = judge([{"event": "refused", "reason": words}], [0, 0], None, "")
    assert (refused["status"], refused["reason"], refused["rows"]) == ("refused", words, {})


def worker(tmp_path: Path, body: str) -> list[str]:
    """The command of a worker whose rank 0 does `body`: `out` is the file, `say(**values)` writes an event into it."""
    program = tmp_path / "worker.py"
    head = """\
        import json, os, sys, time
        rank = int(os.environ["RANK"])
        out = next(word.partition("=")[2] for word in sys.argv if word.startswith("--out="))
        def say(**values):
            with open(out, "a") as file:
                file.write(json.dumps(values) + "\\n")
    """
    program.write_text(textwrap.dedent(head) + textwrap.dedent(body))
    return [sys.executable, str(program)]


def test_every_rank_has_its_place_and_the_arms_environment(tmp_path: Path) -> None:
    body = """
        names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "NCCL_ALGO", "NCCL_PROTO", "NCCL_NVLS_ENABLE", "KEPT")
        with open(f"{out}.{rank}", "w") as file:
            json.dump([os.environ.get(name) for name in names], file)
        if rank == 0:
            say(event="ready", world_size=3)
            say(event="end")
    """
    base = {"NCCL_ALGO": "Tree", "NCCL_NVLS_ENABLE": "0", "KEPT": "yes"}
    ran = run_arm(Arm("a", "nccl", "", {"NCCL_PROTO": "LL"}), worker(tmp_path, body), 3, tmp_path, limit=30, base=base)
    assert (ran["status"], ran["env"]) == ("ok", {"NCCL_PROTO": "LL"})
    for rank in range(3):
        seen = json.loads((tmp_path / f"a.jsonl.{rank}").read_text())
        assert seen == [str(rank), str(rank), "3", None, "LL", "0", "yes"]


def test_a_hanging_arm_is_killed_and_keeps_what_it_measured(tmp_path: Path) -> None:
    body = """
        if rank == 0:
            say(event="row", bytes=1024, mode="eager", median_us=1, min_us=1, p90_us=1, samples=1)
            say(event="begin", bytes=2048, what="eager")
        time.sleep(600)
    """
    ran = run_arm(Arm("a", "nccl", ""), worker(tmp_path, body), 2, tmp_path, limit=1.5)
    assert ran["status"] == "hung"
    assert "killed in eager at 2048 bytes" in ran["reason"]
    assert list(ran["rows"]) == ["1024"]


def test_one_dead_rank_ends_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servelab.collectives.drive.GRACE", 0.2)
    body = """
        if rank == 1:
            sys.exit("CUDA error: an illegal memory access was encountered")
        time.sleep(600)
    """
    ran = run_arm(Arm("a", "nccl", ""), worker(tmp_path, body), 2, tmp_path, limit=60)
    assert ran["status"] == "failed"
    assert ran["reason"] == "Its processes ended with -9, 1: CUDA error: an illegal memory access was encountered"


@pytest.mark.parametrize("name", [arm.name for arm in ARMS.values() if arm.mode])
def test_an_arm_sets_what_its_mode_sets(name: str) -> None:
    merged = merge({path.stem: yaml.safe_load(path.read_text()) for path in MODES.glob("*.yml")}, str(ARMS[name].mode))
    concerns = {key: value for key, value in merged["env"].items() if key.startswith(("NCCL_", "SGLANG_"))}
    if ARMS[name].backend != "nccl":
        # What such a mode leaves to NCCL is measured by the arms of NCCL.
        concerns = {key: value for key, value in concerns.items() if not key.startswith("NCCL_")}
    assert dict(ARMS[name].env) == concerns


def test_an_arm_is_free_of_what_the_caller_set() -> None:
    base = {"NCCL_PROTO": "LL128", "SGLANG_FORCE_CUSTOM_AR_PCIE": "1", "NCCL_DEBUG": "INFO", "PATH": "/bin"}
    assert environment(ARMS["nccl"], base) == {"NCCL_DEBUG": "INFO", "PATH": "/bin"}


@pytest.mark.parametrize(
    ("gpus", "world", "visible", "problem"),
    [
        ("GPU-5f1c,GPU-77aa", None, "", "are not indices such as 0,1,2,3"),
        (None, None, "GPU-5f1c", "reads CUDA_VISIBLE_DEVICES as numbers"),
        ("0,0", None, "", "name one card twice"),
        ("0,1", 4, "", "4 processes need as many GPUs"),
        ("3", None, "", "needs two GPUs at least, and there is 1"),
    ],
)
def test_gpus_that_cannot_be_used_are_refused(gpus: str | None, world: int | None, visible: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        devices(gpus, world, {"CUDA_VISIBLE_DEVICES": visible} if visible else {})


def test_gpus_are_indices() -> None:
    assert devices("4,5,6,7", None, {}) == ([4, 5, 6, 7], 4)
    assert devices(None, 2, {"CUDA_VISIBLE_DEVICES": "1,3,5"}) == ([1, 3], 2)


def test_the_model_is_given_read_or_the_storys(tmp_path: Path) -> None:
    none = {"layers": None, "hidden": None, "model": None}
    assert model_from(argparse.Namespace(**none)) == Model(61, 7168, "assumed: Kimi-K2.5's")
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 16, "hidden_size": 2048}')
    assert model_from(argparse.Namespace(**none | {"model": tmp_path})).allreduces == 32
    with pytest.raises(ValueError, match=r"nowhere/config\.json cannot be read"):
        model_from(argparse.Namespace(**none | {"model": tmp_path / "nowhere"}))


def test_the_command_writes_the_result_and_says_what_failed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    body = """
        if rank == 0:
            say(event="ready", world_size=2, device="invented", torch="2", nccl="2")
            backend = next(word.partition("=")[2] for word in sys.argv if word.startswith("--backend="))
            if backend == "custom_ar" and "SGLANG_FORCE_CUSTOM_AR_PCIE" not in os.environ:
                say(event="refused", reason="not on more than two PCIe-only GPUs")
            else:
                wrong = 7 if backend == "custom_ar" else 0
                say(event="check", bytes=43008, mode="eager", elements=100, wrong=wrong)
                say(event="row", bytes=43008, mode="eager", median_us=200, min_us=190, p90_us=210, samples=30)
                say(event="end")
    """
    command = " ".join(worker(tmp_path, body))
    out = tmp_path / "out"
    words = ["collectives", f"--out={out}", "--world=2", "--arms=nccl,custom_ar_unforced,custom_ar_pcie"]
    assert main([*words, f"--worker={command}"]) == 3
    result = json.loads((out / "collectives.json").read_text())
    assert [arm["status"] for arm in result["arms"]] == ["ok", "refused", "wrong"]
    assert result["prediction"]["steps"][1]["arms"] == {"nccl": {"eager": {"us": 200, "step_ms": 24.4, "gain_ms": 0}}}
    said = capsys.readouterr().out
    assert said.rstrip("\n") == report(result).rstrip("\n") == (out / "collectives.md").read_text().rstrip("\n")
    assert "| **42 KiB** ◄ | 200.0 | 200.0 |" in said
    assert "custom_ar_pcie (WRONG SUMS)" in said
    assert "- custom_ar_pcie: nothing was forced here, because SGLang refuses neither two cards nor NVLink" in said
    assert "- custom_ar_unforced: **refused** – not on more than two PCIe-only GPUs" in said
    progress = json.loads((out / "progress.json").read_text())
    assert (progress["state"], progress["valid"]) == ("done", False)
    assert progress["sentence"] == "1 of 3 ways measured; custom_ar_pcie wrong"
