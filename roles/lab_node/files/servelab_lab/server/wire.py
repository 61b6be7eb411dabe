"""The bytes of the OpenAI endpoints, laid out as a real SGLang 0.5.15 sends them.

A stream's JSON is cut into parts that never change, made once per request; a step adds only the text between them.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from .engine import Spec
from .text import EOS_ID

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


def usage(prompt: int, completion: int, *, details: bool = True) -> dict[str, Any]:
    """Return a usage object; the last chunk of a completions stream leaves the empty details out."""
    shown: dict[str, Any] = {
        "prompt_tokens": prompt,
        "total_tokens": prompt + completion,
        "completion_tokens": completion,
    }
    if details:
        shown["prompt_tokens_details"] = None
    return {**shown, "reasoning_tokens": 0}


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


class Reply:
    """What both kinds of stream know of their request."""

    def __init__(self, rid: str, created: int, model: str, prompt_tokens: int) -> None:
        self.rid, self.created, self.model, self.prompt_tokens = rid, created, model, prompt_tokens
        self.completion_tokens = 0

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
    ) -> None:
        super().__init__(reply.rid, reply.created, reply.model, reply.prompt_tokens)
        self._send, self._head, self._begun = send, head, False
        self._include, self._continuous, self._sglext = include_usage, continuous_usage, sglext
        self._before, self._after = self.parts()
        self._fixed = len(self._before) + len(self._after)

    def opening(self) -> bytes:
        """Return what precedes the first text."""
        return b""

    def parts(self) -> tuple[bytes, bytes]:
        """Return the event's bytes before and after the text."""
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
        if reason is None and self._begun:
            self._send(self.event(escaped(text)))
            return
        out = b""
        if not self._begun:
            # As late as this: a request that is refused or dies in the queue has sent no status yet.
            self._begun = True
            out = self._head() + self.opening()
        if reason is None:
            self._send(out + self.event(escaped(text)))
            return
        out += self.last(text, reason, matched)
        if self._sglext is not None:
            extra = {**self.head(self.kind), "choices": [], "usage": None, "sglext": self._sglext()}
            out += chunk(b"data: %b\n\n" % dumps(extra))
        if self._include:
            counts = usage(self.prompt_tokens, self.completion_tokens, details=not self.bare_usage)
            out += chunk(b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [], "usage": counts}))
        self._send(out + DONE)


class CompletionStream(Stream):
    kind = "text_completion"
    bare_usage = True

    def _cut(self, reason: str | None, matched: int | str | None) -> tuple[bytes, bytes]:
        choice = {"index": 0, "text": "\0", "logprobs": None, "finish_reason": reason, "matched_stop": matched}
        event = b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [choice], "usage": None})
        before, _, after = event.partition(b"\\u0000")
        return before, after

    def parts(self) -> tuple[bytes, bytes]:
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

    def _event(self, delta: dict[str, Any], reason: str | None, matched: int | str | None) -> bytes:
        delta = {"reasoning_content": None, **delta}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason, "matched_stop": matched}
        return b"data: %b\n\n" % dumps({**self.head(self.kind), "choices": [choice]})

    def opening(self) -> bytes:
        return chunk(self._event({"role": "assistant", "content": ""}, None, None))

    def parts(self) -> tuple[bytes, bytes]:
        before, _, after = self._event({"content": "\0"}, None, None).partition(b"\\u0000")
        return before, after

    def with_usage(self, tail: bytes) -> bytes:
        counts = dumps(usage(self.prompt_tokens, self.completion_tokens))
        return tail.removesuffix(b"}\n\n") + b',"usage":' + counts + b"}\n\n"

    def last(self, text: str, reason: str, matched: int | str | None) -> bytes:
        out = self.event(escaped(text)) if text else b""
        end = self._event({}, reason, matched)
        return out + chunk(self.with_usage(end) if self._continuous else end)


class Whole(Reply):
    """An answer in one piece: collects the text; `document()` is the JSON object."""

    def __init__(self, reply: Reply) -> None:
        super().__init__(reply.rid, reply.created, reply.model, reply.prompt_tokens)
        self.text: list[str] = []

    def document(self, *, chat: bool, reason: str, matched: int | str | None) -> dict[str, Any]:
        text = "".join(self.text)
        end = {"logprobs": None, "finish_reason": reason, "matched_stop": matched}
        if chat:
            message = {"role": "assistant", "content": text, "reasoning_content": None, "tool_calls": None}
            answer = {**self.head("chat.completion"), "choices": [{"index": 0, "message": message, **end}]}
        else:
            answer = {**self.head("text_completion"), "choices": [{"index": 0, "text": text, **end}]}
        counts = usage(self.prompt_tokens, self.completion_tokens)
        return {**answer, "usage": counts, "metadata": {"weight_version": "default"}}
