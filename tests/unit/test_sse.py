"""The stream parser against hand-made streams, against streams of a real SGLang 0.5.15, and torn at every byte."""

import json
import random
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from servelab.load.capture import Record
from servelab.load.forms import Forms
from servelab.load.http import BadResponse, parse_response, plain_stream
from servelab.load.metrics import Tally, Window
from servelab.load.rows import interpret
from servelab.shared.sse import Reply, read_reply, split_events

CASES = Path(__file__).parent / "cases"
MS = 1_000_000


def case(name: str) -> Reply:
    lines = (CASES / "15-sse-streams" / f"{name}.jsonl").read_text().splitlines()
    stream, times = b"", []
    for line in map(json.loads, lines):
        stream += line["line"].encode() + b"\n\n"
        if line["line"].startswith("data:"):
            times.append(line["t_ms"])
    return read_reply((time, data) for time, (_, data) in zip(times, split_events(stream), strict=True))


def record(
    parts: list[bytes], times: list[int], *, closed: bool = True, error: tuple[str, str] | None = None
) -> Record:
    ended = times[-1] if times else 0
    return Record(0, 0, 0, ended, b"".join(parts), edges(parts), times, times, 0, closed, error)


def edges(parts: list[bytes]) -> list[int]:
    """Where each of them ends."""
    return [len(b"".join(parts[: i + 1])) for i in range(len(parts))]


def real(name: str) -> bytes:
    return (CASES / "sse-real" / f"{name}.raw").read_bytes()


def test_several_tokens_per_delta() -> None:
    reply = case("multi_token")
    assert reply.error is None
    # the role-only delta at 40 ms is not the first token; the comment at 55 ms is nothing
    assert reply.chunks == [(100, 3), (130, 4), (160, 4), (190, 1)]
    assert (reply.completion_tokens, reply.finish_reason) == (12, "stop")


def test_reasoning_is_the_first_text_and_the_answer_comes_later() -> None:
    reply = case("reasoning")
    assert reply.error is None
    assert reply.chunks[0] == (120, 1)
    assert reply.first_answer == 900
    assert reply.completion_tokens == 42
    # the last token came without text, at 930: it belongs to the last delta with text
    assert reply.chunks == [(120, 1), (400, 19), (900, 22)]
    assert reply.finish_reason == "length"


def level(name: str) -> dict[str, Any]:
    """The figures of a level of one request, sent at 0, that got this stream."""
    tally = Tally(Window(-1, 10_000 * MS, 1.0))
    reply = case(name)
    reply.chunks = [(time * MS, tokens) for time, tokens in reply.chunks]
    reply.first_answer = reply.first_answer * MS if reply.first_answer is not None else None
    tally.add(record([b""], [6000 * MS]), reply)
    return tally.summary(1, 1.0, False, 0.0)


def test_the_figures_of_the_case() -> None:
    expected = json.loads((CASES / "15-sse-streams" / "expected.json").read_text())
    several = level("multi_token")
    # 9 tokens behind the first delta in 90 ms
    assert several["ttft_ms"]["mean"] == expected["multi_token"]["ttft_ms"] == 100
    assert 1000 / several["tpot_ms"]["mean"] == expected["multi_token"]["decode_tok_s"] == 100.0
    assert level("reasoning")["ttft_ms"]["mean"] == expected["reasoning"]["ttft_ms"] == 120
    for name in ("error_midstream", "cut"):
        failed = level(name)
        assert (failed["requests"]["failed"], failed["ttft_ms"]["n"], failed["e2e_ms"]["n"]) == (1, 0, 0)


@pytest.mark.parametrize(("name", "kind"), [("error_midstream", "in_band"), ("no_usage", "no_usage"), ("cut", "cut")])
def test_failed_streams(name: str, kind: str) -> None:
    reply = case(name)
    assert reply.error is not None
    assert reply.error[0] == kind


def test_no_usage_invents_no_tokens() -> None:
    reply = case("no_usage")
    assert reply.completion_tokens is None
    assert reply.chunks == [(80, None), (120, None), (150, None)]


def test_real_completions_stream_with_continuous_usage() -> None:
    raw = real("sse_completions_usage_continuous")
    reply = interpret(record([raw], [5]), 64)
    assert reply.error is None
    assert (reply.prompt_tokens, reply.completion_tokens, reply.cached_tokens) == (9, 64, 7)
    # read off the capture: every word of the text is one token of that model
    assert [tokens for _, tokens in reply.chunks] == [
        *(1, 4, 2, 4, 4, 2, 2, 1, 1, 2, 4, 2, 4, 4, 2, 2, 1, 1, 2, 4, 2, 4, 4, 2, 2, 1)
    ]


