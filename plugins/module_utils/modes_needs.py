"""What a mode needs and whether a machine has it: answered before anything is stopped.

`requires` of a mode may hold: sglang (">=0.5.10,<0.6"), architectures ([SM90, SM10x]), world_sizes ([2, 4, 8]),
toolchain ([nvcc, g++, ninja]: programs that a start calls), environment (variable → pattern that its value must match
in full, where it is set), settings (setting of the role → what to do when it is missing), never (why it is refused
everywhere) and because (one of these keys → the reason behind it).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

# What can be asked for under `patches`, and the role that brings it.
PATCHES = {"custom_allreduce": "sglang_allreduce"}
_KINDS: dict[str, type] = {
    "sglang": str,
    "architectures": list,
    "world_sizes": list,
    "toolchain": list,
    "environment": dict,
    "settings": dict,
    "never": str,
    "because": dict,
}
_ARCHITECTURE = re.compile(r"SM\d+x?$")
_CLAUSE = re.compile(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9a-z.]*)$")
_WORLD = ("tp_size", "tp", "tensor_parallel_size")


@dataclass(frozen=True)
class Machine:
    """What was found. None is unknown: it neither meets nor fails a need."""

    sglang: str | None = None
    architectures: Sequence[str] | None = None
    """The cards' kinds, such as SM120, each once."""
    missing_tools: Sequence[str] | None = None
    """Those of the wanted programs that are not there."""
    patches: Sequence[str] | None = None
    """Patches that are in place."""


@dataclass
class Answer:
    """`unmet`: why the mode cannot work here. `unknown`: what could not be found out. A sentence each."""

    unmet: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def ask(mode: Mapping[str, Any], machine: Machine) -> Answer:
    """Hold a rendered mode against a machine."""
    requires = mode.get("requires") or {}
    subject = subject_of(mode)
    answer = Answer()

    def unmet(key: str, text: str) -> None:
        because = (requires.get("because") or {}).get(key)
        answer.unmet.append(f"{subject} {text}{f': {because}' if because else '.'}")

    if "never" in requires:
        answer.unmet.append(f"{subject} is refused: {requires['never']}")
    spec = requires.get("sglang")
    if spec and machine.sglang is None:
        answer.unknown.append(f"{subject} needs SGLang {spec}, and which one is installed is unknown.")
    elif spec and not satisfies(str(machine.sglang), spec):
        unmet("sglang", f"needs SGLang {spec}; {machine.sglang} is installed")
    _architectures(requires, subject, machine, answer, unmet)
    sizes, world = requires.get("world_sizes"), world_size(mode)
    if sizes and world not in sizes:
        unmet("world_sizes", f"needs {any_of(sizes)} ranks; tp_size is {world}")
    if requires.get("toolchain") and machine.missing_tools:
        unmet(
            "toolchain",
            f"compiles kernels when it starts and needs {all_of(requires['toolchain'])}; "
            f"{all_of(machine.missing_tools)} {'is' if len(machine.missing_tools) == 1 else 'are'} missing",
        )
    env = mode.get("env") or {}
    for name, pattern in (requires.get("environment") or {}).items():
        if name in env and not re.fullmatch(pattern, str(env[name])):
            unmet(name, f"does not work with {name}={env[name]}")
    for patch in mode.get("patches") or []:
        if machine.patches is None:
            answer.unknown.append(f"{subject} needs the patch {patch}, and whether it is in place is unknown.")
        elif patch not in machine.patches:
            unmet(
                "patches",
                f"needs the patch {patch} in the installed SGLang, and it is not in place; "
                f"run playbooks/guest.yml (role {PATCHES.get(patch, patch)})",
            )
    return answer


def _architectures(requires: Mapping[str, Any], subject: str, machine: Machine, answer: Answer, unmet: Any) -> None:
    wanted = requires.get("architectures")
    if not wanted:
        return
    if not machine.architectures:
        answer.unknown.append(f"{subject} needs {any_of(wanted)}, and which GPUs this machine has is unknown.")
        return
    unfit = [kind for kind in machine.architectures if not any(_is(kind, pattern) for pattern in wanted)]
    if unfit:
        unmet("architectures", f"needs {any_of(wanted)}; this is {all_of(unfit)}")


def _is(kind: str, pattern: str) -> bool:
    """SM103 is an SM10x."""
    return kind == pattern or (pattern.endswith("x") and len(kind) == len(pattern) and kind[:-1] == pattern[:-1])


