"""Modes as data: what a catalogue entry may say, how `extends` merges, how settings of a machine are filled in.

A catalogue is a mapping of mode name → the mapping that its YAML file holds. Everything here is pure; the filter
plugin reads the files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from typing import Any

from . import modes_nodes
from .modes_evidence import check_probe
from .modes_needs import check_patches, check_requires
from .redact import is_secret_name

SCHEMA = "servelab.mode/1"
NAME = re.compile(r"^[a-z][a-z0-9_]{0,40}$")
_ARG = re.compile(r"^[a-z][a-z0-9_]*$")
_ENV = re.compile(r"^[A-Za-z_][A-Za-z0-9_]*$")
_PLACEHOLDER = re.compile(r"\$\{([a-z_]+)(\?|:-[^}]*)?\}")
_TYPES: dict[str, type | tuple[type, ...]] = {
    "description": str,
    "extends": (str, list, type(None)),
    "nodes": (int, type(None)),
    "args": dict,
    "env": dict,
    "patches": list,
    "treatment": list,
    "requires": dict,
    "probe": dict,
    "evidence": list,
}
_MERGED = ("args", "env", "requires", "probe")
# Of these the inner mappings merge too; a flag's mapping is one value (JSON).
_DEEP = ("requires", "probe")

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
        if key in mode and (not isinstance(mode[key], types) or isinstance(mode[key], bool)):
            errors.append(f"{where}: {key} is {mode[key]!r}, but must be a {_type_name(types)}.")
    if not str(mode.get("description") or "").strip():
        errors.append(f"{where} has no description; say in one line what it does.")
    if isinstance(mode.get("nodes"), int) and not isinstance(mode["nodes"], bool) and mode["nodes"] < 1:
        errors.append(
            f"{where}: nodes is {mode['nodes']}, but is a number of guests; write 2 or more, or leave it out."
        )
    args, env = mode.get("args"), mode.get("env")
    if isinstance(args, Mapping):
        errors += _check_args(where, args)
    if isinstance(env, Mapping):
        errors += _check_env(where, env)
    if isinstance(mode.get("extends"), list) and not all(isinstance(parent, str) for parent in mode["extends"]):
        errors.append(f"{where}: extends is {mode['extends']!r}, but must be a mode's name or a list of names.")
    for key, check_part in (("requires", check_requires), ("probe", check_probe), ("patches", check_patches)):
        if isinstance(mode.get(key), (dict, list)) and isinstance(mode[key], _TYPES[key]):
            errors += [f"{where}: {error}" for error in check_part(mode[key])]
    return errors


def _type_name(types: Any) -> str:
    names = {dict: "mapping", list: "list", str: "text", int: "whole number"}
    wanted = types if isinstance(types, tuple) else (types,)
    return " or ".join(names[kind] for kind in wanted if kind in names)


def _check_args(where: str, args: Mapping[Any, Any]) -> list[str]:
    errors = []
    for name, value in args.items():
        if not isinstance(name, str) or not _ARG.match(name):
            errors.append(f"{where}: {name!r} is not a flag's name; write it with underscores, as in tp_size: 8.")
        elif name in modes_nodes.FLAGS:
            errors.append(f"{where}: {name} is put in for each guest; say nodes: 2 in the mode instead.")
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
    """The modes that `name` is made of, the most general first, each once; of several parents the later comes later.

    Raises ModeError for unknown names and circles.
    """
    order: list[str] = []

    def visit(here: str, path: list[str]) -> None:
        if here in path:
            raise ModeError([f"Mode {name!r} extends itself through {' → '.join([*path, here])}; break the circle."])
        if here not in catalogue:
            if not path:
                raise ModeError([unknown_mode(name, catalogue)])
            raise ModeError(
                [f"Mode {path[-1]!r} extends {here!r}, which does not exist. {unknown_mode(here, catalogue)}"]
            )
        for parent in parents(catalogue[here]):
            visit(parent, [*path, here])
        if here not in order:
            order.append(here)

    visit(name, [])
    return order


def parents(mode: Any) -> list[str]:
    """The modes that a mode names in `extends`; what is malformed names none, and `check` says so."""
    extends = mode.get("extends") if isinstance(mode, Mapping) else None
    names = extends if isinstance(extends, list) else [extends]
    return [name for name in names if isinstance(name, str)]


def merge(catalogue: Catalogue, name: str) -> dict[str, Any]:
    """`name` with all that it extends: mappings by key, null removes a key; patches and treatment add up.

    requires and probe merge at every depth. description and evidence belong to the mode itself and are not inherited;
    `patches: []` starts anew. Raises ModeError.
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
            merged[key] = overlay(merged[key], part.get(key, {}), deep=key in _DEEP)
        if "nodes" in part:
            merged["nodes"] = part["nodes"] or 1
        if part.get("patches") == []:
            merged["patches"] = []
        merged["patches"] += [patch for patch in part.get("patches", []) if patch not in merged["patches"]]
        merged["treatment"] += [name for name in part.get("treatment", []) if name not in merged["treatment"]]
    if modes_nodes.nodes_of(merged) > 1:
        merged["treatment"] += [name for name in modes_nodes.TREATMENT if name not in merged["treatment"]]
    else:
        merged.pop("nodes", None)
    return merged


