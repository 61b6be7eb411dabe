"""What the simulated model says: a known function of the prompt, so that a correctness probe can know the answer.

One whitespace-separated word is one token, as with a WordLevel tokenizer. After the answer, if the prompt has one, the
text is a chain of words ` w<n>`:

    n(0) = crc32(the prompt's words, joined by single spaces) mod 32768
    n(i+1) = (20021 × n(i) + 12345) mod 32768

Unless told to ignore it, the end-of-sequence token comes after the answer, or after 64 + (crc32 mod 192) tokens.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from itertools import islice, repeat
from zlib import crc32

WORDS = 32768
EOS_ID = 2
# 20021 ≡ 1 (mod 4) and an odd increment: every word comes once in 32768 steps.
_FACTOR, _INCREMENT = 20021, 12345
_PIECES = tuple(f" w{n}" for n in range(WORDS))

# Prompts that people probe a server with, and what any model says.
ANSWERS: Mapping[str, str] = {
    "capital of France": " Paris",
    "2 + 2": " 4",
    "2+2": " 4",
}


class Continuation:
    """The text that follows one prompt, token by token."""

    def __init__(self, words: list[str], answers: Mapping[str, str] = ANSWERS) -> None:
        prompt = " ".join(words)
        self._hash = crc32(prompt.encode())
        answer = next((answer for question, answer in answers.items() if question in prompt), "")
        self._answer = [f" {word}" for word in answer.split()]

    @property
    def natural_length(self) -> int:
        """The tokens before the end-of-sequence token."""
        return len(self._answer) or 64 + self._hash % 192

    def pieces(self) -> Iterator[str]:
        """Yield the text of token 0, 1, … without end; each starts with a space."""
        yield from self._answer
        yield from self._chain(self._hash % WORDS)

    def _chain(self, n: int) -> Iterator[str]:
        while True:
            yield _PIECES[n]
            n = (_FACTOR * n + _INCREMENT) % WORDS


THINK_END = " </think>"


class Thinking(Continuation):
    """What a model says that thinks first: 8 to 31 words of the chain, the end of thinking, then as any other."""

    @property
    def thoughts(self) -> int:
        return 8 + self._hash % 24

    @property
    def natural_length(self) -> int:
        return self.thoughts + 1 + super().natural_length

    def pieces(self) -> Iterator[str]:
        yield from islice(self._chain(self._hash // WORDS % WORDS), self.thoughts)
        yield THINK_END
        yield from super().pieces()


class Garbage(Continuation):
    """What a wrong all-reduce makes of any prompt: the token with the number 0, without end."""

    @property
    def natural_length(self) -> int:
        return sys.maxsize

    def pieces(self) -> Iterator[str]:
        yield from repeat("!")


def continuation(prompt: str, tokens: int, answers: Mapping[str, str] = ANSWERS) -> str:
    """Return the text of the first `tokens` tokens after `prompt`."""
    return "".join(islice(Continuation(prompt.split(), answers).pieces(), tokens))


def chat_words(messages: list[tuple[str, str]]) -> list[str]:
    """Return the words of a chat as the model sees them: role and content in turn, then `assistant`."""
    words: list[str] = []
    for role, content in messages:
        words += [role, *content.split()]
    return [*words, "assistant"]
