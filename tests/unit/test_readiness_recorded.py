"""Recorded starts of a real server, moment by moment: nothing is called ready before it has answered us."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelab.shared.readiness import Answer, Look, Verdict, judge
from servelab.shared.readiness_diagnosis import Exit

RECORDED = Path(__file__).parent / "cases" / "readiness-real"


def moments(name: str, *, others_port: bool = False) -> Iterator[tuple[float, Look]]:
    """A look after every event of a recorded start, as far as one gets without asking for a completion."""
    look = Look(active="active", port=30000, expected_model="synth-llama", short_tokens=8, long_tokens=1000)
    if others_port:
        look.owner = "pid 1683: python3 -m sglang.launch_server"
    for line in (RECORDED / f"{name}.jsonl").read_text().splitlines():
        event = json.loads(line)
        look.elapsed = event["t"]
        if "log" in event:
            look.log += event["log"] + "\n"
        elif event["what"] == "tcp" and not others_port:
            look.owner = "ours" if event["is"] else None
        elif event["what"] == "/health":
            look.health = Answer(event["is"])
        elif event["what"] == "/v1/models":
            look.models = ["synth-llama"]
        elif event["what"] == "exit":
            look.active, look.owner, look.end = "failed", None, Exit("killed", -event["is"], "signal")
        yield event["t"], look


def verdicts(name: str, **how: bool) -> list[tuple[float, Verdict]]:
    return [(at, judge(look)) for at, look in moments(name, **how)]


@pytest.mark.parametrize("name", ["adaptive", "eagle3"])
def test_a_start_that_goes_well_is_at_work_until_it_answers(name: str) -> None:
    seen = verdicts(name)
    assert {verdict.state for _, verdict in seen} == {"working"}
    phases = list(dict.fromkeys(verdict.phase for _, verdict in seen))
    # EAGLE loads and captures for target and draft in turn; the ladder's rungs come last and in this order.
    assert phases[0] == "starting" and phases[-2:] == ["health", "completion"]
    assert [phase for phase in phases if phase in ("loading weights", "capturing CUDA graphs")] != []
    # Port, models and "ready to roll" come before health says 200, and none of them is more than work in progress.
    ready = next(at for at, look in moments(name) if "fired up and ready to roll" in look.log)
    assert next(verdict.state for at, verdict in seen if at >= ready) == "working"


def test_a_port_in_use_is_never_ready_whatever_the_log_says() -> None:
    seen = verdicts("port_in_use", others_port=True)
    assert {verdict.state for _, verdict in seen} == {"failed"}
    assert "held by another process (pid 1683" in str(seen[0][1].cause)
    final = seen[-1][1]
    assert final.cause == "port 30000 on 127.0.0.1 belongs to another process"
    # Without looking at the port's owner it would have passed for ready: the other server answered everything.
    *_, (_, look) = moments("port_in_use", others_port=True)
    assert "fired up and ready to roll" in look.log
    assert look.health is not None and look.health.status == 200


@pytest.mark.parametrize(
    ("name", "cause"),
    [
        ("oom_memfrac_099", "out of GPU memory while CUDA graphs were captured"),
        ("oom_pool_too_small", "no GPU memory is left for the KV cache"),
    ],
)
def test_a_start_that_fails_is_at_work_until_its_first_sign_of_death(name: str, cause: str) -> None:
    seen = verdicts(name)
    first = next(index for index, (_, verdict) in enumerate(seen) if verdict.state == "failed")
    assert {verdict.state for _, verdict in seen[:first]} == {"working"}
    assert {verdict.state for _, verdict in seen[first:]} == {"failed"}
    assert seen[-1][1].cause == cause
