"""Modes as data: what a catalogue entry may say, how `extends` merges, how settings of a machine are filled in.

A catalogue is a mapping of mode name → the mapping that its YAML file holds. Everything here is pure; the filter
plugin reads the files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from .redact import is_secret_name

SCHEMA = "servelab.mode/1"
NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")
_ARG = re.compile(r"^[a-z][a-z0-9_]*$")
_ENV = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)(\?)?\}")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "description": str,
    "extends": (str, type(None)),
    "args": dict,
    "env": dict,
    "patches": list,
    "treatment": list,
    "requires": dict,
    "probe": dict,
    "evidence": list,
}
_MERGED = ("args", "env", "requires", "probe")

Mode = Mapping[str, Any]
Catalogue = Mapping[str, Mode]


class ModeError(ValueError):
    """What is wrong with one or more modes; `errors` holds one sentence each."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__(" ".join(errors))
        self.errors = errors


def known(catalogue: Catalogue) -> str:
    """The names of the catalogue, for a sentence."""
    return ", ".join(sorted(catalogue)) or "none"


def unknown_mode(name: Any, catalogue: Catalogue) -> str:
    """One sentence for a mode that is not in the catalogue, with the nearest name if one is near."""
    near = difflib.get_close_matches(str(name), list(catalogue), n=1)
    hint = f" Did you mean {near[0]}?" if near else ""
    return f"There is no mode {str(name)!r}; the known modes are: {known(catalogue)}.{hint}"


def check(name: str, mode: Any) -> list[str]:
    """What is wrong with one entry as it stands in its file: a sentence per error, none if it is well formed."""
    where = f"Mode {name!r}"
    if not NAME.match(name):
        return [f"{where}: a mode's name is lower-case letters, digits and underscores, at most 41; rename its file."]
    if not isinstance(mode, Mapping):
        return [f"{where} is not a mapping; its file needs at least a description."]
    errors = [
        f"{where} has an unknown key {key!r}; it may have {', '.join(_TYPES)}." for key in mode if key not in _TYPES
    ]
    for key, types in _TYPES.items():
        if key in mode and not isinstance(mode[key], types):
            errors.append(f"{where}: {key} is {mode[key]!r}, but must be a {_type_name(types)}.")
    if not str(mode.get("description") or "").strip():
        errors.append(f"{where} has no description; say in one line what it does.")
    args, env = mode.get("args"), mode.get("env")
    if isinstance(args, Mapping):
        errors += _check_args(where, args)
    if isinstance(env, Mapping):
        errors += _check_env(where, env)
    return errors


def _type_name(types: Any) -> str:
    names = {dict: "mapping", list: "list", str: "text"}
    return names.get(types[0] if isinstance(types, tuple) else types, "value")


def _check_args(where: str, args: Mapping[Any, Any]) -> list[str]:
    errors = []
    for name, value in args.items():
        if not isinstance(name, str) or not _ARG.match(name):
            errors.append(f"{where}: {name!r} is not a flag's name; write it with underscores, as in tp_size: 8.")
        elif is_secret_name(name):
            errors.append(f"{where}: {name} is a secret, and a command line can be read by everybody; remove it.")
        elif isinstance(value, list) and any(isinstance(item, (dict, list)) for item in value):
            errors.append(f"{where}: {name} is a list of more than plain values; write JSON as one text.")
    return errors


def _check_env(where: str, env: Mapping[Any, Any]) -> list[str]:
    errors = []
    for name, value in env.items():
        if not isinstance(name, str) or not _ENV.match(name):
            errors.append(f"{where}: {name!r} is not the name of an environment variable.")
        elif is_secret_name(name):
            errors.append(f"{where}: {name} is a secret, and `systemctl show` prints a unit's environment; remove it.")
        elif isinstance(value, bool) or not isinstance(value, (str, int, float, type(None))):
            errors.append(f"{where}: {name} is {value!r}, but an environment variable is text; put it in quotes.")
        elif isinstance(value, str) and ("\n" in value or "\0" in value):
            errors.append(f"{where}: {name} holds a line break, which a unit's environment cannot carry.")
    return errors


def check_all(catalogue: Catalogue) -> list[str]:
    """Every error of every entry, `extends` included."""
    errors = []
    for name, mode in sorted(catalogue.items()):
        found = check(name, mode)
        errors += found
        if not found:
            try:
                merge(catalogue, name)
            except ModeError as error:
                errors += error.errors
    return errors


def lineage(catalogue: Catalogue, name: str) -> list[str]:
    """The modes that `name` is made of, the most general first. Raises ModeError for unknown names and circles."""
    chain: list[str] = []
    here: str | None = name
    while here is not None:
        if here in chain:
            raise ModeError([f"Mode {name!r} extends itself through {' → '.join([*chain, here])}; break the circle."])
        if here not in catalogue:
            if not chain:
                raise ModeError([unknown_mode(name, catalogue)])
            raise ModeError(
                [f"Mode {chain[-1]!r} extends {here!r}, which does not exist. {unknown_mode(here, catalogue)}"]
            )
        chain.append(here)
        here = catalogue[here].get("extends")
    return chain[::-1]


