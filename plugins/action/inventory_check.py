"""Check the whole inventory on the controller, before any machine is touched."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from ansible.module_utils.common.yaml import yaml_load
from ansible.plugins.action import ActionBase
from ansible_collections.servelab.sglang.plugins.module_utils.inventory_parts import parts
from ansible_collections.servelab.sglang.plugins.module_utils.inventory_rules import UNKNOWN, Catalogue, check_inventory
from ansible_collections.servelab.sglang.plugins.module_utils.stack_install import locks_known

ROLES = Path(__file__).resolve().parents[2] / "roles"


class ActionModule(ActionBase):
    """Returns `problems` (sentences) and fails if there are any, and `parts`. Connects to nothing."""

    TRANSFERS_FILES = False
    _requires_connection = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        task_vars = task_vars or {}
        result: dict[str, Any] = super().run(tmp, task_vars)
        groups = {name: list(hosts) for name, hosts in task_vars["groups"].items()}
        catalogue = read_catalogue(ROLES)
        problems: list[str] = []
        hosts: dict[str, dict[str, Any]] = {}
        machines = [host for name in ("pve_nodes", "gpu_guests", "sglang_routers") for host in groups.get(name, [])]
        for host in dict.fromkeys(machines):
            hosts[host] = evaluate(host, task_vars["hostvars"][host], catalogue, problems)
        problems += check_inventory(hosts, groups, replace(catalogue, locks=read_locks(hosts.values())))
        result.update(changed=False, problems=problems)
        if problems:
            count = f"{len(problems)} problem{'s' if len(problems) > 1 else ''}"
            listed = "".join(f"\n- {sentence}" for sentence in problems)
            result.update(failed=True, msg=f"The inventory has {count}, and nothing was touched:{listed}")
        else:
            result.update(parts=parts(hosts, groups), machines=groups["all"])
            result["msg"] = f"The inventory says what it must about {len(hosts)} machines."
        return result


def evaluate(host: str, hostvars: Mapping[str, Any], catalogue: Catalogue, problems: list[str]) -> dict[str, Any]:
    """The host's variables that belong to this collection, with their templates evaluated.

    Others are left alone: they may be lookups that cost something, or secrets.
    """
    known = {name for names in catalogue.variables.values() for name in names}
    prefixes = tuple(f"{role}_" for role in catalogue.variables)
    values: dict[str, Any] = {}
    for name in list(hostvars):
        if name in known or name in ("pve_node", "sglang_version") or name.startswith(prefixes):
            try:
                values[name] = plain(hostvars[name])
            except Exception as error:  # whatever a template raises is a problem of the inventory
                values[name] = UNKNOWN
                reason = " ".join(str(error).split()).rstrip(".")
                problems.append(f"{host}: {name} cannot be evaluated: {reason}; correct the template.")
    return values


def plain(value: Any) -> Any:
    """Walk through lazily evaluated containers, so that a bad template shows here and not in the middle of a rule."""
    if isinstance(value, Mapping):
        return {str(key): plain(content) for key, content in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(item) for item in value]
    return value


def read_locks(hosts: Iterable[Mapping[str, Any]]) -> dict[str, str]:
    """Path → text of the locks that the inventory names, as far as they can be read."""
    texts: dict[str, str] = {}
    for lock in {str(given["sglang_env_lock"]) for given in hosts if given.get("sglang_env_lock")}:
        if Path(lock).is_file():
            texts[lock] = Path(lock).read_text(encoding="utf-8", errors="replace")
    return texts


def read_catalogue(roles: Path) -> Catalogue:
    """What the roles take, from their own specifications; a role without one is not judged."""
    variables: dict[str, set[str]] = {}
    defaults: dict[str, Any] = {}
    for specs in sorted(roles.glob("*/meta/argument_specs.yml")):
        role = specs.parents[1]
        entry_points = (yaml_load(specs.read_text(encoding="utf-8")) or {}).get("argument_specs", {})
        names = {name for entry in entry_points.values() for name in (entry.get("options") or {})}
        defaults_file = role / "defaults/main.yml"
        if defaults_file.is_file():
            given = yaml_load(defaults_file.read_text(encoding="utf-8")) or {}
            names |= set(given)
            defaults |= {name: value for name, value in given.items() if "{{" not in str(value)}
        variables[role.name] = names
    modes = sorted(path.stem for path in roles.glob("sglang_server/vars/modes/*.yml"))
    locks = [path.name for path in roles.glob("sglang_env/files/locks/*.txt")]
    return Catalogue(variables, defaults, modes, list(locks_known(locks)))