def architecture(compute_capability: str) -> str | None:
    """ "12.0" → "SM120"; None for what is no number."""
    match = re.fullmatch(r"\s*(\d+)\.(\d+)\s*", compute_capability)
    return f"SM{match[1]}{match[2]}" if match else None


def world_size(mode: Mapping[str, Any]) -> int:
    """The tensor-parallel ranks that a rendered mode asks for."""
    args = mode.get("args") or {}
    return next((int(args[name]) for name in _WORLD if str(args.get(name, "")).isdigit()), 1)


def subject_of(mode: Mapping[str, Any]) -> str:
    """What a sentence about the mode's needs begins with: the path that it is for, else its name."""
    return str((mode.get("probe") or {}).get("path") or f"Mode {mode.get('name', '?')!r}")


def words(mode: Mapping[str, Any]) -> str:
    """The needs of a merged mode in a few words, for a table."""
    requires = mode.get("requires") or {}
    if "never" in requires:
        return "refused"
    parts = [f"SGLang {requires['sglang']}"] if requires.get("sglang") else []
    if requires.get("architectures"):
        parts.append(any_of(requires["architectures"]))
    if requires.get("world_sizes"):
        parts.append(f"{any_of(requires['world_sizes'])} ranks")
    if mode.get("nodes"):
        parts.append(f"{mode['nodes']} guests")
    if requires.get("toolchain"):
        parts.append(all_of(requires["toolchain"]))
    parts += [f"patch {patch}" for patch in mode.get("patches") or []]
    parts += [f"sglang_server_{setting}" for setting in requires.get("settings") or {}]
    return ", ".join(parts) or "nothing"


def any_of(items: Iterable[Any]) -> str:
    """2, 4 or 8."""
    return _listed(items, "or")


def all_of(items: Iterable[Any]) -> str:
    """nvcc, g++ and ninja."""
    return _listed(items, "and")


def _listed(items: Iterable[Any], word: str) -> str:
    texts = [str(item) for item in items]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {word} {texts[-1]}"


def check_requires(requires: Mapping[str, Any]) -> list[str]:
    """What is wrong with a `requires` as it stands in its file, without the mode's name."""
    errors = []
    for key, value in requires.items():
        if key not in _KINDS:
            errors.append(f"requires has an unknown key {key!r}; it may have {', '.join(_KINDS)}.")
        elif value is not None and not isinstance(value, _KINDS[key]):
            errors.append(f"requires.{key} is {value!r}, but must be a {_WORDS[_KINDS[key]]}.")
        elif value is not None:
            errors += _check_need(key, value)
    return errors


_WORDS: dict[type, str] = {str: "text", list: "list", dict: "mapping"}


def _check_need(key: str, value: Any) -> list[str]:
    if key == "sglang":
        return [
            f"requires.sglang: {clause!r} is not a version requirement; write it as '>=0.5.10,<0.6'."
            for clause in _clauses(value)
            if not _CLAUSE.match(clause)
        ]
    if key == "architectures":
        return [
            f"requires.architectures: {item!r} is not an architecture; write SM120, or SM10x for SM100 and SM103."
            for item in value
            if not isinstance(item, str) or not _ARCHITECTURE.match(item)
        ]
    if key == "world_sizes":
        return [
            f"requires.world_sizes: {item!r} is not a number of ranks."
            for item in value
            if not isinstance(item, int) or isinstance(item, bool) or item < 1
        ]
    return []


def check_patches(patches: Sequence[Any]) -> list[str]:
    """What is wrong with a list of patches."""
    return [
        f"patches names {patch!r}; the known patches are: {', '.join(PATCHES)}."
        for patch in patches
        if patch not in PATCHES
    ]


def _clauses(spec: str) -> list[str]:
    return [clause for clause in map(str.strip, spec.split(",")) if clause]


def satisfies(version: str, spec: str) -> bool:
    """Whether `version` (0.5.12.post1) fits `spec` (">=0.5.10,<0.6"). Raises ValueError for what is no requirement."""
    have = _numbers(version)
    tests = {
        ">=": have.__ge__,
        "<=": have.__le__,
        "==": have.__eq__,
        "!=": have.__ne__,
        ">": have.__gt__,
        "<": have.__lt__,
    }
    for clause in _clauses(spec):
        match = _CLAUSE.match(clause)
        if not match:
            raise ValueError(f"{spec!r} is not a version requirement; write it as '>=0.5.10,<0.6'.")
        if not tests[match[1]](_numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(digits) for digits in re.findall(r"\d+", version.split("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
