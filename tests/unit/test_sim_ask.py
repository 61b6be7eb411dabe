"""Requests that a real SGLang refuses are refused in its words."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servelab_lab.server.ask import Ask, Refusal, read_body, understand

REAL = Path(__file__).parent / "cases" / "http-real"
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
# The server that was captured.
PACKAGE, CONTEXT = "/opt/servelab/venv/site-packages/sglang", 8192


def refused(body: bytes | dict[str, Any], path: str = COMPLETIONS, kind: str = "application/json") -> bytes:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    with pytest.raises(Refusal) as refusal:
        data = read_body(raw, kind, path, PACKAGE)
        understand(data, path, default_model="synth-llama", context=CONTEXT, package=PACKAGE)
    return json.dumps(refusal.value.document, separators=(",", ":")).encode()


def real(name: str) -> bytes:
    return (REAL / f"{name}.raw").read_bytes().split(b"\r\n\r\n", 1)[1]


def accepted(body: dict[str, Any], path: str = COMPLETIONS) -> Ask:
    return understand(body, path, default_model="m", context=CONTEXT, package=PACKAGE)


@pytest.mark.parametrize(
    ("name", "body", "path"),
    [
        ("err_badjson", b'{"prompt": "x",x', COMPLETIONS),
        ("err_empty", {}, COMPLETIONS),
        ("err_neg_max_tokens", {"prompt": "x", "max_tokens": -1}, COMPLETIONS),
        ("err_str_max_tokens", {"prompt": "x", "max_tokens": "many"}, COMPLETIONS),
        ("err_neg_temp", {"prompt": "x", "temperature": -1}, COMPLETIONS),
        ("err_top_p", {"prompt": "x", "top_p": 2}, COMPLETIONS),
        ("err_wrong_model_colon", {"prompt": "x", "model": "synth-llama:adapter"}, COMPLETIONS),
        ("err_long_chat", {"messages": [{"role": "user", "content": "a " * 9004}]}, CHAT),
        ("err_long_sum", {"prompt": "a " * 8004, "max_tokens": 1000}, COMPLETIONS),
    ],
)
def test_refusals_are_byte_for_byte_those_of_a_real_server(name: str, body: bytes | dict[str, Any], path: str) -> None:
    assert refused(body, path) == real(name)


def test_wrong_content_type() -> None:
    assert refused(b"prompt=x", kind="text/plain") == real("err_content_type")


def test_missing_messages_are_named() -> None:
    # The real answer also shows fields that its own model class filled in.
    message = json.loads(refused({"model": "synth-llama"}, CHAT))["message"]
    assert message.startswith(
        "1 validation error:\n  {'type': 'missing', 'loc': ('body', 'messages'), 'msg': 'Field required'"
    )
    assert message.splitlines()[:1] == json.loads(real("err_no_messages"))["message"].splitlines()[:1]


@pytest.mark.parametrize("field", [{"n": 2}, {"echo": True}, {"tools": [{}]}])
def test_what_is_not_simulated_is_refused_not_ignored(field: dict[str, Any]) -> None:
    assert b"The simulated server does not support" in refused({"prompt": "x", **field})
    assert b"takes one prompt per request" in refused({"prompt": ["a", "b"]})


def test_defaults() -> None:
    ask = accepted({"prompt": "one two three"})
    assert (ask.prompt_tokens, ask.max_tokens, ask.model) == (3, 16, "m")
    assert not (ask.stream or ask.ignore_eos or ask.include_usage or ask.continuous_usage or ask.spec_details)
    # user, hi, assistant; a chat may fill the context but for one position.
    chat = accepted({"messages": [{"role": "user", "content": "hi"}]}, CHAT)
    assert (chat.prompt_tokens, chat.max_tokens) == (3, 8192 - 3 - 1)


def test_prompt_forms() -> None:
    assert accepted({"prompt": [5, 6, 7]}).words == ["w5", "w6", "w7"]
    assert accepted({"prompt": [[5, 6]]}).words == ["w5", "w6"]
    assert accepted({"prompt": ["a b"]}).words == ["a", "b"]
    parts = [{"type": "text", "text": "a b"}, {"type": "image_url"}]
    assert accepted({"messages": [{"role": "user", "content": parts}]}, CHAT).words == ["user", "a", "b", "assistant"]


def test_max_completion_tokens_and_stop() -> None:
    ask = accepted({"messages": [{"role": "user", "content": "a"}], "max_completion_tokens": 7, "stop": "x"}, CHAT)
    assert (ask.max_tokens, ask.stop) == (7, ("x",))
    assert accepted({"prompt": "a", "stop": ["x", "y"], "max_tokens": "5"}).stop == ("x", "y")
