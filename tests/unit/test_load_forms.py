"""Events that are recognised instead of taken apart: whatever a server sends, the answer is the strict reader's."""

import json
import random
import re
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path

import pytest

from servelab.load import forms as forms_module
from servelab.load.forms import MISSES, MOST, NEAR, PROBE, Forms, form
from servelab.shared.sse import Reader, Reply, read_reply

CASES = Path(__file__).parent / "cases" / "sse-real"


def delta(text: str, total: int | None, **more: object) -> str:
    """As SGLang 0.5.15 sends it, ids and all."""
    choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": None, "matched_stop": None}
    usage = {"prompt_tokens": 9, "total_tokens": 9 + (total or 0), "completion_tokens": total}
    message = {"id": "53788e2c", "created": 1795967650, "choices": [choice], "usage": usage if total else None} | more
    return json.dumps(message, separators=(",", ":"), ensure_ascii=False)


FINISH = '{"choices":[{"text":"","finish_reason":"length"}]}'


def strictly(events: list[str], count: Callable[[str], int] | None = None) -> Reply:
    return read_reply([(100 + i, data.encode()) for i, data in enumerate(events)], count)


def chunk(data: str, size: str = "x") -> bytes:
    body = f"data: {data}\n\n".encode()
    return format(len(body), size).encode() + b"\r\n" + body + b"\r\n"


def stream(events: list[str]) -> tuple[bytes, list[int]]:
    """The body of a response, an event a chunk, and where the chunks end."""
    chunks = list(map(chunk, events))
    return b"".join([*chunks, b"0\r\n\r\n"]), list(accumulate(map(len, chunks)))


def read(events: list[str], forms: Forms | None = None, count: Callable[[str], int] | None = None) -> Reply | None:
    raw, edges = stream(events)
    return (forms or Forms()).read(raw, 0, edges, [100 + i for i in range(len(events))], count)


