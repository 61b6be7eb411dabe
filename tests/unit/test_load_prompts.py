"""Prompts: the same for every mode, different for every request, about as long as asked for."""

import pytest

from servelab.load.prompts import prompt


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
