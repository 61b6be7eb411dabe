"""One simulated server over two nodes, as SGLang's sources and torch 2.11 have it: meeting, serving, and every end."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from sim_process import Sim, free_port, release

KILLED, PEER = -signal.SIGKILL, "gloo/transport/tcp/pair.cc:547] Connection closed by peer ["


def node(directory: Path, rank: int, meeting: int, *flags: str, tp: int = 4, **config: Any) -> Sim:
    where = directory / str(rank)
    where.mkdir()
    words = ("--tp-size", str(tp), "--nnodes", "2", "--node-rank", str(rank))
    return Sim(where, *words, "--dist-init-addr", f"127.0.0.1:{meeting}", *flags, **config)


@pytest.fixture
def two(tmp_path: Path) -> Iterator[Callable[..., tuple[Sim, Sim]]]:
    """Start both nodes; the follower first, which has to wait for the head."""
    with ExitStack() as stack:

        def start(*flags: str, **config: Any) -> tuple[Sim, Sim]:
            meeting = free_port()
            follower = stack.enter_context(node(tmp_path, 1, meeting, *flags, **config))
            head = stack.enter_context(node(tmp_path, 0, meeting, *flags, **config))
            return head, follower

        yield start


def until(true: Callable[[], bool], seconds: float = 15) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def started(follower: Sim) -> bool:
    assert follower.process.poll() is None, follower.log()
    return "Dummy health check server started in background thread at 127.0.0.1:" in follower.log()


def test_the_head_serves_and_the_other_node_only_says_that_it_lives(two: Callable[..., tuple[Sim, Sim]]) -> None:
    head, follower = two()
    head.wait_ready()
    until(lambda: started(follower))
    assert head.ask("POST", "/v1/completions", {"model": "/m", "prompt": "Hi", "max_tokens": 4})[0] == 200
    assert [follower.ask("GET", path)[0] for path in ("/health", "/health_generate", "/ping")] == [200] * 3
    assert follower.ask("POST", "/v1/completions", {"prompt": "Hi"}) == (404, b'{"detail":"Not Found"}')
    assert follower.ask("GET", "/v1/models")[0] == 404
    # Half of the ranks each, by their numbers in the whole; nobody detokenizes on the second.
    assert sorted(head.children().values()) == [
        "sglang::detokenizer",
        "sglang::scheduler_TP0",
        "sglang::scheduler_TP1",
    ]
    assert sorted(follower.children().values()) == ["sglang::scheduler_TP2", "sglang::scheduler_TP3"]
    log = follower.log()
    assert "TP2] Load weight begin." in log and "TP0]" not in log
    # What only rank 0 says, progress bars among it, and the access log, which is off there.
    for text in ("Uvicorn", "max_total_num_tokens=", "sglang is using nccl", "loading shards", "fired up"):
        assert text in head.log() and text not in log
    assert follower.out.read_text() == ""
    assert "TP2] CustomAllreduce is disabled because this process group spans across nodes." in log


def test_a_node_waits_for_the_other_and_the_head_gives_up_by_counting_ranks(tmp_path: Path) -> None:
    with node(tmp_path, 0, free_port(), "--dist-timeout", "20") as head:
        assert head.process.wait(20) == KILLED
        assert (
            "torch.distributed.DistStoreError: Timed out after 21 seconds waiting for clients. 2/4 clients joined."
            in head.log()
        )
        assert "Init parallel begin." in head.log() and "Load weight begin" not in head.log()
        assert "Received sigquit from a child process. It usually means the child failed." in head.log()


def test_a_node_without_a_head_names_the_address_that_it_tried(tmp_path: Path) -> None:
    meeting = free_port()
    with node(tmp_path, 1, meeting, "--dist-timeout", "20") as follower:
        assert follower.process.wait(20) == KILLED
        assert (
            "torch.distributed.DistNetworkError: The client socket has timed out after 20000ms while trying to "
            f"connect to (127.0.0.1, {meeting})." in follower.log()
        )


def test_both_wait_while_they_wait(two: Callable[..., tuple[Sim, Sim]], tmp_path: Path) -> None:
    meeting = free_port()
    with node(tmp_path, 0, meeting, time_scale=10) as head:
        until(lambda: "Init parallel begin." in head.log())
        time.sleep(0.5)
        assert head.process.poll() is None and "Init parallel ends" not in head.log()


@pytest.mark.parametrize("loading", [True, False])
def test_the_head_falls_when_the_other_is_killed(two: Callable[..., tuple[Sim, Sim]], loading: bool) -> None:
    head, follower = two(load_seconds=200 if loading else 1)
    until(lambda: "Load weight begin" in follower.log() if loading else started(follower))
    if not loading:
        head.wait_ready()
    os.kill(follower.process.pid, signal.SIGKILL)
    assert head.process.wait(20) == KILLED
    for rank in (0, 1):
        assert re.search(rf" TP{rank}\] Scheduler hit an exception: Traceback", head.log())
    assert head.log().count(f"RuntimeError: [/pytorch/third_party/gloo/{PEER}127.0.0.1]:") == 2


@pytest.mark.parametrize("loading", [True, False])
def test_the_other_falls_when_the_head_is_killed(two: Callable[..., tuple[Sim, Sim]], loading: bool) -> None:
    head, follower = two(load_seconds=200 if loading else 1)
    until(lambda: "Load weight begin" in head.log() if loading else started(follower))
    os.kill(head.process.pid, signal.SIGKILL)
    assert follower.process.wait(20) == KILLED
    assert PEER in follower.log() or "Did the remote server shutdown or crash?" in follower.log()
    assert "Received sigquit from a child process. It usually means the child failed." in follower.log()


def test_a_killed_scheduler_takes_its_neighbour_and_the_other_node(two: Callable[..., tuple[Sim, Sim]]) -> None:
    head, follower = two()
    head.wait_ready()
    until(lambda: started(follower))
    victim = next(pid for pid, title in follower.children().items() if title == "sglang::scheduler_TP3")
    os.kill(victim, signal.SIGKILL)
    assert follower.process.wait(20) == KILLED
    assert " TP2] Scheduler hit an exception" in follower.log()
    assert head.process.wait(20) == KILLED


def test_a_node_whose_only_scheduler_was_killed_ends_with_0(two: Callable[..., tuple[Sim, Sim]]) -> None:
    """SGLang's launcher only joins its schedulers there, logs how they ended, and returns."""
    head, follower = two(tp=2)
    head.wait_ready()
    until(lambda: started(follower))
    [victim] = follower.children()
    os.kill(victim, signal.SIGKILL)
    assert follower.process.wait(20) == 0
    assert f"Scheduler or DataParallelController {victim} terminated with -9" in follower.log()
    assert head.process.wait(20) == KILLED


