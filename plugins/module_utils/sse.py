"""Read the event stream of a completion: which delta brought text, for how many tokens, how it ended.

OpenAI-style streams (completions, chat) and SGLang's own /generate. Pure functions over recorded bytes. "Text" is
text in any channel: a reasoning model's first thought is its first token.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from operator import sub
from typing import Any

DONE = "[DONE]"

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
    reader = Reader()
    for time, data in events:
        try:
            text = data.decode()
        except ValueError as problem:
            reader.refuse(problem, data)
        else:
            reader.take(time, text)
    return reader.end(count)


class Reader:
    """Reads one stream, event by event. `total`: tokens that the server has stated so far."""

    def __init__(self) -> None:
        self.reply = Reply()
        self.total = 0
        self._counted = 0  # tokens that chunks already stand for
        self._exact = True
        self._usage: Any = None
        self._detailed: Any = None
        self._said = ""  # all text of a native stream so far, which it repeats
        self._texts: list[str] = []  # of deltas without usage

    def take(self, time: int, data: str) -> None:
        """The next event."""
        if data == DONE:
            self.reply.done = True
            return
        try:
            self._take(time, _message(data))
        except (ValueError, TypeError, AttributeError, RecursionError) as problem:
            self.refuse(problem, data.encode())

    def take_deltas(self, times: Sequence[int], totals: Sequence[int] | None) -> None:
        """Events which are known to bring text like the one before and, with `totals`, a usage of so many tokens; they
        do not fall and are not below `total`. The last of several such events must be given to `take`, because of
        what else its usage says."""
        chunks = self.reply.chunks
        if totals is None:
            self._exact = False
            chunks.extend((time, None) for time in times)
        elif totals:
            chunks.extend(zip(times, map(sub, totals, [self._counted, *totals[:-1]]), strict=True))
            self.total = self._counted = totals[-1]

    def refuse(self, problem: Exception, data: bytes) -> None:
        """That event is not what a server may send."""
        self.reply.error = self.reply.error or ("protocol", f"{problem}: {data[:200].decode(errors='replace')}")

    def end(self, count: Callable[[str], int] | None = None) -> Reply:
        """Nothing more came. `count`: as for `read_reply`."""
        reply, usage = self.reply, self._usage
        if usage is not None:
            _take_over(usage, self._detailed or usage, reply)
        if not self._exact:
            reply.chunks = [(time, None) for time, _ in reply.chunks]
            if usage is None and count is not None:
                reply.completion_tokens, reply.estimated = count("".join(self._texts)), True
        elif reply.chunks and usage is not None:
            time, tokens = reply.chunks[-1]
            reply.chunks[-1] = (time, (tokens or 0) + self.total - self._counted)
        reply.error = reply.error or _ending(reply)
        return reply

    def _take(self, time: int, message: dict[str, Any]) -> None:
        reply = self.reply
        if "meta_info" in message:
            message, self._said = _as_openai(message, self._said)
        if message.get("error") is not None:
            reply.error = reply.error or ("in_band", _detail(message["error"]))
            return
        used = None
        stated = message.get("usage")
        if stated is not None:
            used = stated.get("completion_tokens")
            if used is not None:
                if type(used) is not int or used < self.total:
                    raise ValueError(f"completion_tokens went from {self.total} to {used}")
                self.total, self._usage = used, stated
                if stated.get("prompt_tokens_details"):
                    self._detailed = stated  # a later usage without details does not take them back
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
            if type(text) is not str:
                raise TypeError("a text that is none")
            if reply.done:
                raise ValueError("text behind [DONE]")
            if answer and reply.first_answer is None:
                reply.first_answer = time
            if used is None:
                self._exact = False
                reply.chunks.append((time, None))
                self._texts.append(text)
            else:
                reply.chunks.append((time, used - self._counted))
                self._counted = used


def _message(text: str) -> dict[str, Any]:
    # raw_decode is what loads wraps in two searches for white space, which cost as much again.
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
