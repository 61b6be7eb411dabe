"""Turn a mode's `args` into an argv which the installed release accepts, or say everything that is wrong with it."""

from __future__ import annotations

import argparse
import difflib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

from .sglang_flags_model import BOOLEAN_OPTIONAL, JSON_TYPES, RETIRED, SWITCHES, Flag, add_flags

# Old or short spelling → the spelling that is meant, where the installed release has it.
RENAMES: dict[str, str] = {
    "--tp": "--tp-size",
    "--dp": "--dp-size",
    "--pp": "--pp-size",
    "--ep": "--ep-size",
    "--model": "--model-path",
    "--speculative-algo": "--speculative-algorithm",
    "--speculative-draft": "--speculative-draft-model-path",
    "--cuda-graph-max-bs": "--cuda-graph-max-bs-decode",
    "--cuda-graph-bs": "--cuda-graph-bs-decode",
    "--piecewise-cuda-graph-max-tokens": "--cuda-graph-max-bs-prefill",
    "--piecewise-cuda-graph-tokens": "--cuda-graph-bs-prefill",
    "--nsa-prefill-backend": "--dsa-prefill-backend",
    "--nsa-decode-backend": "--dsa-decode-backend",
    "--mamba-scheduler-strategy": "--mamba-radix-cache-strategy",
    "--stream-output": "--incremental-streaming-output",
    "--speculative-dflash-draft-window-size": "--speculative-draft-window-size",
}

# Old switch → the flag and value that say the same, where the installed release has that flag.
SWITCH_RENAMES: dict[str, tuple[str, str]] = {
    "--enable-flashinfer-allreduce-fusion": ("--flashinfer-allreduce-fusion-backend", "auto"),
    "--disable-piecewise-cuda-graph": ("--cuda-graph-backend-prefill", "disabled"),
    "--enable-breakable-cuda-graph": ("--cuda-graph-backend-prefill", "breakable"),
}

# Flags that went without a successor: the last release that had them, and what to do.
REMOVED: dict[str, str] = {
    "--enable-ep-moe": "it went with 0.5.5; set ep_size instead",
    "--enable-deepep-moe": "it went with 0.5.5; set moe_a2a_backend: deepep instead",
    "--enable-piecewise-cuda-graph": "it went with 0.5.14, where piecewise graphs became the default; remove it",
    "--cuda-graph-tc-compiler": "it went with 0.5.22 together with the backend it configured; remove it",
    "--speculative-skip-dp-mlp-sync": "it went with 0.5.23; remove it",
    "--enable-pcie-oneshot-allreduce": "no published SGLang ever had it, only a fork; remove it",
    "--speculative-batch-size-threshold": "no published SGLang ever had it; speculative_adaptive with "
    "speculative_adaptive_config switches speculation off at a batch size",
}

# Everybody on the machine can read a process's argv.
SECRETS = frozenset({"--api-key", "--admin-api-key", "--ssl-keyfile-password"})


@dataclass(frozen=True)
class Resolution:
    """What became of a mode's args: `argv` is complete and valid exactly when `errors` is empty.

    `notices` says what was translated. Every error and notice is one sentence.
    """

    argv: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)


class _Refused(Exception):
    """What argparse says about the words it was given."""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise _Refused(message)


def resolve(flags: Sequence[Flag], args: Mapping[str, Any], release: str = "the installed SGLang") -> Resolution:
    """Translate `args` (`tp_size: 8` → `--tp-size 8`) for a release with `flags`; all errors are found at once.

    true is a bare flag, false leaves it out (or is `--no-…` where that exists), null is ignored, a list gives several
    values, a mapping is written as JSON. `release` names the release in the sentences.
    """
    by_option = {option: flag for flag in reversed(flags) for option in flag.options}
    parser = _Parser(add_help=False)
    add_flags(parser, [replace(flag, required=False) for flag in flags])
    result = Resolution()
    taken: dict[str, str] = {}
    for name, value in args.items():
        if value is None:
            continue
        try:
            option, value = _spell(name, value, by_option, release, result.notices)
            if option in SECRETS:
                raise _Refused(
                    f"{name} must not be among args, because every user of the machine can read a command line; "
                    "keep the secret in a file that only the server's user can read"
                )
            flag = by_option[option]
            words = _words(name, option, flag, value)
            parser.parse_args(words)
        except _Refused as refusal:
            result.errors.append(_sentence(str(refusal)))
            continue
        if not words:
            continue
        if (other := taken.setdefault(flag.dest, name)) != name:
            result.errors.append(f"{other} and {name} both set {option}; keep one of them.")
            continue
        result.argv.extend(words)
    result.errors.extend(
        f"{_key(flag.names[0])} is missing: {release} does not start without {flag.names[0]}."
        for flag in flags
        if flag.required and flag.dest not in taken and not _was_tried(flag, args)
    )
    return result