def merge(catalogue: Catalogue, name: str) -> dict[str, Any]:
    """`name` with all that it extends: mappings by key, null removes a key; a list of patches replaces the older one.

    description and evidence belong to the mode itself and are not inherited; a treatment adds up. Raises ModeError.
    """
    chain = lineage(catalogue, name)
    own = catalogue[name]
    merged: dict[str, Any] = {
        "schema": SCHEMA,
        "name": name,
        "description": own.get("description", ""),
        "lineage": chain,
        **{key: {} for key in _MERGED},
        "patches": [],
        "treatment": [],
        "evidence": list(own.get("evidence", [])),
    }
    for part in (catalogue[ancestor] for ancestor in chain):
        for key in _MERGED:
            merged[key] = overlay(merged[key], part.get(key, {}))
        if "patches" in part:
            merged["patches"] = list(part["patches"])
        merged["treatment"] += [name for name in part.get("treatment", []) if name not in merged["treatment"]]
    return merged


def overlay(base: Mapping[str, Any], change: Mapping[str, Any]) -> dict[str, Any]:
    """`base` changed by `change`: a changed key keeps its place, a new one comes last, null removes."""
    result = {**base, **change}
    return {key: value for key, value in result.items() if value is not None}


def render(
    catalogue: Catalogue,
    name: str,
    settings: Mapping[str, Any],
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The mode `name` for one machine: merged, changed by the machine's own `args` and `env`, placeholders filled in.

    `${port}` takes settings["port"] with its type where it stands alone; it must be set. `${mem_fraction_static?}`
    leaves the flag out where the setting is null or empty. Raises ModeError with every error.
    """
    errors = check_all({part: catalogue[part] for part in lineage(catalogue, name)})
    errors += _check_args("sglang_server_extra_args", args or {}) + _check_env("sglang_server_env", env or {})
    if errors:
        raise ModeError(errors)
    mode = merge(catalogue, name)
    for key, change in (("args", args), ("env", env)):
        filled = {}
        for item, value in overlay(mode[key], change or {}).items():
            value = _fill(f"Mode {name!r}: {item}", value, settings, errors)
            if value is not None:
                filled[item] = str(value) if key == "env" else value
        mode[key] = filled
    if errors:
        raise ModeError(errors)
    return mode


def _fill(where: str, value: Any, settings: Mapping[str, Any], errors: list[str]) -> Any:
    if isinstance(value, list):
        return [_fill(where, item, settings, errors) for item in value]
    if isinstance(value, dict):
        return {key: _fill(where, item, settings, errors) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    left_out = False

    def one(match: re.Match[str]) -> str:
        nonlocal left_out
        setting, optional = match[1], match[2]
        if setting not in settings:
            errors.append(f"{where} asks for ${{{setting}}}; the settings are: {', '.join(sorted(settings))}.")
        elif settings[setting] in (None, ""):
            if optional:
                left_out = True
            else:
                errors.append(f"{where} needs sglang_server_{setting}, which is not set for this machine; set it.")
        else:
            return str(settings[setting])
        return ""

    text = _PLACEHOLDER.sub(one, value)
    if left_out:
        return None
    return settings.get(whole[1]) if whole else text


def unmet(requires: Mapping[str, Any], versions: Mapping[str, str | None]) -> list[str]:
    """Sentences for what `requires` asks and the machine has not; `versions` maps a package to its version or null."""
    errors = []
    for package, spec in requires.items():
        version = versions.get(package)
        if version is None:
            errors.append(f"it needs {package} {spec}, which is not installed")
        elif not satisfies(version, str(spec)):
            errors.append(f"it needs {package} {spec}, but {version} is installed")
    return errors


def satisfies(version: str, spec: str) -> bool:
    """Whether `version` (0.5.12.post1) fits `spec` (">=0.5.10,<0.6")."""
    have = _numbers(version)
    tests = {
        ">=": have.__ge__,
        "<=": have.__le__,
        "==": have.__eq__,
        "!=": have.__ne__,
        ">": have.__gt__,
        "<": have.__lt__,
    }
    for part in filter(None, map(str.strip, spec.split(","))):
        match = re.match(r"(>=|<=|==|!=|>|<)\s*([0-9][0-9a-z.]*)$", part)
        if not match:
            raise ModeError([f"{spec!r} is not a version requirement; write it as '>=0.5.10,<0.6'."])
        if not tests[match[1]](_numbers(match[2])):
            return False
    return True


def _numbers(version: str) -> tuple[int, ...]:
    numbers = [int(digits) for digits in re.findall(r"\d+", version.split("+")[0])]
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def others(names: Iterable[str], name: str) -> list[str]:
    """The other modes, sorted: what a mode's unit conflicts with."""
    return sorted(set(names) - {name})
