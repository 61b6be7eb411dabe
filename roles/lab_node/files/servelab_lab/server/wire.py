"""The bytes of the OpenAI endpoints, laid out as a real SGLang 0.5.15 sends them.

A stream's JSON is cut into parts that never change, made once per request; a step adds only the text between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .engine import Spec
from .text import EOS_ID, THINK_END

Send = Callable[[bytes], None]

SSE_HEAD = b"content-type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n"
# data: [DONE], then the chunk of length 0 that ends the body.
DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"


def dumps(value: Any) -> bytes:
    """Encode as SGLang's orjson does: no spaces, UTF-8 unescaped."""
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode()


def escaped(text: str) -> bytes:
    """Return the inside of a JSON string literal."""
    if text.isascii() and text.isprintable() and '"' not in text and "\\" not in text:
        return text.encode()
    return dumps(text)[1:-1]


def chunk(body: bytes) -> bytes:
    """Frame one piece of a chunked body."""
    return b"%x\r\n%b\r\n" % (len(body), body)


def usage(prompt: int, completion: int, cached: int = 0, reasoning: int = 0, *, null: bool = True) -> dict[str, Any]:
    """Return a usage object. Without `null`, details that say nothing are left out instead of shown as null."""
    shown: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if cached or null:
        shown["prompt_tokens_details"] = {"cached_tokens": cached} if cached else None
    return {**shown, "reasoning_tokens": reasoning}


def spec_details(spec: Spec, draft_tokens: int) -> dict[str, Any]:
    """Return `sglext.spec_tokens_details`, which return_spec_tokens_details asks for."""
    steps, correct = spec.verify_steps, spec.correct_drafts
    proposed = steps * (draft_tokens - 1)
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": 1 + correct / steps if steps else 0.0,
        "spec_cap_length": 0.0,
        "spec_block_accept_length": 0.0,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": steps,
        "spec_correct_drafts_histogram": spec.histogram,
        "spec_cap_lens_histogram": [],
    }


def stopped_by(reason: str | None, stop: str | None) -> int | str | None:
    """Return `matched_stop`: the stop string, or the end-of-sequence token."""
    if reason != "stop":
        return None
    return EOS_ID if stop is None else stop


class Thoughts:
    """Keeps what a model thinks apart from what it says: a parser of `</think>`."""

    def __init__(self) -> None:
        self.over = False
        # The mark itself counts as a thought.
        self.tokens = 0

    def split(self, text: str, count: int) -> tuple[str, str]:
        """Return the thoughts and the saying of a step."""
        if self.over:
            return "", text
        thought, mark, said = text.partition(THINK_END)
        self.over = bool(mark)
        self.tokens += count if not mark else thought.count(" ") + 1
        return thought, said


class Reply:
    """What every answer knows of its request. `cached_tokens` are known when the first token comes."""

    def __init__(self, rid: str, created: int, model: str, prompt_tokens: int) -> None:
        self.rid, self.created, self.model, self.prompt_tokens = rid, created, model, prompt_tokens
        self.completion_tokens = self.cached_tokens = 0
        self.thoughts: Thoughts | None = None

    @property
    def reasoning_tokens(self) -> int:
        return self.thoughts.tokens if self.thoughts is not None else 0

    def head(self, kind: str) -> dict[str, Any]:
        return {"id": self.rid, "object": kind, "created": self.created, "model": self.model}


class Stream(Reply):
    """An SSE answer. `step()` is called once per step with the new text and sends one piece of bytes."""

    kind = ""
    bare_usage = False

    def __init__(
        self,
        reply: Reply,
        send: Send,
        *,
        head: Callable[[], bytes],
        include_usage: bool,
        continuous_usage: bool,
        sglext: Callable[[], dict[str, Any]] | None,
        logprobs: Callable[[str, int, bool], dict[str, Any]] | None = None,
    ) -> None:
        super().__init__(reply.rid, reply.created, reply.model, reply.prompt_tokens)
        self._send, self._head, self._begun = send, head, False
        self.thoughts = reply.thoughts
        self._include, self._continuous, self._sglext = include_usage, continuous_usage, sglext
        self._logprobs = logprobs
        self._before, self._after = self.parts()
        self._fixed = len(self._before) + len(self._after)

    def opening(self) -> bytes:
        """Return what precedes the first text."""
        return b""

    def parts(self, logprobs: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
        """Return the event's bytes before and after the text."""
        raise NotImplementedError

    def thinking(self, thought: str) -> bytes:
        """Return the event for a thought."""
        raise NotImplementedError

    def last(self, text: str, reason: str, matched: int | str | None) -> bytes:
        """Return the event or events with the last text and the finish reason."""
        raise NotImplementedError

    def event(self, text: bytes) -> bytes:
        """Return the framed event for `text`, usage so far included where that was asked for."""
        if self._continuous:
            return chunk(self._before + text + self.with_usage(self._after))
        return b"%x\r\n%b%b%b\r\n" % (self._fixed + len(text), self._before, text, self._after)

    def with_usage(self, tail: bytes) -> bytes:
        """Return an event's end with the usage so far."""
        raise NotImplementedError

    def step(self, text: str, count: int, reason: str | None, matched: int | str | None) -> None:
        """Send what one step yielded; `reason` ends the stream."""
        self.completion_tokens += count
        if self._logprobs is not None:
            shown = self._logprobs(text, self.completion_tokens - count, reason == "stop" and isinstance(matched, int))
            self._before, self._after = self.parts(shown)
            self._fixed = len(self._before) + len(self._after)
        if reason is None and self._begun and self.thoughts is None:
            self._send(self.event(escaped(text)))
            return
        out = b""
        if not self._begun:
            # As late as this: a request that is refused or dies in the queue has sent no status yet.
            self._begun = True
            out = self._head() + self.opening()
        if self.thoughts is not None:
            thought, text = self.thoughts.split(text, count)
            if thought:
                out += self.thinking(thought)
        if reason is None:
            if text or self.thoughts is None:
                out += self.event(escaped(text))
            if out:
                self._send(out)
            return
        out += self.last(text, reason, matched)
        if self._sglext is not None:
            extra = {**self.head(self.kind), "choices": [], "usage": None, "sglext": self._sglext()}
            out += chunk(b"data: %b\n\n" % dumps(extra))
        if self._include:
            counts = usage(
                self.prompt_tokens,
                self.completion_tokens,
                self.cached_tokens,
                self.reasoning_tokens,
                null=not self.bare_usage,
            )
            out += chunk(b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [], "usage": counts}))
        self._send(out + DONE)