def overlay(base: Mapping[str, Any], change: Mapping[str, Any], deep: bool = False) -> dict[str, Any]:
    """`base` changed by `change`: a changed key keeps its place, a new one comes last, null removes."""
    result = dict(base)
    for key, value in change.items():
        if deep and isinstance(value, Mapping):
            below = result.get(key)
            result[key] = overlay(below if isinstance(below, Mapping) else {}, value, deep)
        else:
            result[key] = value
    return {key: value for key, value in result.items() if value is not None}


def render(
    catalogue: Catalogue,
    name: str,
    settings: Mapping[str, Any],
    args: Mapping[str, Any] | None = None,
    env: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """The mode `name` for one machine: merged, changed by the machine's own `args` and `env`, placeholders filled in.

    `${port}` takes settings["port"] with its type where it stands alone; it must be set. Where the setting is null or
    empty, `${mem_fraction_static?}` leaves the flag out and `${mem_fraction_static:-0.55}` is 0.55. Raises ModeError
    with every error.
    """
    errors = check_all({part: catalogue[part] for part in lineage(catalogue, name)})
    errors += _check_args("sglang_server_extra_args", args or {}) + _check_env("sglang_server_env", env or {})
    if errors:
        raise ModeError(errors)
    mode = merge(catalogue, name)
    for key, change in (("args", args), ("env", env)):
        filled = {}
        for item, value in overlay(mode[key], change or {}).items():
            value = _fill(f"Mode {name!r}: {item}", value, settings, errors, mode["requires"].get("settings", {}))
            if value is not None:
                filled[item] = str(value) if key == "env" else value
        mode[key] = filled
    if modes_nodes.nodes_of(mode) > 1:
        try:
            told_args, told_env = modes_nodes.flags(mode, settings)
        except ValueError as error:
            raise ModeError([*errors, str(error)]) from error
        mode["args"] |= told_args
        # A mode or a machine that names an interface knows better.
        mode["env"] = told_env | mode["env"]
    if errors:
        raise ModeError(errors)
    return mode


def _fill(where: str, value: Any, settings: Mapping[str, Any], errors: list[str], reasons: Mapping[str, str]) -> Any:
    if isinstance(value, list):
        return [_fill(where, item, settings, errors, reasons) for item in value]
    if isinstance(value, dict):
        return {key: _fill(where, item, settings, errors, reasons) for key, item in value.items()}
    if not isinstance(value, str):
        return value
    whole = _PLACEHOLDER.fullmatch(value)
    left_out = False

    def one(match: re.Match[str]) -> str:
        nonlocal left_out
        setting, otherwise = match[1], match[2]
        if setting not in settings:
            errors.append(f"{where} asks for ${{{setting}}}; the settings are: {', '.join(sorted(settings))}.")
        elif settings[setting] not in (None, ""):
            return str(settings[setting])
        elif otherwise == "?":
            left_out = True
        elif otherwise:
            return otherwise.removeprefix(":-")
        else:
            why = reasons.get(setting, "set it.")
            errors.append(f"{where} needs sglang_server_{setting}, which is not set for this machine; {why}")
        return ""

    text = _PLACEHOLDER.sub(one, value)
    if left_out:
        return None
    return settings[whole[1]] if whole and settings.get(whole[1]) not in (None, "") else text


def others(names: Iterable[str], name: str) -> list[str]:
    """The other modes, sorted: what a mode's unit conflicts with."""
    return sorted(set(names) - {name})