def test_real_chat_stream_role_and_finish_are_no_deltas() -> None:
    reply = interpret(record([real("sse_chat_usage")], [5]), 64)
    assert reply.error is None
    assert len(reply.chunks) == 25  # of 29 events: not the role, not the finish, not the usage, not [DONE]
    assert all(tokens is None for _, tokens in reply.chunks)
    assert reply.completion_tokens == 64


def test_real_abort_and_real_error_behind_http_200() -> None:
    aborted = interpret(record([real("sse_aborted_by_abort_request")], [5]), 173)
    assert aborted.error is not None
    assert aborted.error[0] == "aborted"
    too_long = interpret(record([real("err_long_generate_stream")], [5]), 64)
    assert too_long.error == (
        "in_band",
        "The input (9004 tokens) is longer than the model's context length (8192 tokens).",
    )


def test_torn_at_every_byte() -> None:
    raw = real("sse_completions_usage_continuous")
    whole = interpret(record([raw], [5]), 64)
    ends = []  # where each event with text ends in the recorded bytes, found without the parser
    at = 0
    while (at := raw.find(b'"text":" w', at + 1)) >= 0:
        ends.append(raw.index(b"\n\n", at) + 2)
    for cut in range(1, len(raw)):
        reply = interpret(record([raw[:cut], raw[cut:]], [100, 200]), 64)
        assert reply.error is None, cut
        assert [tokens for _, tokens in reply.chunks] == [tokens for _, tokens in whole.chunks]
        # a delta has arrived when its last byte has
        assert [time for time, _ in reply.chunks] == [100 if end <= cut else 200 for end in ends], cut


def test_byte_by_byte() -> None:
    raw = real("sse_chat_usage")
    reply = interpret(record([raw[i : i + 1] for i in range(len(raw))], list(range(len(raw)))), 64)
    assert reply.error is None
    assert reply.completion_tokens == 64
    assert [raw[time - 1 : time + 1] for time, _ in reply.chunks] == [b"\n\n"] * 25


def test_cut_at_every_byte_is_never_a_success() -> None:
    raw = real("sse_completions_usage_continuous")
    for cut in range(len(raw)):
        reply = interpret(record([raw[:cut]] if cut else [], [100] if cut else []), 64)
        assert reply.error is not None, cut
        assert reply.error[0] == "cut", (cut, reply.error)


@pytest.mark.parametrize("end", [b"\n", b"\r\n", b"\r"])
def test_line_ends_comments_and_joined_data(end: bytes) -> None:
    lines = [b": hello", b"event: x", b"data:1", b"data: 2", b"", b"id: 7", b"", b"data: 3", b"", b"data: lost"]
    stream = end.join(lines)
    assert [data for _, data in split_events(stream)] == [b"1\n2", b"3"]


def test_an_event_ends_behind_its_blank_line() -> None:
    assert list(split_events(b"data: a\n\ndata: bc\r\n\r\n")) == [(9, b"a"), (21, b"bc")]


@pytest.mark.parametrize(
    ("data", "kind"),
    [
        (b"{", "protocol"),
        (b"[]", "protocol"),
        (b'{"choices": [{"text": "a", "finish_reason": null}], "usage": {"completion_tokens": "1"}}', "protocol"),
        (b'{"choices": 3}', "protocol"),
        (b'{"error": "out of memory"}', "in_band"),
    ],
)
def test_what_no_server_should_send(data: bytes, kind: str) -> None:
    reply = read_reply([(1, data), (2, b"[DONE]")])
    assert reply.error is not None
    assert reply.error[0] == kind


def test_usage_that_goes_backwards_is_refused() -> None:
    def delta(total: int) -> bytes:
        choice = {"text": "a", "finish_reason": None}
        return json.dumps({"choices": [choice], "usage": {"completion_tokens": total}}).encode()

    reply = read_reply([(1, delta(3)), (2, delta(2))])
    assert reply.error is not None
    assert reply.error[0] == "protocol"


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def test_chunked_framing() -> None:
    response = parse_response(HEAD + b"3\r\nabc\r\nA;x=1\r\n0123456789\r\n0\r\n\r\n", closed=False)
    assert (response.status, response.body, response.problem) == (200, b"abc0123456789", None)


