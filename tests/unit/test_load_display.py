"""What a person sees while a level runs."""

import json

import pytest

from servelab.load import progress
from servelab.load.loop import Plan, State


@pytest.fixture
def shown(tmp_path, monkeypatch):
    """A function that shows a state at a second of the clock and returns what was written."""
    display = progress.Progress(tmp_path / "progress.json", [1, 10], output_tokens=100)
    seconds = {"now": 0.0}
    monkeypatch.setattr(progress.time, "monotonic", lambda: seconds["now"])

    def show(now: float, concurrency: int, **state: int) -> dict:
        seconds["now"] = now
        plan = Plan(concurrency, concurrency, min_seconds=10, min_requests=1, timeout=10, drain=True)
        display.level(plan, State(**state), clock_ns=0)
        return json.loads((tmp_path / "progress.json").read_text())

    return show


def test_the_rate_is_what_arrived_in_the_last_seconds(shown):
    shown(1, 1, bytes_read=10_000, ended=1, bytes_of_ended=20_000)
    # 20 000 bytes are a response of 100 tokens; 40 000 in 2 s are 200 tokens in 2 s.
    assert shown(3, 1, bytes_read=50_000, ended=2, bytes_of_ended=40_000)["tok_s"] == 100.0


def test_a_new_level_starts_without_the_last_ones_bytes(shown):
    shown(1, 1, bytes_read=10_000, ended=1, bytes_of_ended=20_000)
    shown(2, 1, bytes_read=90_000, ended=2, bytes_of_ended=40_000)
    assert shown(3, 10, bytes_read=500, ended=1, bytes_of_ended=400)["tok_s"] is None
    # 400 bytes a response: 800 more bytes in 1 s are 200 tokens.
    assert shown(4, 10, bytes_read=1300, ended=1, bytes_of_ended=400)["tok_s"] == 200.0