def _spell(name: str, value: Any, by_option: Mapping[str, Flag], release: str, notices: list[str]) -> tuple[str, Any]:
    """Return the option that `name` means in this release, and its value. Raises _Refused."""
    asked = "--" + name.lstrip("-").replace("_", "-")
    declared = by_option.get(asked)
    new = RENAMES.get(asked)
    if new in by_option and (declared is None or declared.replacement):
        notices.append(f"{name} is written {new} for {release}.")
        return str(new), value
    if asked in SWITCH_RENAMES and SWITCH_RENAMES[asked][0] in by_option and isinstance(value, bool):
        new, meaning = SWITCH_RENAMES[asked]
        if not value:
            return new, None
        notices.append(f"{name}: true is written {new} {meaning} for {release}.")
        return new, meaning
    if declared is not None:
        if declared.replacement:
            notices.append(f"{asked} is deprecated in {release}, which names {declared.replacement} instead.")
        elif declared.kind == RETIRED and declared.error is None:
            notices.append(f"{asked} does nothing any more in {release}; remove {name}.")
        return asked, value
    longer = sorted(option for option in by_option if option.startswith(asked))
    if len({id(by_option[option]) for option in longer}) == 1:
        full = next(option for option in longer if option in by_option[option].names) if longer else asked
        notices.append(f"{name} is short for {full} in {release}.")
        return full, value
    if asked in REMOVED:
        raise _Refused(f"{name} is not a flag of {release}: {REMOVED[asked]}")
    if longer:
        raise _Refused(f"{name} is ambiguous in {release}: it could be {', '.join(map(_key, longer))}")
    near = difflib.get_close_matches(asked, list(by_option), n=1, cutoff=0.6)
    hint = f"; the nearest one is {_key(near[0])}" if near else ""
    raise _Refused(f"{name} is not a flag of {release}{hint}")


def _words(name: str, option: str, flag: Flag, value: Any) -> list[str]:
    """Return the words of one flag; none for a switch that is off. Raises _Refused."""
    if value is None:
        return []
    if flag.kind in SWITCHES:
        return _switch(name, option, flag, value)
    if value is True and flag.nargs in ("?", "*"):
        return [option]
    if isinstance(value, bool):
        raise _Refused(f"{name} needs a value{_choice_hint(flag)}, not {str(value).lower()}")
    if isinstance(value, Mapping) or (isinstance(value, list) and flag.type_name in JSON_TYPES):
        return [option, json.dumps(value)]
    if isinstance(value, list):
        if flag.nargs is None or flag.nargs == "?":
            raise _Refused(f"{name} takes one value, not the list {value}")
        if not value and flag.nargs == "+":
            raise _Refused(f"{name} needs at least one value; the list is empty")
        return [option, *(json.dumps(item) if isinstance(item, Mapping) else str(item) for item in value)]
    text = str(value)
    if text.startswith("-") and not re.fullmatch(r"-\d+|-\d*\.\d+", text):
        return [f"{option}={text}"]  # otherwise argparse takes the value for a flag
    return [option, text]


def _switch(name: str, option: str, flag: Flag, value: Any) -> list[str]:
    if not isinstance(value, bool):
        raise _Refused(f"{name} is a switch: write true or false, not {value!r}")
    if value:
        return [option]
    if flag.kind == BOOLEAN_OPTIONAL and not option.startswith("--no-"):
        return [f"--no-{option[2:]}"]
    return []


def _choice_hint(flag: Flag) -> str:
    return f" (one of {', '.join(map(str, flag.choices))})" if flag.choices else ""


def _key(option: str) -> str:
    """Return an option as it is written in a mode."""
    return option.lstrip("-").replace("-", "_")


def _sentence(message: str) -> str:
    return message if message.endswith(".") else message + "."


def _was_tried(flag: Flag, args: Mapping[str, Any]) -> bool:
    """Whether `args` named the flag in any way: then its own error says enough."""
    names = {"--" + name.lstrip("-").replace("_", "-") for name, value in args.items() if value is not None}
    return any(name in flag.names or RENAMES.get(name) in flag.names for name in names)
