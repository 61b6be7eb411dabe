"""Continuous batching in simulated time: who runs, who waits, and which tokens each step yields.

The engine has no clock of its own. Whoever drives it calls `begin()` when it is idle and `finish_step()` when the step
that `begin()` or the last `finish_step()` announced is over; both return the next step's length in ms, or None when
there is nothing to do. What it cannot tell is in docs/simulator.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .cost import Mode, Profile, accept_length, accept_thresholds, captured, prefill_ms, step_ms

# Steps of the golden ratio fill [0, 1) evenly from any start: the mean acceptance shows after a few steps.
_GOLDEN = 0.6180339887498949


@dataclass
class Spec:
    """What one request's speculation did; `histogram[n]` counts the steps that accepted n drafts."""

    verify_steps: int
    histogram: list[int]

    @property
    def correct_drafts(self) -> int:
        return sum(n * count for n, count in enumerate(self.histogram))


class Request:
    """One sequence: `prompt_tokens` to prefill, then at most `max_tokens` pieces of text for `sink`.

    `sink(text, count, reason)` gets the new text, how many tokens it is, and None, "stop", "length" or "abort".
    `stops_at` is the number of tokens after which end-of-sequence comes (None: never); it counts as one more token.
    """

    __slots__ = (
        "done",
        "draw",
        "generated",
        "left_to_prefill",
        "limit",
        "next_piece",
        "prompt_tokens",
        "sink",
        "spec",
        "stops_at",
    )

    def __init__(
        self,
        prompt_tokens: int,
        max_tokens: int,
        pieces: Iterator[str],
        sink: Callable[[str, int, str | None], None],
        *,
        stops_at: int | None = None,
        seed: int = 0,
    ) -> None:
        self.prompt_tokens = self.left_to_prefill = prompt_tokens
        self.limit = max_tokens
        self.next_piece = pieces.__next__
        self.sink = sink
        self.stops_at = stops_at
        self.generated = 0
        self.done = False
        self.draw = (seed * _GOLDEN) % 1.0
        self.spec = Spec(0, [])


@dataclass(frozen=True)
class PrefillReport:
    """A prefill step that ended, as SGLang's log line wants it."""

    new_requests: int
    new_tokens: int
    running: int
    waiting: int
    pending_tokens: int


@dataclass(frozen=True)
class DecodeReport:
    """The decode steps since the last report, as SGLang's log line wants them. `ms` is simulated time."""

    running: int
    tokens_held: int
    waiting: int
    tokens: int
    accept_length: float
    captured: bool


