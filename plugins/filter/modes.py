"""Filters over the mode catalogue: the only place that reads its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible_collections.servelab.sglang.plugins.module_utils import modes
from ansible_collections.servelab.sglang.plugins.module_utils.modes_unit import unit_command, unit_env, unit_word


def load_modes(directories: list[str]) -> dict[str, Any]:
    """Read every <name>.yml of the directories; a later directory replaces a mode of an earlier one."""
    catalogue: dict[str, Any] = {}
    errors: list[str] = []
    for directory in map(Path, directories):
        if not directory.is_dir():
            errors.append(f"The mode directory {directory} does not exist; correct sglang_server_mode_dirs.")
            continue
        for path in sorted([*directory.glob("*.yml"), *directory.glob("*.yaml")]):
            try:
                with path.open("rb") as stream:
                    catalogue[path.stem] = yaml.safe_load(stream)
            except yaml.YAMLError as error:
                errors.append(f"{path} is not YAML: {str(error).splitlines()[0]}.")
    if errors:
        raise AnsibleFilterError(" ".join(errors))
    return catalogue


def mode_errors(
    catalogue: dict[str, Any],
    names: list[str],
    settings: dict[str, Any],
    args: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
) -> list[str]:
    """Everything that is wrong with the catalogue and with rendering `names`, a sentence each, without doubles."""
    errors = modes.check_all(catalogue)
    for name in names:
        try:
            modes.render(catalogue, name, settings, args, env)
        except modes.ModeError as error:
            errors += error.errors
    return list(dict.fromkeys(errors))


def render_mode(
    catalogue: dict[str, Any],
    name: str,
    settings: dict[str, Any],
    args: dict[str, Any] | None = None,
    env: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """The mode for one machine; raises with every error in plain sentences."""
    try:
        return modes.render(catalogue, name, settings, args, env)
    except modes.ModeError as error:
        raise AnsibleFilterError(str(error)) from error


def unmet_requirements(mode: dict[str, Any], versions: dict[str, str | None]) -> list[str]:
    """Sentences for what the mode requires and the machine has not."""
    return [f"Mode {mode['name']!r} cannot run here: {reason}." for reason in modes.unmet(mode["requires"], versions)]


class FilterModule:
    """Filters of the collection about modes and their units."""

    def filters(self) -> dict[str, Any]:
        return {
            "load_modes": load_modes,
            "mode_errors": mode_errors,
            "render_mode": render_mode,
            "unmet_requirements": unmet_requirements,
            "unit_command": unit_command,
            "unit_env": unit_env,
            "unit_word": unit_word,
        }