@pytest.mark.parametrize(
    ("raw", "kind"),
    [
        (HEAD + b"3\r\nabc\r\n0\r\n", "cut"),
        (HEAD + b"3\r\nab", "cut"),
        (HEAD + b"3\r\nabcd\r\n0\r\n\r\n", "protocol"),
        (HEAD + b"x\r\nabc\r\n0\r\n\r\n", "protocol"),
        (HEAD + b"-3\r\nabc\r\n0\r\n\r\n", "protocol"),
        (HEAD + b"0\r\n\r\nHTTP/1.1", "protocol"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nabc", "cut"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nabc", "protocol"),
        (b"HTTP/1.1 200 OK\r\n\r\nabc", "cut"),
    ],
)
def test_bad_framing(raw: bytes, kind: str) -> None:
    problem = parse_response(raw, closed=False).problem
    assert problem is not None
    assert problem.kind == kind


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"HTTP/1.1 200 OK\r\n",
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"HTTP/2 200\r\n\r\n",
        b"HTTP/1.1 20x OK\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nab",
        b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\na",
        b"HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na",
    ],
)
def test_what_is_no_response(raw: bytes) -> None:
    with pytest.raises(BadResponse):
        parse_response(raw, closed=True)


# SGLang's own /generate.


def test_real_generate_stream_repeats_its_text_and_tells_its_verify_steps() -> None:
    reply = interpret(record([real("sse_generate")], [5]), 64)
    assert reply.error is None
    # differences of the completion_tokens that stand in the capture: 1 5 7 11 15 17 19 20 21 23 27 …
    assert [tokens for _, tokens in reply.chunks] == [
        *(1, 4, 2, 4, 4, 2, 2, 1, 1, 2, 4, 2, 4, 4, 2, 2, 1, 1, 2, 4, 2, 4, 4, 2, 2, 1)
    ]
    assert (reply.prompt_tokens, reply.cached_tokens, reply.reasoning_tokens) == (9, 7, 0)
    assert (reply.verify_steps, reply.finish_reason) == (25, "length")
    assert reply.first_answer == 5


def native(text: str, ids: int, total: int, reason: object = None) -> bytes:
    meta = {"completion_tokens": total, "prompt_tokens": 3, "finish_reason": reason}
    return json.dumps({"text": text, "output_ids": [1] * ids, "meta_info": meta}).encode()


def test_increments_of_generate_may_be_alike() -> None:
    end = {"type": "length", "length": 4}
    events = [(1, native("a", 1, 1)), (2, native("a", 1, 2)), (3, native("aa", 2, 4, end)), (4, b"[DONE]")]
    reply = read_reply(events)
    assert (reply.error, reply.chunks) == (None, [(1, 1), (2, 1), (3, 2)])


def test_a_repeated_text_that_did_not_grow_is_no_delta() -> None:
    end = {"type": "stop", "matched": 2}
    events = [(1, native("a", 1, 1)), (2, native("a", 2, 2)), (3, native("ab", 3, 3)), (4, native("ab", 4, 4, end))]
    reply = read_reply([*events, (5, b"[DONE]")])
    # the second token is counted with the delta that shows it, the end-of-sequence token with the last one
    assert (reply.error, reply.chunks) == (None, [(1, 1), (3, 3)])


def test_generate_aborted() -> None:
    reply = read_reply([(1, native("a", 1, 1, {"type": "abort", "message": "AbortReq"})), (2, b"[DONE]")])
    assert reply.error is not None
    assert reply.error[0] == "aborted"


def test_verify_steps_and_reasoning_on_the_openai_routes() -> None:
    events = [
        b'{"choices":[{"delta":{"content":"a"},"finish_reason":"length"}],"usage":null}',
        b'{"choices":[],"usage":null,"sglext":{"spec_tokens_details":{"spec_verify_ct":3,"spec_accept_length":2.0}}}',
        b'{"choices":[],"usage":{"completion_tokens":6,"completion_tokens_details":{"reasoning_tokens":2}}}',
        b"[DONE]",
    ]
    reply = read_reply([(i, data) for i, data in enumerate(events)])
    assert (reply.error, reply.verify_steps, reply.reasoning_tokens, reply.completion_tokens) == (None, 3, 2, 6)


# Servers that do not say how many tokens they generated (case 15).