def whole(reply: Reply | None) -> Reply:
    assert reply is not None
    return reply


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The events that were taken apart."""
    found: list[str] = []
    take = Reader.take

    def noted(self: Reader, time: int, data: str) -> None:
        if str(PROBE) not in data:  # that one is made when a form is
            found.append(data)
        take(self, time, data)

    monkeypatch.setattr(Reader, "take", noted)
    return found


def test_only_the_first_and_the_last_of_equal_events_are_taken_apart(taken: list[str]) -> None:
    texts = [" one", "\n", ' "', "é", "中文", "\\", "\u2028", " 1", "x"]
    events = [*(delta(text, 1 + 2 * i) for i, text in enumerate(texts)), delta("", 17), FINISH, "[DONE]"]
    reply = whole(read(events))
    assert taken == [events[0], *events[8:]]
    assert reply.chunks == [(100, 1), *((100 + i, 2) for i in range(1, 9))]
    assert (reply.completion_tokens, reply.prompt_tokens, reply.first_answer, reply.error) == (17, 9, 100, None)


def test_a_form_that_was_found_serves_the_next_response(taken: list[str]) -> None:
    forms = Forms()
    for number in range(3):
        events = [delta(f"{number}.{i}", 1 + i, id=f"id-{number}", created=5 + number) for i in range(6)]
        reply = whole(read([*events, FINISH, "[DONE]"], forms))
        assert [tokens for _, tokens in reply.chunks] == [1] * 6
    assert len(taken) == 3 * 4
    assert len(forms._known) == 1


def test_thoughts_and_answers_have_a_form_each(taken: list[str]) -> None:
    def chat(channel: str, total: int) -> str:
        choice = {"index": 0, "delta": {"content": None, "reasoning_content": None} | {channel: " w"}}
        return json.dumps({"choices": [choice], "usage": {"completion_tokens": total, "prompt_tokens": 4}})

    events = [chat("reasoning_content", i) for i in range(1, 5)] + [chat("content", i) for i in range(5, 9)]
    reply = whole(read([*events, FINISH, "[DONE]"]))
    assert reply.first_answer == 104
    assert reply.chunks == [(100 + i, 1) for i in range(8)]
    assert taken == [events[0], events[3], events[4], events[7], FINISH, "[DONE]"]


def test_without_usage_times_count_and_texts_only_where_a_tokenizer_counts_them(taken: list[str]) -> None:
    events = [*(delta(f" {i}", None) for i in range(5)), FINISH, "[DONE]"]
    reply = whole(read(events))
    assert reply.chunks == [(100 + i, None) for i in range(5)]
    assert reply.error is not None
    assert reply.error[0] == "no_usage"
    assert len(taken) == 4
    reply = whole(read(events, None, lambda text: len(text.split())))
    assert (reply.completion_tokens, reply.estimated, reply.error) == (5, True, None)


@pytest.mark.parametrize(
    "odd",
    [
        delta("", 3),  # no text
        delta("a", 1),  # tokens fell
        delta("a", 3).replace("}]", '}],"choices":[]'),  # a name twice: the last one counts
        delta("a", 3).replace("}]", ',"text":""}]'),
        delta("a", 3).replace('"usage"', '"error":"no memory","usage"'),
        delta("a", 3).replace('"finish_reason":null', '"finish_reason":"stop"'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":03'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":3.0'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":"3"'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":0'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":true'),
        delta("a", 3).replace('"completion_tokens":3', '"completion_tokens":' + "9" * 5000),
        delta("a", 3).replace('"a"', '"a\t"'),  # no JSON: control characters, bad escapes, no quote
        delta("a", 3).replace('"a"', '"\\a"'),
        delta("a", 3).replace('"a"', '"\\u12g4"'),
        delta("a", 3).replace('"a"', '"a'),
        delta("a", 3).replace('"a"', "5"),  # a text that is none
        delta("a", 3).replace('"a"', "[" * 100_000),
        delta("a", 3) + "}",
        delta("a", 3) + " ",
        delta("a", 3)[:-1],
        "[DONE]",
        "",
        "null",
    ],
)
def test_an_odd_event_among_equal_ones_is_seen(odd: str) -> None:
    even = [delta("a", 1), delta("b", 2), delta("c", 3), delta("d", 4)]
    for place in range(5):
        events = [*even[:place], odd, *even[place:], FINISH, "[DONE]"]
        assert read(events) == strictly(events), place
        events = [odd, odd, odd, *events]
        assert read(events) == strictly(events), place


@pytest.mark.parametrize(
    "data",
    [
        # the number of tokens under a name that is written otherwise, and another number under the plain one
        delta("a", 3).replace("completion_tokens", "completion\\u005ftokens"),
        delta("a", 3).replace('"usage"', '"x":{"completion_tokens":8},"usage"'),
        delta("a", None).replace('"usage":null', '"x":{"completion_tokens":8},"usage":{"prompt_tokens":1}'),
        delta("a", None).replace('"usage":null', '"usage":{"x":{"completion_tokens":8}}'),
        delta("a", 3, sglext={"spec_tokens_details": {"spec_verify_ct": 4}}),
        '{"text":"a","output_ids":[1],"meta_info":{"completion_tokens":3,"prompt_tokens":3,"finish_reason":null}}',
    ],
)
def test_events_that_are_no_form_or_one_without_tokens(data: str) -> None:
    events = [data, data, data, data, FINISH, "[DONE]"]
    assert read(events) == strictly(events)


def test_names_and_texts_may_look_like_each_other() -> None:
    texts = ['"completion_tokens":5', '{"usage":', "}", ":", 'a":"b', "completion_tokens", "7", "[DONE]", "\\u0041"]
    events = [*(delta(text, 1 + i, id=text) for i, text in enumerate(texts)), FINISH, "[DONE]"]
    assert read(events) == strictly(events)
    assert whole(read(events)).completion_tokens == 9
    spaced = [json.dumps(json.loads(data), indent=1).replace("\n", " ").replace('":', '" :') for data in events[:-1]]
    assert read([*spaced, "[DONE]"]) == strictly([*spaced, "[DONE]"])
    assert whole(read([*spaced, "[DONE]"])).completion_tokens == 9


def test_a_form_keeps_what_matters() -> None:
    model = delta("a", 3, role="x")
    made = form(model.encode())
    assert made is not None
    other = delta("anything \\ else\n", 77, role="assistant")
    assert made.findall(chunk(model) + chunk(other, "X")) == [
        (b"d9", f"data: {model}\n\n".encode(), b"3"),
        (b"F3", f"data: {other}\n\n".encode(), b"77"),
    ]
    for other in (delta("", 3, role="x"), delta("a", None, role="x"), delta("a", 3, role=None), delta("a", 3)):
        assert made.search(chunk(other)) is None
    assert made.search(chunk(delta("a", 3, role="x").replace("created", "creating"))) is None


EVEN = [delta(f" {i}", 1 + i) for i in range(12)]


@pytest.mark.parametrize(
    "odd",
    [
        b"b5;ext=1" + chunk(EVEN[5])[2:],  # a size with an extension
        chunk(EVEN[5]).replace(b"data: ", b"data:"),
        chunk("").replace(b"data: ", b": waiting"),
        chunk(EVEN[5])[:-2] + chunk(EVEN[6])[:-2] + b"\r\n",
        chunk(EVEN[5]).replace(b" 5", b"\xff5"),  # no UTF-8
        b"5\r\ndata:\r\n" + chunk(EVEN[5]),  # an event in two chunks
        chunk(EVEN[5]) + b"0\r\n\r\n",
        chunk(EVEN[5])[2:],
    ],
)
def test_what_stands_otherwise_is_read_the_long_way(odd: bytes) -> None:
    """Wherever it stands, the short way gives up instead of leaving it out."""
    tail = [FINISH, "[DONE]"]
    for place in range(len(EVEN) + 1):
        raw = b"".join([*map(chunk, EVEN[:place]), odd, *map(chunk, EVEN[place:] + tail), b"0\r\n\r\n"])
        assert Forms().read(raw, 0, [len(raw)], [1]) is None, place


def test_a_size_that_is_not_the_event_s_is_seen_wherever_it_stands() -> None:
    for place in range(len(EVEN)):
        chunks = list(map(chunk, [*EVEN, FINISH, "[DONE]"]))
        size, rest = chunks[place].split(b"\r\n", 1)
        chunks[place] = b"%x\r\n" % (int(size, 16) - 1) + rest
        raw = b"".join([*chunks, b"0\r\n\r\n"])
        assert Forms().read(raw, 0, [len(raw)], [1]) is None, place


def test_sizes_may_be_written_in_capitals_and_with_leading_zeros(taken: list[str]) -> None:
    chunks = [chunk(data, "04X") for data in [*EVEN, FINISH, "[DONE]"]]
    raw, edges = b"".join([*chunks, b"0\r\n\r\n"]), list(accumulate(map(len, chunks)))
    reply = Forms().read(raw, 0, edges, [100 + i for i in range(len(chunks))])
    assert reply == strictly([*EVEN, FINISH, "[DONE]"])
    assert taken[:14] == [EVEN[0], EVEN[-1], FINISH, "[DONE]", *EVEN[:10]]


def test_reads_that_end_anywhere_give_each_event_the_time_of_its_last_byte() -> None:
    """An event has arrived with the last byte of its chunk's data; what is behind that may come later."""
    events = [*EVEN, FINISH, "[DONE]"]
    raw, ends = stream(events)
    rng = random.Random(3)
    for _ in range(300):
        edges = sorted({*rng.sample(range(1, len(raw)), rng.randrange(30)), len(raw)})
        reply = whole(Forms().read(raw, 0, edges, [10 * i for i in range(len(edges))]))
        arrived = [10 * next(i for i, edge in enumerate(edges) if edge >= end - 2) for end in ends]
        assert [time for time, _ in reply.chunks] == arrived[: len(EVEN)]


