"""Prompts: the same for every mode, different for every request, about as long as asked for."""

import json
from itertools import islice

import pytest

from servelab.load.prompts import prompt, requests


def test_a_prompt_depends_on_seed_level_and_index_only() -> None:
    assert prompt(1, 10, 3, 50) == prompt(1, 10, 3, 50)
    others = [prompt(2, 10, 3, 50), prompt(1, 11, 3, 50), prompt(1, 10, 4, 50)]
    assert len({prompt(1, 10, 3, 50), *others}) == 4


def test_no_two_prompts_begin_alike() -> None:
    first_words = {prompt(1, level, index, 30).split()[0] for level in (1, 2, 250) for index in range(1000)}
    assert len(first_words) == 3000


@pytest.mark.parametrize("words", [10, 37, 512, 4000])
def test_length(words: int) -> None:
    text = prompt(1, 1, 0, words)
    assert len(text.replace(".", " .").split()) == words


def test_a_longer_prompt_begins_as_the_shorter_one() -> None:
    assert prompt(1, 1, 0, 60).startswith(prompt(1, 1, 0, 40).rstrip("."))


@pytest.mark.parametrize("api", ["completions", "chat"])
def test_requests_are_complete_http(api: str) -> None:
    found = list(
        islice(
            requests(
                host="h:1", path="/p", api=api, model="m", seed=1, level=2, input_tokens=20, output_tokens=5, key="k"
            ),
            2,
        )
    )
    head, body = found[1].split(b"\r\n\r\n", 1)
    lines = head.decode().split("\r\n")
    assert lines[0] == f"POST /p/v1/{'chat/completions' if api == 'chat' else 'completions'} HTTP/1.1"
    assert {"Host: h:1", f"Content-Length: {len(body)}", "Authorization: Bearer k"} <= set(lines)
    request = json.loads(body)
    text = request["messages"][0]["content"] if api == "chat" else request["prompt"]
    assert text == prompt(1, 2, 1, 20)
