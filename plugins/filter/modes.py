"""Filters over the mode catalogue: the only place that reads its files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from ansible.errors import AnsibleFilterError
from ansible.module_utils.common.yaml import yaml_load
from ansible_collections.servelab.sglang.plugins.module_utils import (
    modes,
    modes_adaptive,
    modes_nodes,
    modes_show,
    server_status,
)
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
                    catalogue[path.stem] = yaml_load(stream)
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


def mode_nodes(catalogue: dict[str, Any], name: str) -> int:
    """Over how many guests a mode serves; 1 for what is no mode or is wrong, which `mode_errors` tells."""
    try:
        return modes_nodes.nodes_of(modes.merge(catalogue, name))
    except (modes.ModeError, AttributeError, TypeError, ValueError):
        return 1


def modes_over_several(names: list[str], catalogue: dict[str, Any]) -> list[str]:
    """Those of the modes that serve over more than one guest."""
    return [name for name in names if mode_nodes(catalogue, name) > 1]


def modes_here(names: list[str], catalogue: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    """Those of the modes in which this guest takes part."""
    return [name for name in names if modes_nodes.takes_part(mode_nodes(catalogue, name), settings)]


def _read(hostvars: Mapping[str, Any], names: list[str]) -> dict[str, dict[str, Any]]:
    """Of these hosts, as far as there are such, only what is asked about: other templates may cost something."""
    read = ("ansible_connection", "ansible_host", "sglang_server_dist_address")
    return {
        name: {key: hostvars[name][key] for key in read if key in hostvars[name]} for name in names if name in hostvars
    }


def node_settings(
    names: list[str], hostvars: Mapping[str, Any], here: str, port: int, interface: str
) -> dict[str, Any]:
    """What the guest `here` is told about the ranks of a mode over several guests."""
    return modes_nodes.settings(names, _read(hostvars, names), here, port, interface)


def node_errors(mode: dict[str, Any], names: list[str], hostvars: Mapping[str, Any], own: dict[str, Any]) -> list[str]:
    """What is wrong with serving a rendered mode over these guests, a sentence each."""
    return modes_nodes.errors(mode, names, _read(hostvars, names), own)


def node_interface(facts: dict[str, Any], name: str, hostvars: Mapping[str, Any]) -> str | None:
    """The interface by which the other ranks reach the guest `name`: "" where nothing is known, None where none has its
    address."""
    return modes_nodes.interface_of(modes_nodes.address_of(name, _read(hostvars, [name])[name]), facts)


def status_lines(servers: list[dict[str, Any]], patch: dict[str, Any], gpus: list[dict[str, Any]]) -> list[str]:
    """What playbooks/status.yml prints; `patch` is what sglang_patch says in check mode."""
    known = patch.get("shape") is not None and not patch.get("failed")
    return server_status.lines(
        servers, patch.get("manifest_sha256") is not None if known else None, gpus, patch.get("release")
    )


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


def adaptive_errors(path: str, args: dict[str, Any]) -> list[str]:
    """What is wrong with the adaptive configuration in a file of the controller, for a mode with these args."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        return [f"sglang_server_adaptive_config: {path} cannot be read ({error.strerror})."]
    except ValueError as error:
        return [f"sglang_server_adaptive_config: {path} is not JSON: {error}."]
    return [f"sglang_server_adaptive_config: {path}: {error}" for error in modes_adaptive.errors(document, args)]


def mode_table(catalogue: dict[str, Any], ledger: str = "") -> str:
    """All modes as a table; `ledger` is the file that has the runs, which need not exist."""
    path = Path(ledger) if ledger else None
    text = path.read_text(encoding="utf-8") if path and path.is_file() else ""
    try:
        return "\n".join(modes_show.table(catalogue, modes_show.ledger_lines(text)))
    except modes.ModeError as error:
        raise AnsibleFilterError(str(error)) from error


def mode_merged(catalogue: dict[str, Any], name: str) -> str:
    """The mode with all that it extends, as YAML; placeholders stand as they are."""
    try:
        merged = modes.merge(catalogue, name)
    except modes.ModeError as error:
        raise AnsibleFilterError(str(error)) from error
    text: str = yaml.safe_dump(json.loads(json.dumps(merged)), sort_keys=False, allow_unicode=True, width=110)
    return text


def mode_difference(catalogue: dict[str, Any], name: str, against: str) -> str:
    """What `name` has otherwise than `against`, a line each."""
    try:
        return "\n".join(modes_show.difference(catalogue, name, against))
    except modes.ModeError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """Filters of the collection about modes and their units."""

    def filters(self) -> dict[str, Any]:
        return {
            "load_modes": load_modes,
            "mode_errors": mode_errors,
            "render_mode": render_mode,
            "status_lines": status_lines,
            "adaptive_errors": adaptive_errors,
            "mode_nodes": mode_nodes,
            "mode_table": mode_table,
            "modes_here": modes_here,
            "modes_over_several": modes_over_several,
            "node_errors": node_errors,
            "node_interface": node_interface,
            "node_play_errors": modes_nodes.play_errors,
            "node_settings": node_settings,
            "mode_merged": mode_merged,
            "mode_difference": mode_difference,
            "unit_command": unit_command,
            "unit_env": unit_env,
            "unit_word": unit_word,
        }
