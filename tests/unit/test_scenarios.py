"""What scenarios owe, as far as no lab is needed to see it: failures are met, most of a role's variables changed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from servelab_lab.faults import FAULTS

ROOT = Path(__file__).resolve().parents[2]
SCENARIOS = sorted(path.parent for path in (ROOT / "molecule").glob("*/molecule.yml"))
# Those that bear a role's name; with `_…` behind it are that role's other scenarios.
ROLES = [path for path in SCENARIOS if (ROOT / "roles" / path.name).is_dir()]


def told(scenario: Path, *places: str) -> str:
    return "\n".join(path.read_text() for place in places for path in sorted(scenario.glob(place)))


@pytest.mark.parametrize("name", FAULTS)
def test_every_failure_of_the_switchboard_is_met(name):
    """In a test, and not only in the switch's own."""
    met = "\n".join(told(scenario, "tests/*.py", "*.yml", "tasks/*.yml") for scenario in SCENARIOS)
    assert re.search(rf"\b{name}\b", met)


def test_every_role_has_a_scenario():
    assert [path.name for path in ROLES] == sorted(path.parent.name for path in (ROOT / "roles").glob("*/tasks"))


@pytest.mark.parametrize("scenario", ROLES, ids=lambda path: path.name)
def test_most_variables_are_changed(scenario):
    specification = yaml.safe_load((ROOT / "roles" / scenario.name / "meta/argument_specs.yml").read_text())
    # common has entry points only.
    entries = specification["argument_specs"].values()
    options = {name for entry in entries for name in entry.get("options", {})}
    # In the alternative, or by a test: play(name=value), {"name": value}.
    own = [path for path in SCENARIOS if path.name == scenario.name or path.name.startswith(f"{scenario.name}_")]
    changed = "\n".join(told(path, "converge.yml", "vars/*.yml", "tests/*.py") for path in own)
    unchanged = [name for name in options if not re.search(rf"\b{name}(:|=|\":)", changed)]
    assert len(unchanged) < len(options) / 2, f"never changed: {', '.join(unchanged)}"


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda path: path.name)
def test_no_step_is_left_out(scenario):
    settings = yaml.safe_load((scenario / "molecule.yml").read_text() or "{}") or {}
    steps = (settings.get("scenario") or {}).get("test_sequence")
    if steps:
        # A measurement always changes something.
        assert scenario.name in {"bench", "bench_otherwise", "collectives", "collectives_otherwise"}
        assert {"create", "check", "converge", "verify", "destroy"} <= set(steps)
