"""The server's tokenizer where its files are local. Optional: the one thing here that the standard library has not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol


class TokenizerError(ValueError):
    """There is no such tokenizer; the message is one sentence for a person."""


class Tokenizer(Protocol):
    """`special`: with what the server puts around a plain text (a beginning-of-sequence token)."""

    def encode(self, text: str, special: bool) -> list[int]: ...

    def decode(self, ids: list[int]) -> str: ...


class Local:
    """A tokenizer.json, read by the package `tokenizers`, which SGLang uses too."""

    def __init__(self, path: Path) -> None:
        file = path / "tokenizer.json" if path.is_dir() else path
        if not file.is_file():
            raise TokenizerError(f"there is no {file}")
        try:
            from tokenizers import Tokenizer as Fast
        except ImportError:
            raise TokenizerError(
                "reading a tokenizer needs the Python package tokenizers: install it, or run the client with the "
                "Python of the server's environment, which has it"
            ) from None
        try:
            self._fast: Any = Fast.from_file(str(file))
        except Exception as problem:  # it raises bare Exception
            raise TokenizerError(f"{file} is no tokenizer: {problem}") from problem

    def encode(self, text: str, special: bool) -> list[int]:
        return list(self._fast.encode(text, add_special_tokens=special).ids)

    def decode(self, ids: list[int]) -> str:
        return str(self._fast.decode(ids, skip_special_tokens=True))


def exactly(text: str, count: int, tokenizer: Tokenizer, special: bool) -> str:
    """The beginning of `text` that is exactly `count` tokens. Raises TokenizerError where no beginning is."""
    ids = tokenizer.encode(text, special)
    # A cut inside a word is encoded otherwise when it stands alone, so the right length may need another cut.
    for cut in sorted(range(count - 8, count + 9), key=lambda n: abs(n - count)):
        if 0 < cut <= len(ids):
            begin = tokenizer.decode(ids[:cut])
            if len(tokenizer.encode(begin, special)) == count:
                return begin
    raise TokenizerError(f"no beginning of the generated text is exactly {count} tokens; its first are {text[:60]!r}")
