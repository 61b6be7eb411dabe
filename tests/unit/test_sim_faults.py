"""Each failure of the story on demand, in the words of three releases; and those that follow from flags alone."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from sim_process import Sim, release

RELEASES = ("0.5.10", "0.5.12", "0.5.23")
FLAGS = ("--tp-size", "2", "--mem-fraction-static", "0.55")
QUICK = {"time_scale": 200, "load_seconds": 1}


def ended(tmp_path: Path, version: str, *flags: str, **more: Any) -> tuple[int, str]:
    """Start a server that must end by itself; return its exit status and its log."""
    with Sim(tmp_path, *FLAGS, *flags, sglang_package=release(version, tmp_path), **{**QUICK, **more}) as sim:
        status = sim.process.wait(20)
        assert sim.children() == {}
        return status, sim.log()


def in_order(log: str, *patterns: str) -> None:
    at = 0
    for pattern in patterns:
        found = re.compile(pattern, re.MULTILINE).search(log, at)
        assert found, f"{pattern} does not come after:\n{log[:at][-500:]}"
        at = found.end()


INIT = {
    "0.5.10": r" TP1\] Init torch distributed begin\.$",
    "0.5.12": r" TP1\] Init torch distributed begin\.$",
    "0.5.23": r" TP1\] Init parallel begin\.$",
}
KILLED = r"\] Received sigquit from a child process\. It usually means the child failed\.$"
# Lines of srt/managers/scheduler.py, looked up in the wheels.
FRAMES = {
    "0.5.10": r'scheduler\.py", line 3600, in run_scheduler_process\n    scheduler = Scheduler\($',
    "0.5.12": r'scheduler\.py", line 4025, in run_scheduler_process\n    scheduler = Scheduler\($',
    "0.5.23": r"line 6362, in run_scheduler_process\n    scheduler = Scheduler\(server_args, port_args\)$",
}


@pytest.mark.parametrize("version", RELEASES)
def test_out_of_memory_at_the_kv_cache(tmp_path: Path, version: str) -> None:
    status, log = ended(tmp_path, version, faults=["oom_kv_pool"])
    assert status == -signal.SIGKILL
    in_order(
        log,
        INIT[version],
        r" TP0\] Load weight end\.",
        r" TP0\] Scheduler hit an exception: Traceback \(most recent call last\):$",
        FRAMES[version],
        r"^torch\.OutOfMemoryError: CUDA out of memory\. Tried to allocate \d+\.\d\d MiB\. GPU 0 has a total "
        r"capacity of 95\.59 GiB of which ",
        KILLED,
    )
    assert "KV Cache is allocated" not in log
    # Only since 0.5.13 does the end say so itself.
    assert ("kill_process_tree called" in log) == (version == "0.5.23")


@pytest.mark.parametrize("version", RELEASES)
def test_out_of_memory_at_graph_capture(tmp_path: Path, version: str) -> None:
    status, log = ended(tmp_path, version, faults=["oom_graph_capture"])
    assert status == -signal.SIGKILL
    begin, flag = {
        "0.5.23": (r"Capture target decode CUDA graph begin\. backend=full,", "--cuda-graph-max-bs-decode"),
    }.get(
        version, (r"Capture cuda graph begin\. This can take up to several minutes\. avail mem=", "--cuda-graph-max-bs")
    )
    in_order(
        log,
        r" TP0\] KV Cache is allocated\.",
        begin,
        r"^torch\.OutOfMemoryError: CUDA out of memory\.",
        r"^During handling of the above exception, another exception occurred:$",
        r"^Exception: Capture cuda graph failed: CUDA out of memory\.",
        r"^Possible solutions:$",
        rf"^2\. set {flag} to a smaller value \(e\.g\., 16\)$",
        KILLED,
    )


@pytest.mark.parametrize("version", RELEASES)
def test_an_unsupported_architecture(tmp_path: Path, version: str) -> None:
    status, log = ended(tmp_path, version, faults=["unsupported_architecture"])
    assert status == -signal.SIGKILL
    words = {
        "0.5.23": r"^ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs\.$",
    }.get(version, r"^torch\.AcceleratorError: CUDA error: no kernel image is available for execution on the device$")
    in_order(log, r" TP0\] KV Cache is allocated\.", words, KILLED)


def test_flashinfers_fusion_is_refused_by_itself_on_such_cards(tmp_path: Path) -> None:
    status, log = ended(tmp_path, "0.5.23", "--flashinfer-allreduce-fusion-backend", "auto")
    assert status == -signal.SIGKILL
    assert "ValueError: FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs." in log


@pytest.mark.parametrize("version", RELEASES)
def test_an_assertion_ends_the_launcher_before_anything_starts(tmp_path: Path, version: str) -> None:
    status, log = ended(tmp_path, version, faults=["assertion"])
    assert status == 1
    assert log.splitlines()[-1] == (
        "AssertionError: Flashinfer MoE A2A is only supported with flashinfer_cutlass moe runner backend"
    )
    assert "Init" not in log


def test_expert_parallelism_meets_the_assertion_and_then_the_memory(tmp_path: Path) -> None:
    flags = ("--ep-size", "2", "--moe-a2a-backend", "flashinfer")
    status, log = ended(tmp_path, "0.5.12", *flags)
    assert status == 1
    assert "AssertionError: Flashinfer MoE A2A is only supported with flashinfer_cutlass" in log
    status, log = ended(tmp_path / "b", "0.5.12", *flags, "--moe-runner-backend", "flashinfer_cutlass")
    assert status == -signal.SIGKILL
    assert "expert parallel size is adjusted to be the same as the tensor parallel size[2]" in log
    assert "torch.OutOfMemoryError" in log


def test_0_5_23_asserts_something_else(tmp_path: Path) -> None:
    status, log = ended(tmp_path, "0.5.23", "--ep-size", "2", "--moe-a2a-backend", "flashinfer")
    assert status == 1
    assert "AssertionError: Flashinfer MoE A2A requires --attn-dp-size equal to --tp-size" in log


def test_one_nccl_channel_overflows_in_the_story_and_not_elsewhere(tmp_path: Path) -> None:
    status, log = ended(tmp_path, "0.5.23", environ={"NCCL_MAX_NCHANNELS": "1"})
    assert status == -signal.SIGKILL
    assert "torch.OutOfMemoryError" in log
    with Sim(tmp_path, *FLAGS, environ={"NCCL_MAX_NCHANNELS": "1"}, profile="crossing", **QUICK) as sim:
        sim.wait_ready()


@pytest.mark.parametrize("version", RELEASES)
def test_falling_back_to_nccl_is_a_warning_and_serves(tmp_path: Path, version: str) -> None:
    with Sim(tmp_path, *FLAGS, sglang_package=release(version, tmp_path), faults=["fell_back_to_nccl"], **QUICK) as sim:
        sim.wait_ready()
        in_order(
            sim.log(),
            INIT[version],
            r" TP1\] Setup Custom allreduce failed with CUDART error: .* --disable-custom-all-reduce explicitly\.$",
            r"The server is fired up and ready to roll!$",
        )


@pytest.mark.parametrize("version", RELEASES)
def test_a_hang_in_nccl_says_and_ends_nothing(tmp_path: Path, version: str) -> None:
    with Sim(tmp_path, *FLAGS, sglang_package=release(version, tmp_path), faults=["hang_nccl_init"], **QUICK) as sim:
        until = time.monotonic() + 10
        while "sglang is using nccl==" not in sim.log():
            assert time.monotonic() < until
            time.sleep(0.05)
        before = sim.log()
        time.sleep(1)
        assert sim.log() == before
        assert sim.process.poll() is None
        assert len(sim.children()) == 3
        # Nobody has set a handler yet.
        sim.process.terminate()
        assert sim.process.wait(5) == -signal.SIGTERM


@pytest.mark.parametrize("version", RELEASES)
def test_death_on_the_first_request(tmp_path: Path, version: str) -> None:
    with Sim(
        tmp_path, *FLAGS, sglang_package=release(version, tmp_path), faults=["death_on_first_request"], **QUICK
    ) as sim:
        sim.wait_ready()
        with pytest.raises(OSError):
            sim.ask("POST", "/v1/completions", {"prompt": "x", "max_tokens": 4})
        assert sim.process.wait(10) == -signal.SIGKILL
        in_order(
            sim.log(),
            r"ready to roll!$",
            r" TP1\] Scheduler hit an exception: Traceback",
            r"^triton\.runtime\.errors\.OutOfResources: out of resource: shared memory, Required: 106000, "
            r"Hardware limit: 101376\.",
            r"\] SIGQUIT received\. signum=None, frame=None\. It usually means one child failed\.$",
        )
        assert ("Sleeping 5 seconds before crash diagnostics" in sim.log()) == (version == "0.5.23")


def test_garbage_is_served_as_if_it_were_an_answer(tmp_path: Path) -> None:
    with Sim(tmp_path, faults=["garbage_output"], **QUICK) as sim:
        sim.wait_ready()
        body = {"prompt": "The capital of France is", "max_tokens": 5, "temperature": 0}
        answer = sim.document("POST", "/v1/completions", body)
        assert answer["choices"][0]["text"] == "!!!!!"
        assert answer["usage"]["completion_tokens"] == 5


def test_an_unknown_fault_is_refused_with_the_known_ones(tmp_path: Path) -> None:
    with Sim(tmp_path, faults=["fire"]) as sim:
        assert sim.process.wait(10) == 1
        assert "faults must be a list of names from assertion, death_on_first_request, " in sim.log()
