"""What a campaign file may say."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")
MODE = re.compile(r"^[a-z][a-z0-9_]{0,40}$")


class CampaignError(Exception):
    """A campaign that cannot run; the message holds one sentence per error."""


@dataclass(frozen=True)
class Spec:
    """``modes``: the first is the one that the others are compared with; the same twice is an A/A test. ``seed``: of
    the first repetition's prompts, the next ones count up. ``precision``: stop when every interval is within this share
    of its ratio (0: never). ``adaptive``: mode → the mode from whose crossover with the first one its configuration is
    made. ``keep_server``: two runs of one mode in a row share a start. ``variables``: passed on to bench.yml as they
    are."""

    name: str
    description: str
    modes: list[str]
    levels: list[int]
    repetitions: int = 5
    seed: int = 1
    refine: bool = True
    pause_seconds: float = 0.0
    precision: float = 0.0
    keep_server: bool = False
    adaptive: dict[str, str] = field(default_factory=dict)
    variables: dict[str, Any] = field(default_factory=dict)

    @property
    def arms(self) -> list[tuple[str, str]]:
        """(arm, mode): a mode that comes again is an arm of its own."""
        found: list[tuple[str, str]] = []
        for mode in self.modes:
            again = sum(1 for _, other in found if other == mode)
            found.append((f"{mode}_{again + 1}" if again else mode, mode))
        return found


# name → (type, what it must be, whether it must be there)
_KEYS: dict[str, tuple[type | tuple[type, ...], str, bool]] = {
    "description": (str, "a text", True),
    "modes": (list, "a list of at least two modes", True),
    "levels": (list, "a list of different whole numbers above 0", True),
    "repetitions": (int, "a whole number from 1 to 50", False),
    "seed": (int, "a whole number", False),
    "refine": (bool, "true or false", False),
    "pause_seconds": ((int, float), "a number of seconds", False),
    "precision": ((int, float), "a share from 0 to below 1, as 0.02", False),
    "keep_server": (bool, "true or false", False),
    "adaptive": (dict, "a mapping of a later mode to an earlier one that is not the first", False),
    "variables": (dict, "a mapping of bench_* variables", False),
}


def read(path: Path) -> Spec:
    """The campaign in the file *path*, named as the file is. Raises CampaignError with every error."""
    import yaml

    try:
        content = yaml.safe_load(path.read_text())
    except FileNotFoundError:
        known = ", ".join(sorted(p.stem for p in path.parent.glob("*.yml"))) or "none"
        raise CampaignError(f"There is no campaign {path}; the known ones are: {known}.") from None
    except (OSError, yaml.YAMLError) as error:
        raise CampaignError(f"{path} cannot be read as YAML: {error}") from error
    return check(path.stem, content)


def check(name: str, content: Any) -> Spec:
    """The Spec of a file's *content*. Raises CampaignError with every error."""
    if not isinstance(content, Mapping):
        raise CampaignError(f"Campaign {name} is not a mapping; it needs description, modes and levels.")
    errors = [f"Unknown key {key!r}; a campaign may have {', '.join(_KEYS)}." for key in content if key not in _KEYS]
    if not NAME.match(name):
        errors.append(f"The name {name!r} becomes a directory: use letters, digits, dots, - and _.")
    for key, (types, what, needed) in _KEYS.items():
        value = content.get(key)
        if value is None:
            if needed:
                errors.append(f"{key} is missing: give {what}.")
        elif not isinstance(value, types) or (isinstance(value, bool) and types is not bool) or not _fits(key, value):
            errors.append(f"{key} is {value!r}, but must be {what}.")
    if not errors and not _known(content):
        errors.append(f"adaptive is {content['adaptive']!r}, but must be {_KEYS['adaptive'][1]}.")
    if errors:
        raise CampaignError("\n".join(f"Campaign {name}: {error}" for error in errors))
    return Spec(name=name, **{key: value for key, value in content.items() if value is not None})


def _known(content: Mapping[str, Any]) -> bool:
    """Whether what *adaptive* names can be derived: both are modes, and the source is measured before."""
    modes = content["modes"]
    return all(
        mode in modes and source in modes[1:] and modes.index(source) < modes.index(mode)
        for mode, source in (content.get("adaptive") or {}).items()
    )


def _fits(key: str, value: Any) -> bool:
    if key == "modes":
        return len(value) >= 2 and all(isinstance(mode, str) and MODE.match(mode) for mode in value)
    if key == "levels":
        whole = all(isinstance(c, int) and not isinstance(c, bool) and c > 0 for c in value)
        return bool(value) and whole and len(set(value)) == len(value)
    if key == "repetitions":
        return 1 <= int(value) <= 50
    if key == "pause_seconds":
        return float(value) >= 0
    if key == "precision":
        return 0 <= float(value) < 1
    if key == "variables":
        taken = {"bench_mode", "bench_campaign", "bench_levels", "bench_seed", "bench_results_dir"}
        return all(isinstance(name, str) and name.startswith("bench_") and name not in taken for name in value)
    return True
