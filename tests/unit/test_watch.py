"""The deadline follows the progress; a dropped connection is not a dead server."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from servelab.shared.watching import LookFailed, Party, Stalled, watch


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


# -- several guests -------------------------------------------------------------------------------------------------


class Guest(Stage):
    """One of several, watched in turns with the others: each sleep lets the next one look."""

    def __init__(self, directory: Path, name: str, first: bool, looks: list[Any]) -> None:
        super().__init__(looks)
        self.party = Party(directory, name, first)

    def run(self, stall_timeout: float = 100) -> Mapping[str, Any]:
        return watch(self.look, self.lines.append, lambda: self.now, self.sleep, 10, stall_timeout, self.party)


FAILED = {"state": "failed", "marker": "end", "cause": "somebody killed it", "remedy": "ask who", "peer_lost": False}
LOST = {"state": "failed", "marker": "end", "cause": "a rank is gone", "remedy": "read its log", "peer_lost": True}
DONE = {"state": "done", "marker": "end"}


def test_the_others_are_done_when_the_first_has_answered(tmp_path: Path) -> None:
    assert Guest(tmp_path, "rank 0 (gpu1)", True, [working(1), DONE]).run() == DONE
    last = Guest(tmp_path, "rank 1 (gpu2)", False, [working(1)]).run()
    assert (last["state"], last["progress"]) == ("done", "the first guest has answered")


def test_the_first_does_not_wait_for_the_others(tmp_path: Path) -> None:
    Party(tmp_path, "rank 1 (gpu2)", False).tell(working(1))
    assert Guest(tmp_path, "rank 0 (gpu1)", True, [DONE]).run() == DONE


def test_one_that_died_ends_the_others_at_once_with_its_own_cause(tmp_path: Path) -> None:
    assert Guest(tmp_path, "rank 1 (gpu2)", False, [working(1), FAILED]).run()["cause"] == "somebody killed it"
    first = Guest(tmp_path, "rank 0 (gpu1)", True, [working(1), working(2)])
    last = first.run()
    assert first.now == 0
    assert (last["state"], last["by"]) == ("failed", "rank 1 (gpu2)")
    assert last["cause"] == "rank 1 (gpu2) ended, and with it the server over several guests: somebody killed it"
    assert last["remedy"] == "ask who"


def test_a_rank_that_only_lost_another_waits_to_hear_why_that_one_went(tmp_path: Path) -> None:
    other = Party(tmp_path, "rank 1 (gpu2)", False)

    class Late(Guest):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            if self.now == 20:
                other.tell(FAILED)

    last = Late(tmp_path, "rank 0 (gpu1)", True, [LOST] * 9).run()
    assert last["cause"] == "rank 1 (gpu2) ended, and with it the server over several guests: somebody killed it"


def test_where_nobody_says_why_the_loss_itself_is_told(tmp_path: Path) -> None:
    first = Guest(tmp_path, "rank 0 (gpu1)", True, [LOST] * 9)
    assert first.run()["cause"] == "a rank is gone" and first.now == 30
    other = Guest(tmp_path, "rank 1 (gpu2)", False, [working(1)] * 9)
    assert other.run()["cause"].endswith("several guests: a rank is gone")


def test_the_first_s_news_are_the_others_news(tmp_path: Path) -> None:
    first = Party(tmp_path, "rank 0 (gpu1)", True)

    class Slow(Guest):
        def sleep(self, seconds: float) -> None:
            super().sleep(seconds)
            first.tell(DONE if self.now == 500 else working(int(self.now)))

    assert Slow(tmp_path, "rank 1 (gpu2)", False, [working(1)] * 99).run(stall_timeout=50)["state"] == "done"


def test_without_news_of_anybody_it_ends_all_the_same(tmp_path: Path) -> None:
    Party(tmp_path, "rank 0 (gpu1)", True).tell(working(7))
    with pytest.raises(Stalled):
        Guest(tmp_path, "rank 1 (gpu2)", False, [working(1)] * 99).run(stall_timeout=50)
