"""A flag of the server's command line as a value, and a real argparse parser made of such values."""

from __future__ import annotations

import argparse
import ast
import json
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

STORE = "store"
STORE_TRUE = "store_true"
STORE_FALSE = "store_false"
STORE_CONST = "store_const"
APPEND = "append"
BOOLEAN_OPTIONAL = "boolean_optional"
# A retired flag that the release still accepts and ignores, or answers with an error of its own.
RETIRED = "retired"

# Kinds that take no value on the command line.
SWITCHES = frozenset({STORE_TRUE, STORE_FALSE, STORE_CONST, BOOLEAN_OPTIONAL, RETIRED})


@dataclass(frozen=True)
class Flag:
    """One flag as the installed release declares it.

    `names` are its spellings as written (`--tp-size`, `--tensor-parallel-size`), without the `--no-…` twins of a
    boolean_optional flag. `nargs` is argparse's. `choices` is None when any value goes or when the choices are only
    known at run time. `type_name` is the name of the converter (`int`, `json.loads`, …). `default` is source text, not
    a value. `replacement` and `error` come from flags which the release itself calls deprecated.
    """

    names: tuple[str, ...]
    dest: str
    kind: str = STORE
    nargs: str | int | None = None
    choices: tuple[Any, ...] | None = None
    type_name: str = "str"
    default: str | None = None
    required: bool = False
    help: str = ""
    replacement: str | None = None
    error: str | None = None

    @property
    def options(self) -> tuple[str, ...]:
        """All spellings that argparse will know, `--no-…` included."""
        if self.kind != BOOLEAN_OPTIONAL:
            return self.names
        return (*self.names, *(f"--no-{name[2:]}" for name in self.names if name.startswith("--")))


_SUFFIXES = {
    "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40,
}  # fmt: skip


def human_readable_int(text: str) -> int:
    """Convert 4k, 25.6k or 4Ki as SGLang does; decimals only before a decimal suffix."""
    match = re.fullmatch(r"(\d+)(?:\.(\d+))?(Ki|Mi|Gi|Ti|k|M|G|T)", text.strip())
    if match is None:
        return int(text)
    whole, fraction, suffix = match.groups()
    if fraction is None:
        return int(whole) * _SUFFIXES[suffix]
    if suffix.endswith("i"):
        raise argparse.ArgumentTypeError(f"Decimals are not allowed with IEC suffixes like '{suffix}'.")
    # 25.6k is 256 × 1000 / 10: no detour over a float.
    return int(whole + fraction) * _SUFFIXES[suffix] // int(10 ** len(fraction))


_CONVERTERS: dict[str, Callable[[str], Any]] = {
    "str": str,
    "int": int,
    "float": float,
    "json.loads": json.loads,
    "json_list_type": json.loads,
    "parse_cuda_graph_config_arg": json.loads,
    "human_readable_int": human_readable_int,
}
JSON_TYPES = frozenset({"json.loads", "json_list_type", "parse_cuda_graph_config_arg"})


class _Retired(argparse.Action):
    """A flag without a value that does nothing, or stops with the release's own error."""

    error: str | None = None

    def __init__(self, option_strings: Sequence[str], dest: str, **kwargs: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, default=argparse.SUPPRESS, help=kwargs.get("help"))

    def __call__(self, parser: argparse.ArgumentParser, *_: Any, **__: Any) -> None:
        if self.error is not None:
            parser.error(self.error)


def build_parser(flags: Iterable[Flag], prog: str = "sglang serve") -> argparse.ArgumentParser:
    """Return an argparse parser that accepts what the release accepts: prefixes, ambiguity, choices, exit status 2.

    A default is set where the source has a literal; otherwise it is None.
    """
    parser = argparse.ArgumentParser(prog=prog)
    add_flags(parser, flags)
    return parser


def add_flags(parser: argparse.ArgumentParser, flags: Iterable[Flag]) -> None:
    """Register `flags` with `parser`. A name that is already registered is left alone, as the first one wins."""
    known: set[str] = set()
    for flag in flags:
        names = [name for name in flag.names if name not in known]
        if not names:
            continue
        known.update(flag.options)
        action = parser.add_argument(*names, **_keywords(flag))
        if isinstance(action, _Retired):
            action.error = flag.error


def _keywords(flag: Flag) -> dict[str, Any]:
    keywords: dict[str, Any] = {"dest": flag.dest, "help": flag.help or None}
    if flag.kind == RETIRED:
        return {**keywords, "action": _Retired}
    default = _literal(flag.default)
    if flag.kind in (STORE_TRUE, STORE_FALSE):
        # A retired spelling must not overwrite the default of the flag whose place it holds.
        default = argparse.SUPPRESS if flag.replacement else bool(default) if default is not None else None
        keywords["default"] = (flag.kind == STORE_FALSE) if default is None else default
        return {**keywords, "action": flag.kind}
    if flag.kind == STORE_CONST:
        return {**keywords, "action": "store_const", "const": True, "default": argparse.SUPPRESS}
    if flag.kind == BOOLEAN_OPTIONAL:
        return {**keywords, "action": argparse.BooleanOptionalAction, "default": default}
    keywords["default"] = argparse.SUPPRESS if flag.replacement else default
    keywords["type"] = _CONVERTERS.get(flag.type_name, str)
    keywords["choices"] = flag.choices
    keywords["nargs"] = flag.nargs
    keywords["required"] = flag.required
    if flag.nargs == "?":
        keywords["const"] = ""
    if flag.kind == APPEND:
        keywords["action"] = "append"
    return keywords


def _literal(text: str | None) -> Any:
    try:
        return None if text is None else ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return None
