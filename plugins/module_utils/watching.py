"""Watch something long: look at it again and again, say what is new, give up when nothing is new for too long."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# Looks for which a rank that lost another waits to hear why that one went.
GRACE = 3


class Stalled(Exception):
    """No progress for `seconds`; `last` is the last look that came back, if any."""

    def __init__(self, seconds: float, last: Mapping[str, Any] | None, trouble: str | None) -> None:
        super().__init__(f"no progress for {seconds:.0f} s")
        self.seconds = seconds
        self.last = last
        self.trouble = trouble


class LookFailed(Exception):
    """A look that did not come back, because the connection dropped. Worth another try."""


class Party:
    """Watchers that belong together, one for each guest of a server over several; they tell each other through files.

    The first answers for all: the others are done when it is. Whoever fails ends the others with its own cause.
    """

    def __init__(self, directory: Path, name: str, first: bool) -> None:
        self.first = first
        self._directory, self._name = directory, name
        directory.mkdir(parents=True, exist_ok=True)

    def tell(self, look: Mapping[str, Any]) -> None:
        """Let the others know how far this one is."""
        note = {key: look.get(key) for key in ("state", "marker", "cause", "remedy", "evidence", "tail", "peer_lost")}
        beside = self._directory / f".{self._name}"
        beside.write_text(json.dumps({**note, "name": self._name, "first": self.first}), encoding="utf-8")
        beside.replace(self._directory / f"{self._name}.json")

    def others(self) -> list[dict[str, Any]]:
        """What the others told last."""
        notes = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(self._directory.glob("*.json"))]
        return [note for note in notes if note["name"] != self._name]

    def cause(self, grace: bool) -> dict[str, Any] | None:
        """The failure of another: one that has a cause of its own; after the `grace`, one that only lost a peer."""
        failed = [note for note in self.others() if note["state"] == "failed"]
        own = [note for note in failed if not note["peer_lost"]]
        note = next(iter(own or ([] if grace else failed)), None)
        if note is None:
            return None
        cause = f"{note['name']} ended, and with it the server over several guests: {note['cause']}"
        return {**note, "cause": cause, "by": note["name"]}


def watch(
    look: Callable[[], Mapping[str, Any]],
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    interval: float,
    stall_timeout: float,
    party: Party | None = None,
) -> Mapping[str, Any]:
    """Look until `state` is done or failed and return that look. The deadline moves with every new `marker`.

    `look` raises LookFailed where the machine could not be asked; that counts as no news. In a party the end may be
    another's, and its news count as well. Raises Stalled.
    """
    begun = news = clock()
    marker: object = object()
    last: Mapping[str, Any] | None = None
    said = trouble = None
    heard: object = None
    grace = GRACE
    while True:
        try:
            last = look()
            trouble = None
        except LookFailed as failure:
            if trouble is None:
                say(f"{_age(clock() - begun)}  cannot look just now ({failure}); trying again")
            trouble = str(failure)
        else:
            if last.get("marker") != marker:
                marker, news = last.get("marker"), clock()
            if last.get("progress") and last["progress"] != said:
                said = last["progress"]
                say(f"{_age(clock() - begun)}  {said}")
            if party is not None:
                party.tell(last)
            ended = last.get("state") in ("done", "failed")
            if ended and not (party and last.get("peer_lost")):
                return last
        if party is not None:
            others = party.others()
            lost = last is not None and last.get("state") == "failed"
            if cause := party.cause(grace > 0):
                return {**(last or {}), **cause, "state": "failed"}
            if lost and not grace:
                return last or {}
            if lost or any(note["state"] == "failed" for note in others):
                grace -= 1
            if not party.first and any(note["first"] and note["state"] == "done" for note in others):
                return {**(last or {}), "state": "done", "progress": "the first guest has answered"}
            if (markers := [note["marker"] for note in others]) != heard:
                heard, news = markers, clock()
        if clock() - news >= stall_timeout:
            raise Stalled(clock() - news, last, trouble)
        sleep(interval)


def _age(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
