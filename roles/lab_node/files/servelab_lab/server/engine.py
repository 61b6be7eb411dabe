"""Continuous batching in simulated time: who runs, who waits, and which tokens each step yields.

The engine has no clock of its own. Whoever drives it calls `begin()` when it is idle and `finish_step()` when the step
that `begin()` or the last `finish_step()` announced is over; both return the next step's length in ms, or None when
there is nothing to do. What it cannot tell is in docs/simulator.md.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from .adaptive import Adaptive
from .cost import Mode, Profile, accept_thresholds, captured, prefill_ms, step_ms
from .prefix import PrefixCache

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
    `words` are the prompt and `again()` the pieces from the first on, for the prefix cache; without words nothing is
    looked up or kept. `cached_tokens` is known once the prefill has begun.
    """

    __slots__ = (
        "again",
        "cached_tokens",
        "done",
        "draw",
        "ending",
        "generated",
        "left_to_prefill",
        "limit",
        "next_piece",
        "prompt_tokens",
        "sink",
        "spec",
        "stops_at",
        "words",
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
        words: Sequence[str] = (),
        again: Callable[[], Iterator[str]] | None = None,
    ) -> None:
        self.prompt_tokens = self.left_to_prefill = prompt_tokens
        self.limit = max_tokens
        self.next_piece = pieces.__next__
        self.sink = sink
        self.stops_at = stops_at
        self.words, self.again = words, again
        self.generated = 0
        self.cached_tokens: int | None = None
        self.done = False
        self.ending = "length"
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
    cached_tokens: int = 0


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
        cache: PrefixCache | None = None,
        adaptive: Adaptive | None = None,
        on_switch: Callable[[Mode, Mode], None] = lambda old, new: None,
    ) -> None:
        self.profile, self.mode, self.cache = profile, mode, cache
        # Wall seconds that the schedule moved because this machine was too slow for the time scale.
        self.late_seconds = 0.0
        # Whether drafts are ever made; an adaptive server may be without at times.
        self.speculates = mode.speculative or adaptive is not None
        self._adaptive, self._on_switch = adaptive, on_switch
        lengths = [steps + 1 for steps in adaptive.candidates] if adaptive is not None else []
        self.widest = max(mode.draft_tokens, *lengths, 1)
        self.max_running, self.chunk, self.kv_tokens = max_running, chunked_prefill, kv_tokens
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.total_verify_steps = self.total_accepted = 0
        self.tokens_out = self.tokens_in = self.tokens_cached = 0
        # The last prefill's share of known tokens, and the steps by whether they ran under a CUDA graph.
        self.hit_rate = 0.0
        self.passes = {"prefill_none": 0, "decode_cuda_graph": 0, "decode_none": 0}
        self._prefilling: list[tuple[Request, int]] = []
        self._stepping = False
        self._report_every, self._on_prefill, self._on_decode = report_every, on_prefill, on_decode
        self._decode_steps = self._tokens_since_report = self._accepted_since = self._verified_since = 0
        self._use(mode)

    def _use(self, mode: Mode) -> None:
        self.mode = mode
        self._step_ms: dict[int, float] = {}
        # bisect wants ascending: a draw below thresholds[n] gains at least n + 2 tokens.
        self._ascending = tuple(reversed(accept_thresholds(self.profile, mode)))

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

    @property
    def tokens_pending(self) -> int:
        """Prompt tokens that wait to be computed."""
        return sum(request.left_to_prefill for request in self.waiting)

    def submit(self, request: Request) -> None:
        """Queue a request. If the engine is idle the caller must `begin()`."""
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Drop a request; its sink hears nothing more."""
        request.done = True

    def abort(self, request: Request) -> None:
        """End a request: at once if it waits, with its next tokens if it runs."""
        if request.done:
            return
        request.ending = "abort"
        if request in self.waiting and request.left_to_prefill:
            request.done = True
            request.sink("", 0, "abort")
        else:
            request.limit = min(request.limit, request.generated + 1)

    def flush(self) -> None:
        """Forget all prefixes, and the average acceptance."""
        if self.cache is not None:
            self.cache.clear()
        self.reset_speculation()

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
        if self._adaptive is not None:
            self._adapt(self._adaptive.steps(batch))
        length = self._step_ms.get(batch)
        if length is None:
            length = self._step_ms[batch] = step_ms(self.profile, self.mode, batch)
        return length

    def _adapt(self, steps: int) -> None:
        if steps != self.mode.draft_steps:
            old, new = self.mode, self.mode.drafting(steps)
            self._use(new)
            self._on_switch(old, new)

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
            if request.cached_tokens is None:
                self._look_up(request)
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

    def _look_up(self, request: Request) -> None:
        """Find what is known of a prompt. At least its last token is computed; EAGLE keeps pairs, one fewer."""
        known = 0
        if self.cache is not None and request.words:
            known = min(self.cache.match(request.words), request.prompt_tokens - 1)
            if self.mode.draft_steps or self._adaptive is not None:
                known -= 1
        request.cached_tokens = max(known, 0)
        request.left_to_prefill = request.prompt_tokens - request.cached_tokens

    def _keep(self, request: Request, tokens: int) -> None:
        """Remember a prompt and the first tokens of its answer."""
        if self.cache is not None and request.words:
            said = islice(request.again(), tokens) if request.again is not None else ()
            self.cache.add([*request.words, *(piece.strip() for piece in said)])

    def _finish_prefill(self) -> None:
        chosen, self._prefilling = self._prefilling, []
        # Known tokens count with the first chunk of their prompt.
        cached = sum(
            request.cached_tokens or 0
            for request, tokens in chosen
            if request.left_to_prefill + tokens == request.prompt_tokens - (request.cached_tokens or 0)
        )
        self.tokens_in += sum(tokens for _, tokens in chosen)
        self.tokens_cached += cached
        self.passes["prefill_none"] += 1
        self.hit_rate = cached / max(cached + sum(tokens for _, tokens in chosen), 1)
        self._on_prefill(
            PrefillReport(
                new_requests=len(chosen),
                new_tokens=sum(tokens for _, tokens in chosen),
                running=len(self.running),
                waiting=len(self.waiting),
                pending_tokens=self.tokens_pending,
                cached_tokens=cached,
            )
        )
        for request, _ in chosen:
            if request.left_to_prefill == 0 and not request.done:
                self._keep(request, 0)
                if self._deliver(request, 1):
                    continue
                self.running.append(request)

    def _finish_decode(self) -> None:
        deliver, running = self._deliver, self.running
        if self.mode.speculative:
            before = self._accepted_since
            verified = self._verified_since
            running = [request for request in running if not request.done and not deliver(request, self._gain(request))]
            if self._adaptive is not None and self._verified_since > verified:
                accepted = (self._accepted_since - before) / (self._verified_since - verified) - 1
                self._adaptive.saw(len(self.running), accepted)
        else:
            running = [request for request in running if not request.done and not deliver(request, 1)]
            if self._adaptive is not None:
                # A step without drafts counts as one that gained the sure token.
                self._verified_since += len(self.running)
                self._accepted_since += len(self.running)
                self._adaptive.saw(len(self.running), 0.0)
        batch, self.running = len(self.running), running
        self._decode_steps += 1
        graph = captured(self.profile, self.mode, batch)
        self.passes["decode_cuda_graph" if graph else "decode_none"] += 1
        if self._decode_steps % self._report_every == 0:
            self._report(batch, graph)

    def _gain(self, request: Request) -> int:
        """Return how many tokens this request gains in this step."""
        draw = request.draw = (request.draw + _GOLDEN) % 1.0
        gain = 1 + len(self._ascending) - bisect_left(self._ascending, draw)
        spec = request.spec
        if not spec.histogram:
            spec.histogram = [0] * self.widest
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
            generated, reason = request.limit, request.ending
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
            self._keep(request, generated)
        request.sink(text, count, reason)
        return request.done

    def _report(self, batch: int, graph: bool) -> None:
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
                captured=graph,
            )
        )
        self._tokens_since_report = self._accepted_since = self._verified_since = 0
