"""Watch something long: look at it again and again, say what is new, give up when nothing is new for too long."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any


class Stalled(Exception):
    """No progress for `seconds`; `last` is the last look that came back, if any."""

    def __init__(self, seconds: float, last: Mapping[str, Any] | None, trouble: str | None) -> None:
        super().__init__(f"no progress for {seconds:.0f} s")
        self.seconds = seconds
        self.last = last
        self.trouble = trouble


class LookFailed(Exception):
    """A look that did not come back, because the connection dropped. Worth another try."""


def watch(
    look: Callable[[], Mapping[str, Any]],
    say: Callable[[str], None],
    clock: Callable[[], float],
    sleep: Callable[[float], None],
    interval: float,
    stall_timeout: float,
) -> Mapping[str, Any]:
    """Look until `state` is done or failed and return that look. The deadline moves with every new `marker`.

    `look` raises LookFailed where the machine could not be asked; that counts as no news. Raises Stalled.
    """
    begun = news = clock()
    marker: object = object()
    last: Mapping[str, Any] | None = None
    said = trouble = None
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
            if last.get("state") in ("done", "failed"):
                return last
        if clock() - news >= stall_timeout:
            raise Stalled(clock() - news, last, trouble)
        sleep(interval)


def _age(seconds: float) -> str:
    return f"{int(seconds) // 60:3d}:{int(seconds) % 60:02d}"