def test_an_orderly_end_of_the_head_is_one_of_the_other(two: Callable[..., tuple[Sim, Sim]]) -> None:
    head, follower = two()
    head.wait_ready()
    until(lambda: started(follower))
    # From 0.5.21 on it does not stop by itself.
    os.kill(follower.process.pid, signal.SIGTERM)
    until(lambda: "SIGTERM received on node_rank 1; waiting for the rank-0 ShutdownReq" in follower.log())
    assert follower.process.poll() is None
    os.kill(head.process.pid, signal.SIGTERM)
    assert head.process.wait(20) == KILLED
    assert follower.process.wait(20) == 0
    assert follower.log().count("terminated with 0") == 2
    assert "Scheduler hit an exception" not in follower.log()


def test_before_0_5_21_it_dies_of_the_signal(two: Callable[..., tuple[Sim, Sim]], tmp_path: Path) -> None:
    head, follower = two(sglang_package=release("0.5.15", tmp_path))
    head.wait_ready()
    until(lambda: started(follower))
    os.kill(follower.process.pid, signal.SIGTERM)
    assert follower.process.wait(20) == -signal.SIGTERM
    assert head.process.wait(20) == KILLED


def test_ranks_that_do_not_divide_are_refused(tmp_path: Path) -> None:
    with node(tmp_path, 0, free_port(), tp=3) as head:
        assert head.process.wait(20) == 1
        assert head.log().rstrip().endswith("AssertionError: tp_size must be divisible by number of nodes")
