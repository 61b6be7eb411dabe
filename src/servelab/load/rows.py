"""A recorded request → one raw row (schema servelab.request/1, times in wall seconds)."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from servelab.load.capture import Record
from servelab.load.http import BadResponse, parse_response, whole_events
from servelab.shared.sse import Reply, read_reply, split_events

SECOND = 1_000_000_000


def interpret(record: Record, expected_tokens: int | None, count: Callable[[str], int] | None = None) -> Reply:
    """What the server answered, times in ns of the record's clock.

    `expected_tokens`: a complete reply with another number of tokens is an error (None: any number is right).
    `count`: a tokenizer, for servers that do not say how many tokens they generated.
    """
    if record.error is not None and not record.parts:
        return Reply(error=record.error)
    try:
        events = whole_events(record.parts, record.times) if record.error is None else None
        reply = read_reply(events, count) if events is not None else _long_way(record, count)
    except BadResponse as problem:
        return Reply(error=record.error or (problem.kind, str(problem)))
    if reply.error is None and expected_tokens is not None and not reply.estimated:
        tokens = reply.completion_tokens
        if tokens != expected_tokens:
            reply.error = ("wrong_token_count", f"{tokens} tokens where {expected_tokens} were asked for")
    return reply


def _long_way(record: Record, count: Callable[[str], int] | None) -> Reply:
    response = parse_response(b"".join(record.parts), closed=record.closed)
    if response.status != 200:
        return Reply(error=(f"http_{response.status}", response.body[:500].decode(errors="replace")))
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return Reply(error=("protocol", f"not an event stream: {response.headers.get('content-type')!r}"))
    found = list(split_events(response.body))
    times = response.arrival(record.parts, record.times, [end for end, _ in found])
    reply = read_reply(((time, data) for time, (_, data) in zip(times, found, strict=True)), count)
    if record.error is not None:
        # How the client ended it (time-out, cancelled, reset) says more than "the stream was cut", but
        # an error that the server had already sent in the stream says more than either.
        if reply.error is None or reply.error[0] in ("cut", "no_usage", "no_text"):
            reply.error = record.error
    elif reply.error is None and response.problem is not None:
        reply.error = (response.problem.kind, str(response.problem))
    return reply


def row(record: Record, reply: Reply, level: int | str, epoch_offset: int) -> dict[str, Any]:
    """`epoch_offset`: ns to add to the record's clock to get the time since 1970 (0 for CLOCK_REALTIME)."""
    sent = record.sent
    chunks = reply.chunks
    return {
        "schema": "servelab.request/1",
        "level": level,
        "id": record.index,
        "t_due": _seconds(record.due + epoch_offset),
        "t_send": _seconds(sent + epoch_offset) if sent else None,
        "t_first": _seconds(chunks[0][0] + epoch_offset) if chunks else None,
        "t_answer": _seconds(reply.first_answer + epoch_offset) if reply.first_answer is not None else None,
        "t_last": _seconds(chunks[-1][0] + epoch_offset) if chunks else None,
        "t_end": _seconds(record.ended + epoch_offset),
        "chunks": [[round((time - sent) / SECOND, 7), tokens] for time, tokens in chunks],
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
        "reasoning_tokens": reply.reasoning_tokens,
        "tokens_estimated": reply.estimated,
        "verify_steps": reply.verify_steps,
        "finish_reason": reply.finish_reason,
        "error": None if reply.error is None else {"kind": reply.error[0], "detail": reply.error[1]},
    }


def line(made: dict[str, Any]) -> str:
    """A row as its line of JSON. The list of deltas is most of it, and is written by hand because json takes
    three times as long for it."""
    head, chunks = made | {"chunks": None}, made["chunks"]
    deltas = ",".join([f"[{offset:.7f},{'null' if tokens is None else tokens}]" for offset, tokens in chunks])
    return json.dumps(head, separators=(",", ":")).replace('"chunks":null', f'"chunks":[{deltas}]', 1) + "\n"


def _seconds(ns: int) -> float:
    return round(ns / SECOND, 6)
