"""A recorded request → one raw row (schema servelab.request/1, times in wall seconds)."""

from __future__ import annotations

import json
from collections.abc import Callable

from servelab.load.capture import Record
from servelab.load.forms import Forms
from servelab.load.http import BadResponse, parse_response, plain_stream
from servelab.shared.sse import Reply, read_reply, split_events

SECOND = 1_000_000_000


def interpret(
    record: Record, expected_tokens: int | None, count: Callable[[str], int] | None = None, forms: Forms | None = None
) -> Reply:
    """What the server answered, times in ns of the record's clock.

    `expected_tokens`: a complete reply with another number of tokens is an error (None: any number is right).
    `count`: a tokenizer, for servers that do not say how many tokens they generated. `forms`: those of the records
    before from the same server, which make it faster.
    """
    if record.error is not None and not record.raw:
        return Reply(error=record.error)
    try:
        reply = _short_way(record, count, forms or Forms()) or _long_way(record, count)
    except BadResponse as problem:
        return Reply(error=record.error or (problem.kind, str(problem)))
    if reply.error is None and expected_tokens is not None and not reply.estimated:
        tokens = reply.completion_tokens
        if tokens != expected_tokens:
            reply.error = ("wrong_token_count", f"{tokens} tokens where {expected_tokens} were asked for")
    return reply


def _short_way(record: Record, count: Callable[[str], int] | None, forms: Forms) -> Reply | None:
    start = plain_stream(record.raw) if record.error is None else None
    return None if start is None else forms.read(record.raw, start, record.edges, record.times, count)


def _long_way(record: Record, count: Callable[[str], int] | None) -> Reply:
    response = parse_response(record.raw, closed=record.closed)
    if response.status != 200:
        return Reply(error=(f"http_{response.status}", response.body[:500].decode(errors="replace")))
    if not response.headers.get("content-type", "").startswith("text/event-stream"):
        return Reply(error=("protocol", f"not an event stream: {response.headers.get('content-type')!r}"))
    found = list(split_events(response.body))
    times = response.arrival(record.edges, record.times, [end for end, _ in found])
    reply = read_reply(((time, data) for time, (_, data) in zip(times, found, strict=True)), count)
    if record.error is not None:
        # How the client ended it (time-out, cancelled, reset) says more than "the stream was cut", but
        # an error that the server had already sent in the stream says more than either.
        if reply.error is None or reply.error[0] in ("cut", "no_usage", "no_text"):
            reply.error = record.error
    elif reply.error is None and response.problem is not None:
        reply.error = (response.problem.kind, str(response.problem))
    return reply


def line(record: Record, reply: Reply, level: int | str, epoch_offset: int) -> str:
    """The row, a line of JSON. `epoch_offset`: ns to add to the record's clock to get the time since 1970 (0 for
    CLOCK_REALTIME)."""
    sent = record.sent
    chunks = reply.chunks
    made = {
        "schema": "servelab.request/1",
        "level": level,
        "id": record.index,
        "t_due": _seconds(record.due + epoch_offset),
        "t_send": _seconds(sent + epoch_offset) if sent else None,
        "t_first": _seconds(chunks[0][0] + epoch_offset) if chunks else None,
        "t_answer": _seconds(reply.first_answer + epoch_offset) if reply.first_answer is not None else None,
        "t_last": _seconds(chunks[-1][0] + epoch_offset) if chunks else None,
        "t_end": _seconds(record.ended + epoch_offset),
        "chunks": None,
        "prompt_tokens": reply.prompt_tokens,
        "cached_tokens": reply.cached_tokens,
        "completion_tokens": reply.completion_tokens,
        "reasoning_tokens": reply.reasoning_tokens,
        "tokens_estimated": reply.estimated,
        "verify_steps": reply.verify_steps,
        "finish_reason": reply.finish_reason,
        "error": None if reply.error is None else {"kind": reply.error[0], "detail": reply.error[1]},
    }
    # The deltas are most of it, and json takes three times as long for them.
    if chunks and chunks[0][1] is None:
        deltas = [f"[{(time - sent) / SECOND:.7f},null]" for time, _ in chunks]
    else:
        deltas = [f"[{(time - sent) / SECOND:.7f},{tokens}]" for time, tokens in chunks]
    return json.dumps(made, separators=(",", ":")).replace('"chunks":null', f'"chunks":[{",".join(deltas)}]', 1) + "\n"


def _seconds(ns: int) -> float:
    return round(ns / SECOND, 6)
