"""Log probabilities: invented, plausible, and the same for the same token at the same place in every run.

A token that the model says gets between -0.02 and -0.05, as a sure model's tokens do; its n-th alternative is n + 3
lower. A server that says garbage is not sure of it: -9.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

from .text import EOS_ID, WORDS

_SURE, _SPREAD, _UNSURE = -0.02, -0.03, -9.0


def token_id(word: str) -> int:
    """Return the number of a word: w<n> is n, any other has one beyond them; `!` is 0."""
    if word == "!":
        return 0
    if word.startswith("w") and word[1:].isdigit():
        return int(word[1:])
    return WORDS + crc32(word.encode()) % WORDS


def words_of(text: str) -> list[str]:
    """Cut a step's text into its tokens."""
    return list(text) if text.startswith("!") else text.split()


def token_ids(text: str, ended: bool) -> list[int]:
    """Return the numbers of a step's tokens; `ended`: the end-of-sequence token, which has no text, is the last."""
    return [*map(token_id, words_of(text)), *([EOS_ID] if ended else [])]


def logprob(position: int, token: int) -> float:
    """Return the log probability of a token at a place of the answer (0 is the first)."""
    if token == 0:
        return _UNSURE
    return _SURE + _SPREAD * crc32(f"{position}:{token}".encode()) / 2**32


def alternatives(position: int, token: int, count: int) -> list[tuple[float, int]]:
    """Return the `count` likeliest tokens with their log probabilities, the said one first."""
    first = logprob(position, token)
    return [(first - (n + 3 if n else 0), (token + 997 * n) % WORDS if n else token) for n in range(count)]


def native(position: int, tokens: Sequence[int], with_text: bool) -> list[list[Any]]:
    """Return what /generate shows: [log probability, number, text or null] for each token."""
    return [
        [logprob(position + n, token), token, f" w{token}" if with_text else None] for n, token in enumerate(tokens)
    ]


def for_completion(position: int, tokens: Sequence[int], texts: Sequence[str], count: int) -> dict[str, Any]:
    """Return what /v1/completions shows for the tokens from `position` on."""
    return {
        "text_offset": [-1] * len(tokens),
        "token_logprobs": [logprob(position + n, token) for n, token in enumerate(tokens)],
        "tokens": list(texts),
        "top_logprobs": [
            {_text(other, token, texts[n]): chance for chance, other in alternatives(position + n, token, count)}
            for n, token in enumerate(tokens)
        ],
    }


def for_chat(position: int, tokens: Sequence[int], texts: Sequence[str], count: int) -> dict[str, Any]:
    """Return what /v1/chat/completions shows."""
    content = []
    for n, (token, text) in enumerate(zip(tokens, texts, strict=True)):
        top = [
            {"token": (shown := _text(other, token, text)), "bytes": list(shown.encode()), "logprob": chance}
            for chance, other in alternatives(position + n, token, count)
        ]
        content.append(
            {
                "token": text,
                "bytes": list(text.encode()),
                "logprob": logprob(position + n, token),
                "top_logprobs": top,
            }
        )
    return {"content": content}


def _text(other: int, said: int, text: str) -> str:
    return text if other == said else f" w{other}"
