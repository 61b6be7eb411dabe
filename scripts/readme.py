#!/usr/bin/env python
"""Write the variables' tables of the roles' READMEs from what the roles specify.

scripts/readme.py            write every roles/*/README.md
scripts/readme.py --check    write nothing; exit 1 and name those that differ

Types and meanings come from meta/argument_specs.yml, defaults from defaults/main.yml. Only what stands between the two
marks is written; the rest of a README is by hand.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

ROLES = Path(__file__).resolve().parent.parent / "roles"
START = "<!-- variables: written by `make readme` from meta/argument_specs.yml and defaults/main.yml -->"
END = "<!-- end of variables -->"
# A longer default makes the table unreadable.
_WIDEST = 70
# Ansible's markup: C(code), V(value), O(option), E(variable), F(file) and I(emphasis), B(bold), L(text,url).
_MARKUP = ((r"[CVOEF]\(([^()]*)\)", r"`\1`"), (r"I\(([^()]*)\)", r"*\1*"), (r"B\(([^()]*)\)", r"**\1**"))

Spec = Mapping[str, Any]


def generated(role: Path) -> str:
    """The text between the marks for one role's directory."""
    entries: dict[str, Spec] = read(role / "meta/argument_specs.yml")["argument_specs"]
    defaults = resolved(read(role / "defaults/main.yml"))
    parts = []
    for name, entry in entries.items():
        options = entry.get("options") or {}
        if name != "main":
            parts.append(f"`tasks_from: {name}`: {_words(entry['short_description'])}.")
        if options:
            parts.append("\n".join(_table(options, defaults)))
    return "\n\n".join(parts)


def resolved(defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults with what can be told without a machine put in: own variables, and the text of default('text').

    A value that depends on anything else is `Computed`.
    """
    return {name: _resolve(value, defaults) for name, value in defaults.items()}


class Computed:
    """A default that only a machine can tell."""


def read(path: Path) -> Any:
    """A YAML file's content; an empty mapping for an absent or empty one."""
    return (yaml.safe_load(path.read_text(encoding="utf-8")) if path.exists() else None) or {}


def written(readme: str, text: str) -> str:
    """A README's text with `text` between its marks. Raises ValueError where there are none."""
    before, start, rest = readme.partition(START)
    _old, end, after = rest.partition(END)
    if not start or not end:
        raise ValueError(f"the marks are missing; put these two lines where the table belongs:\n{START}\n{END}")
    return f"{before}{START}\n\n{text}\n\n{END}{after}"


def _resolve(value: Any, defaults: Mapping[str, Any]) -> Any:
    if isinstance(value, list):
        items = [_resolve(item, defaults) for item in value]
        return Computed if Computed in items else items
    if not isinstance(value, str):
        return value
    value = re.sub(r"\{\{ *\w+ *\| *default\('([^']*)'\) *\}\}", r"\1", value)

    def own(match: re.Match[str]) -> str:
        found = defaults.get(match[1])
        known = _resolve(found, defaults) if isinstance(found, str) else Computed
        return match[0] if known is Computed else str(known)

    value = re.sub(r"\{\{ *(\w+) *\}\}", own, value)
    return Computed if "{{" in value else value


def _table(options: Spec, defaults: Mapping[str, Any]) -> Iterator[str]:
    yield "| variable | type | default | meaning |"
    yield "|---|---|---|---|"
    for name, option in _flat(options):
        default = defaults.get(name, option.get("default"))
        yield f"| `{name}` | {_type(option)} | {_default(option, default)} | {_words(option['description'])} |"


def _flat(options: Spec, prefix: str = "") -> Iterator[tuple[str, Spec]]:
    for name, option in options.items():
        yield prefix + name, option
        if option.get("options"):
            inside = f"{prefix}{name}[]." if option.get("type") == "list" else f"{prefix}{name}."
            yield from _flat(option["options"], inside)


def _type(option: Spec) -> str:
    if option.get("choices"):
        return ", ".join(f"`{_plain(choice)}`" for choice in option["choices"])
    kind = option.get("type", "str")
    return f"list of {option['elements']}" if kind == "list" and option.get("elements") else str(kind)


def _default(option: Spec, default: Any) -> str:
    if option.get("required"):
        return "required"
    if default is None or default == "":
        return ""
    text = "" if default is Computed else _plain(default)
    return f"`{text}`" if text and len(text) <= _WIDEST else "see [defaults](defaults/main.yml)"


def _plain(value: Any) -> str:
    return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)).replace("|", "\\|")


def _words(description: str | list[str]) -> str:
    text = description if isinstance(description, str) else " ".join(description)
    for pattern, with_ in _MARKUP:
        text = re.sub(pattern, with_, text)
    return " ".join(text.split()).removesuffix(".").replace("|", "\\|")


def main() -> int:
    check = sys.argv[1:] == ["--check"]
    status = 0
    for role in sorted(path.parent.parent for path in ROLES.glob("*/meta/argument_specs.yml")):
        readme = role / "README.md"
        old = readme.read_text(encoding="utf-8")
        try:
            new = written(old, generated(role))
        except ValueError as error:
            print(f"{readme}: {error}", file=sys.stderr)
            status = 1
            continue
        if new == old:
            continue
        print(f"{readme.relative_to(ROLES.parent)}: {'differs; run make readme' if check else 'written'}")
        status = status or int(check)
        if not check:
            readme.write_text(new, encoding="utf-8")
    return status


if __name__ == "__main__":
    sys.exit(main())
