"""What the double itself is told: a JSON file, never SGLang's flags.

{"profile": "story", "time_scale": 5, "sglang_package": "/opt/servelab/stack/lib/python3*/site-packages/sglang"}
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from .cost import profile_names

VARIABLE = "SERVELAB_LAB_SERVER_JSON"
DEFAULT = "/opt/servelab-lab/server.json"
# Beside it: what the lab's switchboard has on, over what the file itself says.
SWITCHED = "faults.json"
# Set in unit tests on machines without simulated cards: the schedulers hold nothing.
NO_GPU = "SERVELAB_LAB_NO_GPU"


# Failures on demand; docs/simulator.md says what each looks like.
FAULTS = (
    "assertion",
    "death_on_first_request",
    "fell_back_to_nccl",
    "garbage_output",
    "hang_nccl_init",
    "oom_graph_capture",
    "oom_kv_pool",
    "unsupported_architecture",
)


class ConfigError(ValueError):
    """The double's configuration is unusable. The text is one sentence per error."""


@dataclass(frozen=True)
class Config:
    """`time_scale` k: one simulated second takes 1/k wall seconds. `load_seconds` are simulated.

    `sglang_package` is a glob of the installed package's directory. With `survivors` the schedulers outlive their
    launcher and ignore SIGTERM. `answers` maps a part of a prompt to what the model says to it. `faults` are names of
    FAULTS.
    """

    sglang_package: str
    profile: str = "story"
    time_scale: float = 1.0
    survivors: bool = False
    load_seconds: float = 40.0
    answers: Mapping[str, str] = field(default_factory=dict)
    faults: Sequence[str] = ()

    def package(self) -> Path:
        """Return the one directory that the glob finds. Raises ConfigError."""
        found = sorted(glob.glob(self.sglang_package))  # noqa: PTH207 - the pattern is absolute
        if len(found) != 1:
            raise ConfigError(
                f"sglang_package {self.sglang_package!r} matches {len(found)} directories; "
                "it must name the one installed sglang package whose flags are to be understood."
            )
        return Path(found[0])


def load_config(environ: Mapping[str, str] = os.environ) -> Config:
    """Read the file that $SERVELAB_LAB_SERVER_JSON names. Raises ConfigError with every error in it."""
    path = Path(environ.get(VARIABLE) or DEFAULT)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path} cannot be read ({error.strerror}); set {VARIABLE} or create it.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}.") from error
    if not isinstance(data, dict):
        raise ConfigError(f"{path} must hold a JSON object, not {type(data).__name__}.")
    data |= _switched(path.with_name(SWITCHED))
    errors = list(_errors(data))
    if errors:
        raise ConfigError("\n".join(f"{path}: {error}" for error in errors))
    return Config(**data)


def _switched(path: Path) -> dict[str, Any]:
    """The switchboard's "server" part: faults and survivors. A file that is not there or broken switches nothing on."""
    try:
        server = json.loads(path.read_text(encoding="utf-8"))["server"]
    except (OSError, ValueError, KeyError, TypeError):
        return {}
    return server if isinstance(server, dict) else {}


def _errors(data: Mapping[str, Any]) -> list[str]:
    known = [entry.name for entry in fields(Config)]
    errors = [f"{key!r} is unknown; known are {', '.join(known)}." for key in data if key not in known]
    if not isinstance(data.get("sglang_package"), str):
        errors.append("sglang_package must be set to a path or glob.")
    if data.get("profile", "story") not in profile_names():
        errors.append(f"profile {data['profile']!r} is unknown; known are {', '.join(profile_names())}.")
    for key, lowest in (("time_scale", 0.01), ("load_seconds", 0.0)):
        value = data.get(key, lowest)
        if isinstance(value, bool) or not isinstance(value, int | float) or value < lowest:
            errors.append(f"{key} must be a number of at least {lowest}, not {value!r}.")
    if not isinstance(data.get("survivors", False), bool):
        errors.append(f"survivors must be true or false, not {data['survivors']!r}.")
    answers = data.get("answers", {})
    if not isinstance(answers, dict) or not all(isinstance(value, str) for value in answers.values()):
        errors.append(f"answers must map parts of prompts to texts, not {answers!r}.")
    faults = data.get("faults", [])
    if not isinstance(faults, list) or any(fault not in FAULTS for fault in faults):
        errors.append(f"faults must be a list of names from {', '.join(FAULTS)}; it is {faults!r}.")
    return errors
