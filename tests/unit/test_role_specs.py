"""What every role owes: a typed specification that agrees with its defaults, a README made from both, its anatomy."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
ROLES = sorted(path for path in (ROOT / "roles").iterdir() if path.is_dir())
TYPES: dict[str, tuple[type, ...]] = {
    "str": (str,),
    "path": (str,),
    "int": (int,),
    "float": (int, float),
    "bool": (bool,),
    "list": (list,),
    "dict": (dict,),
    "raw": (object,),
}
# A box of task files that others use by name: its main.yml only says so, and there is nothing to converge.
BOXES = {"common"}
INCLUDES = {"ansible.builtin.include_tasks", "ansible.builtin.import_tasks"}

_spec = importlib.util.spec_from_file_location("readme", ROOT / "scripts/readme.py")
assert _spec is not None and _spec.loader is not None
readme = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(readme)


def entries(role: Path) -> dict[str, dict[str, Any]]:
    return yaml.safe_load((role / "meta/argument_specs.yml").read_text())["argument_specs"]


def defaults(role: Path) -> dict[str, Any]:
    return readme.read(role / "defaults/main.yml")


def specified(role: Path) -> dict[str, dict[str, Any]]:
    """The variables that any entry point of a role takes."""
    return {name: option for entry in entries(role).values() for name, option in entry.get("options", {}).items()}


def public(role: Path) -> dict[str, dict[str, Any]]:
    """The variables that a role takes: those of its main entry point, of a box those of all."""
    return specified(role) if role.name in BOXES else entries(role)["main"]["options"]


def flat(options: Mapping[str, Any], where: str = "") -> Iterator[tuple[str, dict[str, Any]]]:
    for name, option in options.items():
        yield where + name, option
        yield from flat(option.get("options", {}), f"{where}{name}.")


def tasks(role: Path) -> list[dict[str, Any]]:
    return yaml.safe_load((role / "tasks/main.yml").read_text())


each_role = pytest.mark.parametrize("role", ROLES, ids=lambda role: role.name)
each_real_role = pytest.mark.parametrize(
    "role", [role for role in ROLES if role.name not in BOXES], ids=lambda role: role.name
)


@each_role
def test_the_readme_is_what_the_specification_says(role):
    text = (role / "README.md").read_text()
    assert readme.written(text, readme.generated(role)) == text, "run `make readme`"


@each_role
def test_every_default_is_specified(role):
    assert set(defaults(role)) - set(specified(role)) == set()


@each_role
def test_every_variable_has_a_default_or_is_required_or_is_shown_in_the_defaults(role):
    text = (role / "defaults/main.yml").read_text()
    shown = set(re.findall(r"(?m)^# ?(\w+):", text))
    own = {name for name, option in public(role).items() if name.startswith(f"{role.name}_")}
    assert own - set(defaults(role)) - shown == set()
    required = {name for name, option in public(role).items() if option.get("required")}
    assert required & set(defaults(role)) == set(), "a required variable has a default"
    # What another role or the inventory defines is named so, and needs no default here.
    assert set(public(role)) - own <= {"pve_node"}


@each_role
def test_defaults_are_of_the_type_that_is_specified(role):
    values = readme.resolved(defaults(role))
    for name, value in values.items():
        kind = specified(role)[name].get("type", "str")
        if value is readme.Computed or value is None:
            continue
        assert isinstance(value, TYPES[kind]), f"{name}: {value!r} is no {kind}"
        if kind in ("int", "float"):
            assert not isinstance(value, bool), f"{name}: {value!r} is no {kind}"
        if kind == "list":
            elements = TYPES[specified(role)[name]["elements"]]
            assert all(isinstance(item, elements) for item in value), f"{name}: {value!r}"


@each_role
def test_the_specification_names_the_default_that_there_is(role):
    raw, values = defaults(role), readme.resolved(defaults(role))
    for name, option in specified(role).items():
        if "default" in option:
            assert name in values, f"{name}: specified with a default that is nowhere"
            assert values[name] == option["default"], name
        elif name in raw:
            told_later = raw[name] is None or "{{" in str(raw[name])
            # A long list stands once.
            long = isinstance(raw[name], list) and len(raw[name]) > 10
            assert told_later or long, f"{name}: the default {raw[name]!r} is not in the specification"


@each_role
def test_every_option_is_typed_and_described_in_sentences(role):
    for entry_name, entry in entries(role).items():
        assert not entry["short_description"].endswith("."), entry_name
        for name, option in flat(entry.get("options", {})):
            where = f"{entry_name}: {name}"
            assert option["type"] in TYPES, where
            assert option["type"] != "list" or option.get("elements") in TYPES, where
            said = option["description"]
            for sentence in [said] if isinstance(said, str) else said:
                assert sentence[-1] in ".!?" and sentence[0] == sentence[0].upper(), f"{where}: {sentence}"


@each_role
def test_no_variable_is_without_effect(role):
    told = [path for kind in ("tasks", "vars", "templates", "handlers") for path in (role / kind).rglob("*.*")]
    used = "\n".join(path.read_text() for path in told)
    # A default may stand in another default.
    used += "\n".join(str(value) for value in defaults(role).values())
    assert [name for name in specified(role) if not re.search(rf"\b{name}\b", used)] == []


@each_role
def test_the_files_of_a_role_are_there(role):
    wanted = ["README.md", "defaults/main.yml", "meta/main.yml", "meta/argument_specs.yml", "tasks/main.yml"]
    assert [name for name in wanted if not (role / name).is_file()] == []


@each_role
def test_what_is_internal_is_named_so(role):
    internal = {name for path in role.glob("vars/*.yml") for name in readme.read(path)}
    assert {name for name in internal if not name.startswith(f"__{role.name}_")} == set()


@each_real_role
def test_main_is_a_table_of_contents(role):
    assert len((role / "tasks/main.yml").read_text().splitlines()) <= 30
    for task in tasks(role):
        assert set(task) - {"name", "tags", "when", "loop", "loop_control"} <= INCLUDES, task["name"]


@each_real_role
def test_every_phase_can_be_run_alone(role):
    for task in tasks(role):
        (include,) = INCLUDES & set(task)
        whole, *phases = task["tags"]
        assert whole == role.name and phases, task["name"]
        assert all(re.fullmatch(rf"{role.name}_[a-z]+", phase) for phase in phases), task["name"]
        # Included at run time, a file's tasks have only the tags that are handed on.
        if include.endswith("include_tasks"):
            assert set(phases) <= set(task[include]["apply"]["tags"]), task["name"]


@each_real_role
def test_every_role_has_a_scenario(role):
    scenario = ROOT / "molecule" / role.name
    assert (scenario / "molecule.yml").is_file() and (scenario / "converge.yml").is_file()
    assert list((scenario / "tests").glob("test_*.py"))
