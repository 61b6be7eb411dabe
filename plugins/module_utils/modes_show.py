"""The catalogue for people: a table of all modes with their last results, and what makes one mode another."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .modes import Catalogue, merge
from .modes_needs import words


def ledger_lines(text: str) -> list[dict[str, Any]]:
    """The runs of a ledger; a line that cannot be read is passed over: the table is a help, the ledger the record."""
    found = []
    for line in text.splitlines():
        try:
            entry = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and "mode" in entry:
            found.append(entry)
    return found


def last_result(name: str, ledger: Iterable[Mapping[str, Any]]) -> str:
    """What the latest run of a mode came to, in a few words; "never run" where there is none."""
    runs = [entry for entry in ledger if entry.get("mode") == name]
    if not runs:
        return "never run"
    run = max(runs, key=lambda entry: str(entry.get("time") or ""))
    best = run.get("best_tok_s")
    parts = [f"{best:.1f} tok/s" if isinstance(best, int | float) else str(run.get("status", "?"))]
    if run.get("status") != "ok":
        parts = [str(run.get("status", "?")), str(run.get("reason") or "").split(". ")[0]]
    simulated = run.get("simulated")
    if simulated:
        parts.append(f"simulated {simulated.get('profile', '')}".strip())
    parts += [str(run["sglang_version"])] if run.get("sglang_version") else []
    parts.append(str(run.get("time") or "")[:10])
    return ", ".join(part for part in parts if part)


def table(catalogue: Catalogue, ledger: Sequence[Mapping[str, Any]], width: int = 60) -> list[str]:
    """Lines: name, what it is, what it needs, its last result. Raises ModeError."""
    rows = [("mode", "what", "needs", "last result")]
    for name in sorted(catalogue):
        mode = merge(catalogue, name)
        rows.append((name, mode["description"], words(mode), last_result(name, ledger)))
    # The last column may be as long as it is: nothing stands behind it.
    widths = [
        min(width if column < 3 else 200, max(len(row[column]) for row in rows)) for column in range(len(rows[0]))
    ]
    lines = ["  ".join(_cut(cell, size).ljust(size) for cell, size in zip(row, widths, strict=True)) for row in rows]
    return [line.rstrip() for line in [lines[0], "  ".join("-" * size for size in widths), *lines[1:]]]


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: size - 1] + "…"


def difference(catalogue: Catalogue, name: str, against: str) -> list[str]:
    """What `name` has otherwise than `against`, a line each; "-" is what only `against` has. Raises ModeError."""
    left, right = merge(catalogue, against), merge(catalogue, name)
    lines: list[str] = []
    for part in ("args", "env"):
        lines += _differ(part, left[part], right[part])
    needs = [{key: need for key, need in mode["requires"].items() if key != "because"} for mode in (left, right)]
    lines += _differ("requires", *needs)
    for part in ("patches", "treatment"):
        lines += [f"- {part}: {item}" for item in left[part] if item not in right[part]]
        lines += [f"+ {part}: {item}" for item in right[part] if item not in left[part]]
    paths = [
        {key: mode["probe"][key] for key in ("path", "fallback") if key in mode["probe"]} for mode in (left, right)
    ]
    lines += _differ("probe", *paths)
    return lines or [f"{name} and {against} are the same but for their names."]


def _differ(path: str, left: Mapping[str, Any], right: Mapping[str, Any]) -> list[str]:
    lines: list[str] = []
    for key in dict.fromkeys([*left, *right]):
        where = f"{path}.{key}"
        before, after = left.get(key), right.get(key)
        if before == after:
            continue
        if isinstance(before, Mapping) or isinstance(after, Mapping):
            lines += _differ(where, before or {}, after or {})
        elif key not in left:
            lines.append(f"+ {where}: {_shown(after)}")
        elif key not in right:
            lines.append(f"- {where}: {_shown(before)}")
        else:
            lines.append(f"~ {where}: {_shown(before)} → {_shown(after)}")
    return lines


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
