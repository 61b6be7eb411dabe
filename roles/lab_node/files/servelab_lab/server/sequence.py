"""One prompt on its way through the engine: its text, its stop strings, its times, and what may be asked about it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from .engine import Request
from .text import Continuation, Garbage, Thinking
from .wire import stopped_by

if TYPE_CHECKING:
    from .api import Api

# What a step yielded: text, tokens, the reason if it was the last, and what stopped it.
Deliver = Callable[[str, int, "str | None", "int | str | None"], None]


class Prompt(Protocol):
    """What a sequence needs to know of a request."""

    @property
    def words(self) -> list[str]: ...
    @property
    def prompt_tokens(self) -> int: ...
    @property
    def max_tokens(self) -> int: ...
    @property
    def ignore_eos(self) -> bool: ...
    @property
    def stop(self) -> tuple[str, ...]: ...
    @property
    def rid(self) -> str | None: ...


class Sequence:
    """Times are wall seconds since 1970; `first` and `finished` are None until then. `deliver` hears of every step."""

    def __init__(self, api: Api, prompt: Prompt, *, thinks: bool = False) -> None:
        self._api, self._stop = api, prompt.stop
        self.rid = prompt.rid or os.urandom(16).hex()
        self.received = time.time()
        self.first: float | None = None
        self.finished: float | None = None
        self.text = ""
        self.deliver: Deliver
        faults = api.info.config.faults
        kind = Garbage if "garbage_output" in faults else Thinking if thinks else Continuation
        self._says = kind(prompt.words, api.answers)
        self.request = Request(
            prompt.prompt_tokens,
            prompt.max_tokens,
            self._says.pieces(),
            self._watch if prompt.stop else self._take,
            stops_at=None if prompt.ignore_eos else self._says.natural_length,
            seed=api.ordinal(),
            words=prompt.words,
            again=self._says.pieces,
        )

    @property
    def cached_tokens(self) -> int:
        return self.request.cached_tokens or 0

    def start(self, deliver: Deliver) -> None:
        """Queue it."""
        self.deliver = deliver
        self._api.sequences[self.rid] = self
        self._api.driver.submit(self.request)

    def _take(self, text: str, tokens: int, reason: str | None) -> None:
        if self.first is None:
            self.first = time.time()
        if reason is None:
            self.deliver(text, tokens, None, None)
        else:
            self._finish(text, tokens, reason, stopped_by(reason, None))

    def _watch(self, text: str, tokens: int, reason: str | None) -> None:
        """End at the first stop string, with the text before it and the tokens up to its end."""
        before = len(self.text)
        self.text += text
        found = [(self.text.find(stop), stop) for stop in self._stop if stop in self.text]
        if not found:
            self._take(text, tokens, reason)
            return
        if self.first is None:
            self.first = time.time()
        at, stop = min(found)
        counted = self.text[: at + len(stop)].count(" ") - self.text[:before].count(" ")
        self._api.driver.engine.cancel(self.request)
        # A stop string that began in an earlier chunk has been sent in part, and cannot be taken back.
        self._finish(self.text[before : max(at, before)], max(counted, 0), "stop", stop)

    def _finish(self, text: str, tokens: int, reason: str, matched: int | str | None) -> None:
        self.finished = time.time()
        self._api.sequences.pop(self.rid, None)
        self.deliver(text, tokens, reason, matched)
        self._api.finished(self)
