"""The command line as Perl's Getopt::Long reads it: one dash or two, any case, unambiguous beginnings, anywhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .errors import UsageError
from .values import as_boolean


@dataclass
class Arguments:
    """`given` holds the value of each option by its full name (list options: all of them, joined by NUL)."""

    positional: list[str] = field(default_factory=list)
    given: dict[str, str] = field(default_factory=dict)


def _full_name(word: str, kinds: Mapping[str, str]) -> str | None:
    wanted = word.lower()
    if wanted in kinds:
        return wanted
    beginnings = [name for name in kinds if name.startswith(wanted)]
    return beginnings[0] if len(beginnings) == 1 else None


def parse(words: Sequence[str], kinds: Mapping[str, str]) -> Arguments:
    """Split `words` by the options in `kinds` (name → string, boolean or list). Raises UsageError for unknown ones."""
    result, complaints, rest = Arguments(), "", list(words)
    while rest:
        word = rest.pop(0)
        if word == "--":
            result.positional += rest
            break
        if not word.startswith("-") or word == "-":
            result.positional.append(word)
            continue
        asked, equals, value = word.lstrip("-").partition("=")
        name = _full_name(asked, kinds)
        if name is None:
            complaints += f"Unknown option: {asked}\n"
            continue
        kind = kinds[name]
        if not equals:
            if kind == "boolean" and (not rest or rest[0].startswith("-")):
                value = "1"
            elif rest:
                value = rest.pop(0)
            else:
                complaints += f"Option {name} requires an argument\n"
                continue
        _keep(result, name, kind, value)
    if complaints:
        raise UsageError(f"{complaints}400 unable to parse option\n")
    return result


def _keep(result: Arguments, name: str, kind: str, value: str) -> None:
    if kind == "boolean":
        meaning = as_boolean(value)
        if meaning is None:
            raise UsageError("400 unable to parse boolean option\n")
        value = str(int(meaning))
    if kind == "list" and name in result.given:
        value = f"{result.given[name]}\0{value}"
    result.given[name] = value
