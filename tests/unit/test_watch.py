"""The deadline follows the progress; a dropped connection is not a dead server."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from servelab.shared.watching import LookFailed, Stalled, watch


class Stage:
    """A clock that moves by sleeping, and looks that were prepared."""

    def __init__(self, looks: list[Any]) -> None:
        self.now = 0.0
        self.looks: Iterator[Any] = iter(looks)
        self.lines: list[str] = []

    def look(self) -> Mapping[str, Any]:
        found = next(self.looks)
        if isinstance(found, Exception):
            raise found
        return found

    def sleep(self, seconds: float) -> None:
        self.now += seconds

    def run(self, stall_timeout: float = 100) -> Mapping[str, Any]:
        return watch(self.look, self.lines.append, lambda: self.now, self.sleep, 10, stall_timeout)


def working(marker: int, progress: str = "loading") -> dict[str, Any]:
    return {"state": "working", "marker": marker, "progress": progress}


def test_every_new_progress_is_said_once_with_its_age() -> None:
    stage = Stage(
        [working(1, "weights 10 %"), working(1, "weights 10 %"), working(2, "weights 20 %"), {"state": "done"}]
    )
    assert stage.run()["state"] == "done"
    assert stage.lines == ["  0:00  weights 10 %", "  0:20  weights 20 %"]


def test_a_start_may_take_for_ever_as_long_as_it_moves() -> None:
    stage = Stage([*(working(number) for number in range(1000)), {"state": "done", "marker": "end"}])
    assert stage.run(stall_timeout=20)["state"] == "done"
    assert stage.now == 10_000


def test_no_news_ends_it_at_the_time_limit() -> None:
    stage = Stage([working(1), working(2), *(working(2) for _ in range(100))])
    with pytest.raises(Stalled) as stalled:
        stage.run(stall_timeout=50)
    assert stage.now == 60
    assert stalled.value.last == working(2)


def test_a_new_sentence_alone_is_no_news() -> None:
    stage = Stage([working(1, f"elapsed {number}") for number in range(100)])
    with pytest.raises(Stalled):
        stage.run(stall_timeout=50)
    assert stage.now == 50


def test_a_failed_probe_ends_it_at_once() -> None:
    stage = Stage([working(1), {"state": "failed", "cause": "x"}, AssertionError("looked again")])
    assert stage.run()["cause"] == "x"


def test_a_dropped_connection_is_tried_again_and_said_once() -> None:
    drop = LookFailed("ssh: reset")
    stage = Stage([working(1), drop, drop, working(2, "listening"), {"state": "done"}])
    assert stage.run()["state"] == "done"
    assert stage.lines[1:] == ["  0:10  cannot look just now (ssh: reset); trying again", "  0:30  listening"]


def test_a_machine_that_never_answers_stalls_and_says_why() -> None:
    stage = Stage([LookFailed("no route")] * 100)
    with pytest.raises(Stalled) as stalled:
        stage.run(stall_timeout=30)
    assert (stalled.value.last, stalled.value.trouble) == (None, "no route")