class Engine:
    """The scheduler's queue and running batch. Counters only grow; `reset_speculation()` clears the accept average."""

    def __init__(
        self,
        profile: Profile,
        mode: Mode,
        *,
        max_running: int,
        chunked_prefill: int,
        kv_tokens: int,
        report_every: int,
        on_prefill: Callable[[PrefillReport], None],
        on_decode: Callable[[DecodeReport], None],
    ) -> None:
        self.profile, self.mode = profile, mode
        self.max_running, self.chunk, self.kv_tokens = max_running, chunked_prefill, kv_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.total_verify_steps = self.total_accepted = 0
        self.tokens_out = 0
        self._prefilling: list[tuple[Request, int]] = []
        self._stepping = False
        self._report_every, self._on_prefill, self._on_decode = report_every, on_prefill, on_decode
        self._decode_steps = self._tokens_since_report = self._accepted_since = self._verified_since = 0
        self._step_ms: dict[int, float] = {}
        thresholds = accept_thresholds(accept_length(profile, mode), mode.draft_tokens) if mode.speculative else ()
        # bisect wants ascending: a draw below thresholds[n] gains at least n + 2 tokens.
        self._ascending = tuple(reversed(thresholds))

    @property
    def idle(self) -> bool:
        """Whether no step is under way."""
        return not self._stepping

    @property
    def requests(self) -> int:
        """How many requests are waiting, being prefilled or running."""
        # One that is prefilled in chunks still waits.
        fresh = sum(1 for request, _ in self._prefilling if request.left_to_prefill == 0)
        return len(self.waiting) + len(self.running) + fresh

    @property
    def tokens_held(self) -> int:
        """Tokens whose KV entries are in memory."""
        return sum(request.prompt_tokens + request.generated for request in self.running)

    def submit(self, request: Request) -> None:
        """Queue a request. If the engine is idle the caller must `begin()`."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request; its sink hears nothing more."""
        request.done = True

    def reset_speculation(self) -> None:
        self.total_verify_steps = self.total_accepted = 0

    def begin(self) -> float | None:
        """Choose the next step and return its length in ms; None when nothing waits or runs."""
        self._prefilling = self._choose_prefill()
        if self._prefilling:
            self._stepping = True
            return prefill_ms(self.profile, sum(tokens for _, tokens in self._prefilling))
        self.running = [request for request in self.running if not request.done]
        batch = len(self.running)
        self._stepping = batch > 0
        if not batch:
            return None
        length = self._step_ms.get(batch)
        if length is None:
            length = self._step_ms[batch] = step_ms(self.profile, self.mode, batch)
        return length

    def finish_step(self) -> float | None:
        """Deliver what the step yields, and `begin()` the next."""
        if self._prefilling:
            self._finish_prefill()
        else:
            self._finish_decode()
        return self.begin()

    def _choose_prefill(self) -> list[tuple[Request, int]]:
        """Take from the queue what fits into one chunk; prefill goes before decode, as in SGLang."""
        budget, slots = self.chunk, self.max_running - len(self.running)
        chosen: list[tuple[Request, int]] = []
        if not self.waiting or slots <= 0:
            return chosen
        # Room is kept for all that a request may still generate; SGLang gambles a little and takes back.
        room = self.kv_tokens - sum(request.prompt_tokens + request.limit for request in self.running)
        while self.waiting and budget > 0 and slots > 0:
            request = self.waiting[0]
            if request.done:
                self.waiting.popleft()
                continue
            room -= request.prompt_tokens + request.limit
            if room < 0 and (chosen or self.running):
                break
            tokens = min(request.left_to_prefill, budget)
            if tokens == request.left_to_prefill:
                self.waiting.popleft()
            request.left_to_prefill -= tokens
            chosen.append((request, tokens))
            budget -= tokens
            slots -= 1
        return chosen

    def _finish_prefill(self) -> None:
        chosen, self._prefilling = self._prefilling, []
        self._on_prefill(
            PrefillReport(
                new_requests=len(chosen),
                new_tokens=sum(tokens for _, tokens in chosen),
                running=len(self.running),
                waiting=len(self.waiting),
                pending_tokens=sum(request.left_to_prefill for request in self.waiting),
            )
        )
        for request, _ in chosen:
            if request.left_to_prefill == 0 and not request.done:
                if self._deliver(request, 1):
                    continue
                self.running.append(request)

    def _finish_decode(self) -> None:
        deliver, running = self._deliver, self.running
        if self.mode.speculative:
            running = [request for request in running if not request.done and not deliver(request, self._gain(request))]
        else:
            running = [request for request in running if not request.done and not deliver(request, 1)]
        batch, self.running = len(self.running), running
        self._decode_steps += 1
        if self._decode_steps % self._report_every == 0:
            self._report(batch)

    def _gain(self, request: Request) -> int:
        """Return how many tokens this request gains in this step."""
        draw = request.draw = (request.draw + _GOLDEN) % 1.0
        gain = 1 + len(self._ascending) - bisect_left(self._ascending, draw)
        spec = request.spec
        if not spec.histogram:
            spec.histogram = [0] * self.mode.draft_tokens
        spec.verify_steps += 1
        spec.histogram[gain - 1] += 1
        self._verified_since += 1
        self._accepted_since += gain
        return gain

    def _deliver(self, request: Request, count: int) -> bool:
        """Give `count` tokens, or as many as may still come, to the request's sink; say whether it is finished."""
        generated = request.generated + count
        reason = None
        if generated >= request.limit:
            generated, reason = request.limit, "length"
        end = request.stops_at
        if end is not None and generated > end:
            generated, reason = end + 1, "stop"
        count = generated - request.generated
        request.generated = generated
        self.tokens_out += count
        self._tokens_since_report += count
        text_tokens = count - 1 if reason == "stop" else count  # end-of-sequence has no text
        piece = request.next_piece
        text = piece() if text_tokens == 1 else "".join([piece() for _ in range(text_tokens)])
        if reason:
            request.done = True
        request.sink(text, count, reason)
        return request.done

    def _report(self, batch: int) -> None:
        # As in SGLang, the average knows only what a log line has told.
        self.total_verify_steps += self._verified_since
        self.total_accepted += self._accepted_since
        self._on_decode(
            DecodeReport(
                running=batch,
                tokens_held=self.tokens_held,
                waiting=len(self.waiting),
                tokens=self._tokens_since_report,
                accept_length=self._accepted_since / self._verified_since if self._verified_since else 1.0,
                captured=captured(self.profile, self.mode, batch),
            )
        )
        self._tokens_since_report = self._accepted_since = self._verified_since = 0
