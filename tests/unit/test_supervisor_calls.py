"""Where no systemd is, whoever asks about units must say who keeps them: every call in the roles and playbooks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
MODULES = [
    path.stem for path in sorted((ROOT / "plugins/modules").glob("*.py")) if "SUPERVISOR_OPTIONS" in path.read_text()
]
FILES = [*sorted((ROOT / "playbooks").glob("*.yml")), *sorted((ROOT / "roles").glob("*/*/*.yml"))]


def calls(told: Any, module: str) -> Iterator[dict[str, Any]]:
    if isinstance(told, dict):
        for key, value in told.items():
            if key == f"servelab.sglang.{module}":
                yield value or {}
            yield from calls(value, module)
    elif isinstance(told, list):
        for one in told:
            yield from calls(one, module)


@pytest.mark.parametrize("module", MODULES)
def test_every_call_names_the_supervisor_and_its_prefix(module: str) -> None:
    wrong = []
    for file in FILES:
        for said in calls(yaml.safe_load(file.read_text()), module):
            # A node has systemd; and whose cards they are does not depend on units.
            if module == "gpu_holders" and (said.get("view") == "node" or set(said) == {"device_dir"}):
                continue
            if not {"supervisor", "prefix"} <= set(said):
                wrong.append(str(file.relative_to(ROOT)))
    assert wrong == []


def test_some_modules_have_a_supervisor() -> None:
    assert {"unit", "mode_units", "server_probe"} <= set(MODULES)
