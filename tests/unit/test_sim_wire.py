"""The bytes of streams and answers, against captures of a real SGLang."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from servelab_lab.server.engine import Spec
from servelab_lab.server.wire import ChatStream, CompletionStream, Reply, Stream, Whole, spec_details

REAL = Path(__file__).parent / "cases" / "http-real"


def body_of(name: str) -> bytes:
    return (REAL / f"{name}.raw").read_bytes().split(b"\r\n\r\n", 1)[1]


def events(body: bytes) -> list[dict[str, Any]]:
    return [json.loads(event) for event in re.findall(rb"data: (\{.*\})\n\n", body)]


def replay(name: str, kind: type[Stream], *, include_usage: bool, continuous: bool = False) -> tuple[bytes, bytes]:
    """Give the texts of a captured stream to ours, step by step; return both bodies."""
    real = body_of(name)
    shown = events(real)
    choices = [event["choices"][0] for event in shown if event["choices"]]
    last = shown[-1].get("usage") or {"prompt_tokens": 9}
    first = shown[0]
    sent: list[bytes] = []
    stream = kind(
        Reply(first["id"], first["created"], first["model"], last["prompt_tokens"]),
        sent.append,
        head=lambda: b"",
        include_usage=include_usage,
        continuous_usage=continuous,
        sglext=None,
    )
    stream.cached_tokens = (last.get("prompt_tokens_details") or {}).get("cached_tokens", 0)
    texts = [choice["text"] if "text" in choice else choice["delta"].get("content") for choice in choices]
    end = choices[-1]
    if kind is ChatStream:
        # The role comes by itself, and the last text has its own event before the one with the reason.
        texts = texts[1:-1]
    for text in texts[:-1]:
        stream.step(text, text.count(" "), None, None)
    tokens = texts[-1].count(" ") + (end["finish_reason"] == "stop")
    stream.step(texts[-1], tokens, end["finish_reason"], end["matched_stop"])
    assert len(sent) == len(texts), "one write per step"
    return b"".join(sent), real


@pytest.mark.parametrize(
    ("name", "kind", "usage"),
    [
        ("sse_completions_plain", CompletionStream, False),
        ("sse_completions_usage", CompletionStream, True),
        ("sse_completions_eos", CompletionStream, True),
        ("sse_chat_plain", ChatStream, False),
        ("sse_chat_usage", ChatStream, True),
    ],
)
def test_streams_are_byte_for_byte_those_of_a_real_server(name: str, kind: type[Stream], usage: bool) -> None:
    ours, real = replay(name, kind, include_usage=usage)
    assert ours == real


def test_continuous_usage_counts_on_every_event() -> None:
    ours, real = replay("sse_completions_usage_continuous", CompletionStream, include_usage=True, continuous=True)
    assert ours == real


def test_whole_completion() -> None:
    real = json.loads(body_of("completions_eos"))
    whole = Whole(Reply(real["id"], real["created"], real["model"], 2))
    whole.add(real["choices"][0]["text"], 16)
    document = whole.document(chat=False, reason="stop", matched=2)
    assert json.dumps(document, separators=(",", ":")).encode() == body_of("completions_eos")


def test_whole_chat() -> None:
    real = json.loads(body_of("chat"))
    whole = Whole(Reply(real["id"], real["created"], real["model"], 11))
    whole.add(real["choices"][0]["message"]["content"], 64)
    whole.cached_tokens = 9
    document = whole.document(chat=True, reason="length", matched=None)
    assert json.dumps(document, separators=(",", ":")).encode() == body_of("chat")


def test_text_is_escaped_where_json_needs_it() -> None:
    sent: list[bytes] = []
    stream = CompletionStream(
        Reply("i", 1, "m", 1), sent.append, head=lambda: b"", include_usage=False, continuous_usage=False, sglext=None
    )
    stream.step(' "ü"\n', 1, None, None)
    size, rest = sent[0].split(b"\r\n", 1)
    assert int(size, 16) == len(rest) - 2
    assert events(rest)[0]["choices"][0]["text"] == ' "ü"\n'


def test_spec_details_add_up() -> None:
    # Ten steps: five accepted no draft, three one, two both: 7 of 20 drafts, 17 tokens.
    details = spec_details(Spec(10, [5, 3, 2]), 3)
    assert details["spec_num_correct_drafts"] == 7
    assert details["spec_num_proposed_drafts"] == 20
    assert details["spec_accept_rate"] == pytest.approx(0.35)
    assert details["spec_accept_length"] == pytest.approx(1.7)
    assert details["spec_correct_drafts_histogram"] == [5, 3, 2]