def test_with_usage_a_tokenizer_is_no_reason_to_take_events_apart(taken: list[str]) -> None:
    def never(text: str) -> int:
        raise AssertionError(text)

    reply = read([*EVEN, FINISH, "[DONE]"], None, never)
    assert taken == [EVEN[0], EVEN[-1], FINISH, "[DONE]"]
    assert reply == strictly([*EVEN, FINISH, "[DONE]"])


def test_a_stream_with_many_breaks_is_not_searched_as_a_whole_after_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every fourth event has no text (half a character), and is longer than four others."""
    searched = []
    alike = forms_module._read_alike

    def noted(reader: Reader, form: object, raw: bytes, at: int, end: int, *more: object) -> int:
        searched.append(end - at)
        return alike(reader, form, raw, at, end, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(forms_module, "_read_alike", noted)
    events = [delta("" if i % 4 == 3 else "x", 1 + i) for i in range(2000)]
    assert read([*events, FINISH, "[DONE]"]) == strictly([*events, FINISH, "[DONE]"])
    assert searched[0] > 200_000
    assert max(searched[1:]) == NEAR


def test_events_of_ever_other_forms_are_read_and_no_longer_compared() -> None:
    forms = Forms()
    events = [delta("a", 1 + i, logprobs=[0.5, -i / 7]) for i in range(2 * MISSES)]
    assert read([*events, FINISH, "[DONE]"], forms) == strictly([*events, FINISH, "[DONE]"])
    assert len(forms._known) < MOST


def test_whatever_happens_to_the_events_both_readers_agree() -> None:
    rng = random.Random(9)
    streams = []
    for name in ("sse_chat_usage", "sse_completions_usage_continuous", "sse_generate"):
        raw = (CASES / f"{name}.raw").read_text()
        streams.append(re.findall(r"^data: (.*)$", raw, re.MULTILINE))
    streams.append([*(delta(f" {i}", 1 + i) for i in range(12)), FINISH, "[DONE]"])
    forms = Forms()
    pieces = ['"', "\\", "{", "}", "[", "]", ":", ",", "0", "7", "-", "e5", ".", " ", "null", "\x1f", "é", '""', "\\u0"]
    compared = 0
    for _ in range(4000):
        events = list(rng.choice(streams))
        for _ in range(rng.choice((0, 1, 1, 2, 4))):
            number = rng.randrange(len(events))
            data = events[number]
            at, kind = rng.randrange(len(data) + 1), rng.randrange(4)
            if kind == 0:
                events[number] = data[:at] + rng.choice(pieces) + data[at:]
            elif kind == 1:
                events[number] = data[:at] + rng.choice(pieces) + data[at + 1 :]
            elif kind == 2:
                events[number] = data[:at] + data[at + rng.choice((1, 2, 8)) :]
            else:  # the same change everywhere, so that it becomes a form
                events = [data[:at] + data[at + 1 :] for data in events]
        expected = strictly(events)
        assert read(events, forms) == read(events) == expected
        compared += expected.error is None
    assert compared > 500
