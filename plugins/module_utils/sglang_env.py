"""What a mode's environment variables mean to the installed release: some it needs, some do nothing any more."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from .sglang_release import Release

_NAME = re.compile(r"\b(?:SGLANG|SGL)_[A-Z0-9_]+\b")
# Read by compiled code or by this project's patch, so in no Python source of SGLang.
_ELSEWHERE = frozenset(
    {"SGLANG_CUSTOM_ALLREDUCE_ALGO", "SGLANG_FORCE_CUSTOM_AR_PCIE", "SGLANG_CUSTOM_AR_PCIE_MAX_BYTES"}
)


@dataclass(frozen=True)
class Rule:
    """What happens to a variable in the releases from `since` to `until`, both included."""

    name: str
    since: str | None
    until: str | None
    says: str


RULES = (
    Rule("SGLANG_ENABLE_SPEC_V2", "0.5.11", "0.5.13", "is on by default, so only 0 changes anything"),
    Rule("SGLANG_ENABLE_SPEC_V2", "0.5.14", "0.5.20", "does nothing but make the server warn; remove it"),
    Rule("SGLANG_ENABLE_SPEC_V2", "0.5.21", None, "is not known any more and does nothing; remove it"),
    Rule("CUDA_DEVICE_MAX_CONNECTIONS", None, None, "is overwritten with 8 by the server at its start; remove it"),
)


def notices(env: Mapping[str, Any], args: Mapping[str, Any], package_dir: Path, release: str) -> list[str]:
    """A sentence for each variable of `env` that does not do in `release` what it seems to do, and for one that lacks.

    `package_dir` is the installed package, in whose sources the names are looked up; nothing is imported.
    """
    here = Release.parse(release)
    said: list[str] = []
    set_here = {name: value for name, value in env.items() if value is not None}
    for name in set_here:
        rule = next((rule for rule in RULES if rule.name == name and _holds(rule, here)), None)
        if rule is not None:
            said.append(f"{name}: in SGLang {release} it {rule.says}.")
        elif _NAME.fullmatch(name) and name not in _ELSEWHERE and name not in names(package_dir):
            near = difflib.get_close_matches(name, names(package_dir), n=1, cutoff=0.75)
            hint = f"; the nearest one is {near[0]}" if near else ""
            said.append(f"{name}: SGLang {release} reads no variable of this name{hint}.")
    speculates = str(args.get("speculative_algorithm") or "").upper() in ("EAGLE", "EAGLE3", "NEXTN")
    if speculates and here <= Release.parse("0.5.10.post9") and "SGLANG_ENABLE_SPEC_V2" not in set_here:
        said.append(
            f'SGLANG_ENABLE_SPEC_V2 is off by default in SGLang {release}: without SGLANG_ENABLE_SPEC_V2: "1" in the '
            "mode's env, speculation does not overlap with scheduling."
        )
    return said


def _holds(rule: Rule, here: Release) -> bool:
    # A .post of the last release counts as that release.
    return (rule.since is None or Release.parse(rule.since) <= here) and (
        rule.until is None or here.numbers <= Release.parse(rule.until).numbers
    )


@cache
def names(package_dir: Path) -> frozenset[str]:
    """Every name of this form that stands in the package's Python sources."""
    found: set[str] = set()
    for file in sorted(package_dir.rglob("*.py")):
        found.update(_NAME.findall(file.read_text(encoding="utf-8", errors="replace")))
    return frozenset(found)