def test_without_usage_tokens_are_counted_in_the_text_and_marked() -> None:
    lines = (CASES / "15-sse-streams" / "no_usage.jsonl").read_text().splitlines()
    events = [(line["t_ms"], line["line"][6:].encode()) for line in map(json.loads, lines)]
    reply = read_reply(events, lambda text: len(text.split()))
    # "one two three", " four five", " six"
    assert (reply.error, reply.completion_tokens, reply.estimated) == (None, 6, True)
    assert reply.chunks == [(80, None), (120, None), (150, None)]
    tally = Tally(Window(-1, 10_000, 1.0))
    tally.add(record([b""], [6000]), reply)
    figures = tally.summary(1, 1.0, False, 0.0)
    assert (figures["requests"]["completed"], figures["requests"]["tokens_estimated"]) == (1, 1)
    assert figures["tpot_ms"]["mean"] is None  # nobody knows how many tokens the first delta was


def test_time_to_first_answer_of_the_case() -> None:
    expected = json.loads((CASES / "15-sse-streams" / "expected.json").read_text())["reasoning"]
    assert level("reasoning")["ttfa_ms"]["mean"] == expected["time_to_first_answer_ms"] == 900
    assert level("multi_token")["ttfa_ms"]["mean"] == 100  # no thoughts: its first text is its answer


# The two ways through a recorded response must agree.


def long_way(parts: list[bytes], times: list[int]) -> Reply | str:
    """As if there were no short one. A response that is not even one is its kind of problem."""
    try:
        response = parse_response(b"".join(parts), closed=False)
    except BadResponse as problem:
        return problem.kind
    events = list(split_events(response.body))
    arrived = response.arrival(edges(parts), times, [end for end, _ in events])
    reply = read_reply((time, data) for time, (_, data) in zip(arrived, events, strict=True))
    if response.problem is not None:
        return response.problem.kind
    return reply


def short_way(parts: list[bytes], times: list[int], forms: Forms) -> Reply | None:
    raw = b"".join(parts)
    start = plain_stream(raw)
    return None if start is None else forms.read(raw, start, edges(parts), times)


@pytest.mark.parametrize("name", ["sse_chat_usage", "sse_completions_usage_continuous", "sse_generate"])
def test_the_short_way_is_taken_where_reads_are_whole_and_agrees(name: str) -> None:
    raw = real(name).replace(b"\r\nConnection: close", b"")
    start = raw.index(b"\r\n\r\n") + 4
    cuts = [start, *(found.end() for found in re.finditer(rb"\n\n\r\n", raw))]
    cuts[-1] = len(raw)
    parts = [raw[:start] + raw[start : cuts[1]], *(raw[a:b] for a, b in pairwise(cuts[1:]))]
    times = list(range(100, 100 + len(parts)))
    assert short_way(parts, times, Forms()) == long_way(parts, times)


def test_whatever_happens_to_the_bytes_both_ways_agree_and_nothing_raises() -> None:
    rng = random.Random(15)
    names = ["sse_chat_usage", "sse_completions_usage_continuous", "sse_generate", "err_long_generate_stream"]
    raws = [real(name) for name in names]
    forms = Forms()
    short_ways = 0
    for _ in range(3000):
        changed = bytearray(rng.choice(raws))
        for _ in range(rng.choice((0, 0, 1, 1, 2, 5))):
            at = rng.randrange(len(changed))
            kind = rng.randrange(4)
            if kind == 0:
                changed[at] = rng.randrange(256)
            elif kind == 1:
                del changed[at : at + rng.choice((1, 2, 9))]
            elif kind == 2:
                changed[at:at] = rng.choice((b"\r\n", b"\n\n", b"0\r\n\r\n", b"data: ", b"\r", b"\xc3", b"5"))
            else:
                changed[at:at] = changed[at : at + 30]
        raw = bytes(changed)
        if rng.random() < 0.5:
            ends = [found.end() for found in re.finditer(rb"\n\r\n", raw)]
        else:
            ends = [rng.randrange(1, len(raw)) for _ in range(rng.randrange(6))]
        cuts = sorted({0, len(raw), *rng.sample(ends, min(len(ends), rng.randrange(40)))})
        parts = [raw[a:b] for a, b in pairwise(cuts)]
        times = [1000 + 7 * i for i in range(len(parts))]
        reply = interpret(record(parts, times, closed=False), None)
        try:
            short = short_way(parts, times, forms)
        except BadResponse:
            short = None
        if short is None:
            continue
        short_ways += 1
        assert short == long_way(parts, times) == reply
    assert short_ways > 300


def test_a_hexadecimal_size_is_digits_only() -> None:
    for size in (b"0x3", b"+3", b"3_0", b" 3"):
        problem = parse_response(HEAD + size + b"\r\nabc\r\n0\r\n\r\n", closed=False).problem
        assert problem is not None
        assert problem.kind == "protocol"
