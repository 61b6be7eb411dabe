"""What `pct` says when it refuses. Texts end in a newline where the real ones do; usage lines follow some of them."""

from __future__ import annotations

from collections.abc import Mapping


class PctError(Exception):
    """A refusal: `str()` goes to stderr as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(text if text.endswith("\n") else f"{text}\n")


class UsageError(PctError):
    """A refusal followed by the usage line of the command."""


class BadParameters(UsageError):
    """400: values that do not verify, by option. A message that brings its own newline is followed by an empty line."""

    def __init__(self, messages: Mapping[str, str]) -> None:
        lines = "".join(f"{option}: {message}\n" for option, message in sorted(messages.items()))
        super().__init__(f"400 Parameter verification failed.\n{lines}")
