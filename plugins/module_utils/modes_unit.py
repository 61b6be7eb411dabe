"""Words for a systemd unit: systemd has its own quoting, and expands % and $ where a shell would not."""

from __future__ import annotations

import re
from collections.abc import Sequence

_PLAIN = re.compile(r"^[A-Za-z0-9_@+=:,./-]+$")


def unit_word(word: object) -> str:
    """One word of ExecStart= or Environment=, quoted only where it must be. Raises ValueError for a line break."""
    text = str(word)
    if "\n" in text or "\r" in text or "\0" in text:
        raise ValueError(f"{text!r} holds a line break, which a unit file cannot carry.")
    text = text.replace("%", "%%").replace("$", "$$")
    if _PLAIN.match(text.replace("%%", "").replace("$$", "") or "-"):
        return text or '""'
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def unit_env(name: str, value: object) -> str:
    """`NAME=value` for Environment=. A dollar sign is not expanded there, so it is not doubled."""
    return unit_word(f"{name}={value}").replace("$$", "$")


def unit_command(argv: Sequence[object]) -> str:
    """ExecStart's value, one flag with its values a line, so that a person can read and diff it."""
    lines: list[list[str]] = []
    for position, word in enumerate(argv):
        # `-m module` belongs to the program; a flag begins a line of its own.
        if position == 0 or (isinstance(word, str) and word.startswith("--")) or not lines:
            lines.append([unit_word(word)])
        else:
            lines[-1].append(unit_word(word))
    return " \\\n    ".join(" ".join(line) for line in lines)
