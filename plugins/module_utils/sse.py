"""Read the event stream of an OpenAI-style completion: which delta brought text, for how many tokens, how it ended.

Pure functions over recorded bytes. "Text" is text in any channel: a reasoning model's first thought is its first token.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"


@dataclass
class Reply:
    """What a stream said. Times are those given with the events, in their unit.

    `chunks`: one (time, tokens) per delta with text; tokens is None for all of them unless every one of them carried a
    usage. Tokens that came without text (half a character, an end-of-sequence token) are counted with the next
    delta that has text, or with the last one. `error`: None or (kind, detail); kinds: in_band, aborted, protocol, cut,
    no_usage, no_text.
    """

    chunks: list[tuple[int, int | None]] = field(default_factory=list)
    first_answer: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    finish_reason: str | None = None
    done: bool = False
    error: tuple[str, str] | None = None


def split_events(stream: bytes) -> Iterator[tuple[int, bytes]]:
    """Events of a server-sent-event stream as (offset just behind the event, its data).

    Comments and fields other than `data` are skipped, several data lines are joined, an event without data is none.
    A last event that its blank line does not end is not an event: it was cut.
    """
    at = 0
    lines: list[bytes] = []
    size = len(stream)
    while at < size:
        # The common form in one step: one data line, ended by a blank one.
        if not lines and stream.startswith(b"data: ", at):
            end = stream.find(b"\n", at)
            if end > 0 and stream.startswith(b"\n", end + 1) and stream.find(b"\r", at, end) < 0:
                yield end + 2, stream[at + 6 : end]
                at = end + 2
                continue
        line, behind = _line(stream, at)
        if behind is None:
            return
        at = behind
        if not line:
            if lines:
                yield at, b"\n".join(lines)
            lines = []
        elif line.startswith(b"data:"):
            value = line[5:]
            lines.append(value[1:] if value.startswith(b" ") else value)


def _line(stream: bytes, at: int) -> tuple[bytes, int | None]:
    """The line at `at` and where the next one starts (None: the line has no end). CR, LF and CRLF end one."""
    feed = stream.find(b"\n", at)
    carriage = stream.find(b"\r", at, feed if feed >= 0 else len(stream))
    if carriage >= 0:
        return stream[at:carriage], carriage + (2 if stream.startswith(b"\r\n", carriage) else 1)
    if feed >= 0:
        return stream[at:feed], feed + 1
    return stream[at:], None


def read_reply(events: Iterable[tuple[int, bytes]]) -> Reply:
    """Read (time, data) events in order. Never raises on what a server sent: what is wrong becomes `error`."""
    reply = Reply()
    counted = 0  # tokens that chunks already stand for
    exact = True
    for time, data in events:
        if data == DONE:
            reply.done = True
            continue
        try:
            # As text: from bytes, json.loads guesses the encoding first, which costs a third of the whole.
            message = json.loads(data.decode())
            if not isinstance(message, dict):
                raise ValueError("not an object")
            error = message.get("error")
            if error is not None:
                reply.error = reply.error or ("in_band", _detail(error))
                continue
            used = _usage(reply, message.get("usage"))
            for choice in message.get("choices") or ():
                text, answer = _text(choice)
                reason = choice.get("finish_reason")
                if reason is not None:
                    reply.finish_reason = str(reason)
                if not text:
                    continue
                if reply.done:
                    raise ValueError("text behind [DONE]")
                if answer and reply.first_answer is None:
                    reply.first_answer = time
                if used is None:
                    exact = False
                    reply.chunks.append((time, None))
                else:
                    reply.chunks.append((time, used - counted))
                    counted = used
        except (ValueError, TypeError, AttributeError) as problem:
            reply.error = reply.error or ("protocol", f"{problem}: {data[:200].decode(errors='replace')}")
    if not exact:
        reply.chunks = [(time, None) for time, _ in reply.chunks]
    elif reply.chunks and reply.completion_tokens is not None:
        time, tokens = reply.chunks[-1]
        reply.chunks[-1] = (time, (tokens or 0) + reply.completion_tokens - counted)
    reply.error = reply.error or _ending(reply)
    return reply


def _usage(reply: Reply, usage: Any) -> int | None:
    """Take over a usage object; returns the cumulative completion tokens it states, None without one."""
    if usage is None:
        return None
    tokens = usage.get("completion_tokens")
    if tokens is None:
        return None
    if not isinstance(tokens, int) or tokens < (reply.completion_tokens or 0):
        raise ValueError(f"completion_tokens went from {reply.completion_tokens} to {tokens}")
    reply.completion_tokens = tokens
    if isinstance(usage.get("prompt_tokens"), int):
        reply.prompt_tokens = usage["prompt_tokens"]
    details = usage.get("prompt_tokens_details")
    if isinstance(details, dict) and isinstance(details.get("cached_tokens"), int):
        reply.cached_tokens = details["cached_tokens"]
    return tokens


def _text(choice: Any) -> tuple[bool, bool]:
    """Whether this choice brought text in any channel, and whether some of it was answer rather than reasoning."""
    if choice.get("text"):
        return True, True
    delta = choice.get("delta") or {}
    answer = bool(delta.get("content") or delta.get("tool_calls"))
    return answer or bool(delta.get("reasoning_content") or delta.get("reasoning")), answer


def _ending(reply: Reply) -> tuple[str, str] | None:
    if reply.finish_reason == "abort":
        return ("aborted", "the server aborted the request")
    if reply.finish_reason is None or not reply.done:
        missing = [] if reply.finish_reason else ["finish_reason"]
        missing += [] if reply.done else ["[DONE]"]
        return ("cut", f"the stream ended without {' and without '.join(missing)}")
    if reply.completion_tokens is None:
        return ("no_usage", "the server did not say how many tokens it generated")
    if not reply.chunks:
        return ("no_text", "no delta carried text")
    return None


def _detail(error: Any) -> str:
    if isinstance(error, dict):
        return str(error.get("message") or error)[:500]
    return str(error)[:500]
