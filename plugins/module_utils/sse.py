"""Read the event stream of a completion: which delta brought text, for how many tokens, how it ended.

OpenAI-style streams (completions, chat) and SGLang's own /generate. Pure functions over recorded bytes. "Text" is
text in any channel: a reasoning model's first thought is its first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

DONE = b"[DONE]"

_decode = json.JSONDecoder().raw_decode


@dataclass
class Reply:
    """What a stream said. Times are those given with the events, in their unit.

    `chunks`: one (time, tokens) per delta with text; tokens is None for all of them unless every one of them carried a
    usage. Tokens that came without text (half a character, an end-of-sequence token) are counted with the next
    delta that has text, or with the last one. `first_answer`: the first delta with text that is no reasoning.
    `verify_steps`: verify steps of this request under speculation. `estimated`: completion_tokens were counted in the
    text. `error`: None or (kind, detail); kinds: in_band, aborted, protocol, cut, no_usage, no_text.
    """

    chunks: list[tuple[int, int | None]] = field(default_factory=list)
    first_answer: int | None = None
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    cached_tokens: int | None = None
    reasoning_tokens: int | None = None
    verify_steps: int | None = None
    finish_reason: str | None = None
    done: bool = False
    estimated: bool = False
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


def read_reply(events: Iterable[tuple[int, bytes]], count: Callable[[str], int] | None = None) -> Reply:
    """Read (time, data) events in order. Never raises on what a server sent: what is wrong becomes `error`.

    `count`: a tokenizer, for servers that do not say how many tokens they generated; without one that is an error.
    """
    reply = Reply()
    chunks = reply.chunks
    total = counted = 0  # tokens that the server has stated, and that chunks already stand for
    exact = True
    usage: Any = None
    detailed: Any = None
    said = ""  # all text of a native stream so far, which it repeats
    texts: list[str] = []  # of deltas without usage
    for time, data in events:
        if data == DONE:
            reply.done = True
            continue
        try:
            message = _message(data)
            if "meta_info" in message:
                message, said = _as_openai(message, said)
            if message.get("error") is not None:
                reply.error = reply.error or ("in_band", _detail(message["error"]))
                continue
            used = None
            stated = message.get("usage")
            if stated is not None:
                used = stated.get("completion_tokens")
                if used is not None:
                    if type(used) is not int or used < total:
                        raise ValueError(f"completion_tokens went from {total} to {used}")
                    total, usage = used, stated
                    if stated.get("prompt_tokens_details"):
                        detailed = stated  # a later usage without details does not take them back
            if "sglext" in message:
                reply.verify_steps = _verify_steps(message["sglext"])
            for choice in message.get("choices") or ():
                text, answer = choice.get("text"), True
                if not text:
                    text, answer = _delta(choice.get("delta"))
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
                    chunks.append((time, None))
                    texts.append(text)
                else:
                    chunks.append((time, used - counted))
                    counted = used
        except (ValueError, TypeError, AttributeError) as problem:
            reply.error = reply.error or ("protocol", f"{problem}: {data[:200].decode(errors='replace')}")
    if usage is not None:
        _take_over(usage, detailed or usage, reply)
    if not exact:
        reply.chunks = [(time, None) for time, _ in chunks]
        if usage is None and count is not None:
            reply.completion_tokens, reply.estimated = count("".join(texts)), True
    elif chunks and usage is not None:
        time, tokens = chunks[-1]
        chunks[-1] = (time, (tokens or 0) + total - counted)
    reply.error = reply.error or _ending(reply)
    return reply


def _message(data: bytes) -> dict[str, Any]:
    # As text: from bytes, json.loads guesses the encoding first; and raw_decode is what loads wraps in two searches for
    # white space. Together they are half of the cost.
    text = data.decode()
    try:
        message, end = _decode(text)
    except ValueError:
        end = -1
    if end != len(text):
        message = json.loads(text)
    if type(message) is not dict:
        raise ValueError("not an object")
    return message


def _delta(delta: Any) -> tuple[str, bool]:
    """The text of a chat delta in any channel, and whether some of it is answer rather than reasoning."""
    if not delta:
        return "", False
    answer = delta.get("content") or (str(delta["tool_calls"]) if delta.get("tool_calls") else "")
    thought = delta.get("reasoning_content") or delta.get("reasoning") or ""
    return thought + answer, bool(answer)


def _as_openai(message: dict[str, Any], said: str) -> tuple[dict[str, Any], str]:
    """An event of /generate in the words of a completion, and all text so far. Such a stream repeats its whole text
    in every event, unless the server streams increments: then the event's ids are fewer than all tokens."""
    meta = message["meta_info"]
    text = message.get("text") or ""
    ids, tokens = message.get("output_ids"), meta.get("completion_tokens")
    increments = isinstance(ids, list) and len(ids) != tokens
    fresh = text if increments or not text.startswith(said) else text[len(said) :]
    reason = meta.get("finish_reason")
    usage = {"completion_tokens": tokens, "prompt_tokens": meta.get("prompt_tokens")}
    usage["prompt_tokens_details"] = {"cached_tokens": meta.get("cached_tokens")}
    usage["reasoning_tokens"] = meta.get("reasoning_tokens")
    choice = {"text": fresh, "finish_reason": reason.get("type") if isinstance(reason, dict) else reason}
    told = {"choices": [choice], "usage": usage, "sglext": {"spec_tokens_details": meta}}
    return told, said + text if increments else text


def _verify_steps(extra: Any) -> int | None:
    details = extra.get("spec_tokens_details") if isinstance(extra, dict) else None
    steps = details.get("spec_verify_ct") if isinstance(details, dict) else None
    return steps if type(steps) is int and steps > 0 else None


def _take_over(usage: dict[str, Any], detailed: dict[str, Any], reply: Reply) -> None:
    """The figures of the last usage object, which are cumulative, and of the last one with details."""

    def whole(value: Any) -> int | None:
        return value if type(value) is int else None

    def of(source: dict[str, Any], name: str) -> dict[str, Any]:
        details = source.get(name)
        return details if isinstance(details, dict) else {}

    reply.completion_tokens = usage["completion_tokens"]
    reply.prompt_tokens = whole(usage.get("prompt_tokens"))
    reply.cached_tokens = whole(of(detailed, "prompt_tokens_details").get("cached_tokens"))
    reply.reasoning_tokens = whole(
        usage.get("reasoning_tokens", of(usage, "completion_tokens_details").get("reasoning_tokens"))
    )


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