class CompletionStream(Stream):
    kind = "text_completion"
    bare_usage = True

    _shown: dict[str, Any] | None = None

    def _cut(self, reason: str | None, matched: int | str | None) -> tuple[bytes, bytes]:
        choice = {"index": 0, "text": "\0", "logprobs": self._shown, "finish_reason": reason, "matched_stop": matched}
        event = b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [choice], "usage": None})
        before, _, after = event.partition(b"\\u0000")
        return before, after

    def parts(self, logprobs: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
        self._shown = logprobs
        return self._cut(None, None)

    def with_usage(self, tail: bytes) -> bytes:
        return tail.removesuffix(b"null}\n\n") + dumps(usage(self.prompt_tokens, self.completion_tokens)) + b"}\n\n"

    def last(self, text: str, reason: str, matched: int | str | None) -> bytes:
        before, after = self._cut(reason, matched)
        if self._continuous:
            after = self.with_usage(after)
        return chunk(before + escaped(text) + after)


class ChatStream(Stream):
    kind = "chat.completion.chunk"

    _shown: dict[str, Any] | None = None

    def _event(self, delta: dict[str, Any], reason: str | None, matched: int | str | None) -> bytes:
        delta = {"reasoning_content": None, **delta}
        choice = {"index": 0, "delta": delta, "logprobs": self._shown, "finish_reason": reason, "matched_stop": matched}
        return b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [choice]})

    def opening(self) -> bytes:
        # The event with the role has no token, and so no log probabilities.
        shown, self._shown = self._shown, None
        try:
            return chunk(self._event({"role": "assistant", "content": ""}, None, None))
        finally:
            self._shown = shown

    def parts(self, logprobs: dict[str, Any] | None = None) -> tuple[bytes, bytes]:
        self._shown = logprobs
        before, _, after = self._event({"content": "\0"}, None, None).partition(b"\\u0000")
        return before, after

    def thinking(self, thought: str) -> bytes:
        event = self._event({"reasoning_content": thought}, None, None)
        return chunk(self.with_usage(event) if self._continuous else event)

    def with_usage(self, tail: bytes) -> bytes:
        counts = dumps(usage(self.prompt_tokens, self.completion_tokens))
        return tail.removesuffix(b"}\n\n") + b',"usage":' + counts + b"}\n\n"

    def last(self, text: str, reason: str, matched: int | str | None) -> bytes:
        out = self.event(escaped(text)) if text else b""
        self._shown = None
        end = self._event({}, reason, matched)
        return out + chunk(self.with_usage(end) if self._continuous else end)


class Whole(Reply):
    """An answer in one piece: collects the text; `document()` is the JSON object."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.rid, reply.created, reply.model, reply.prompt_tokens)
        self.thoughts = reply.thoughts
        self.text: list[str] = []

    def add(self, text: str, count: int) -> None:
        """Take in a step."""
        self.text.append(text)
        self.completion_tokens += count

    def document(
        self, *, chat: bool, reason: str, matched: int | str | None, logprobs: dict[str, Any] | None = None
    ) -> dict[str, Any]:
        text = "".join(self.text)
        thought = None
        if self.thoughts is not None:
            thought, text = self.thoughts.split(text, self.completion_tokens)
        end = {"logprobs": logprobs, "finish_reason": reason, "matched_stop": matched}
        if chat:
            message = {"role": "assistant", "content": text, "reasoning_content": thought or None, "tool_calls": None}
            answer = {**self.head("chat.completion"), "choices": [{"index": 0, "message": message, **end}]}
        else:
            answer = {**self.head("text_completion"), "choices": [{"index": 0, "text": text, **end}]}
        counts = usage(self.prompt_tokens, self.completion_tokens, self.cached_tokens, self.reasoning_tokens)
        return {**answer, "usage": counts, "metadata": {"weight_version": "default"}}
