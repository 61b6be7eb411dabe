"""Poll a probe module and show its progress while it happens: a module can only speak once, at its end."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from ansible import constants
from ansible.errors import AnsibleConnectionFailure
from ansible.plugins.action import ActionBase
from ansible.utils.display import Display
from ansible_collections.servelab.sglang.plugins.module_utils.watching import LookFailed, Party, Stalled, watch

display = Display()


class ActionModule(ActionBase):
    """See the documentation of the module of the same name."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Watch until the probe says done or failed, or says nothing new for stall_timeout seconds."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        _, asked = self.validate_argument_spec(
            argument_spec={
                "module": {"type": "str", "required": True},
                "args": {"type": "dict", "default": {}},
                "interval": {"type": "float", "default": 2.0},
                "stall_timeout": {"type": "float", "default": 900.0},
                "party": {
                    "type": "dict",
                    "options": {
                        "key": {"type": "str", "required": True},
                        "name": {"type": "str", "required": True},
                        "first": {"type": "bool", "required": True},
                    },
                },
            }
        )
        if self._task.check_mode:
            return result | {"skipped": True, "msg": "Check mode started nothing, so there is nothing to watch."}
        host = (task_vars or {}).get("inventory_hostname", "")
        party = None
        if asked["party"]:
            # Ansible's own directory of this run on the controller: the workers of all hosts share it.
            place = Path(str(constants.DEFAULT_LOCAL_TMP)) / "servelab" / asked["party"]["key"]
            party = Party(place, asked["party"]["name"], asked["party"]["first"])

        def look() -> dict[str, Any]:
            try:
                seen: dict[str, Any] = self._execute_module(
                    module_name=asked["module"], module_args=asked["args"], task_vars=task_vars
                )
            except AnsibleConnectionFailure as failure:
                raise LookFailed(str(failure).splitlines()[0]) from failure
            if seen.get("unreachable"):
                raise LookFailed(str(seen.get("msg", "unreachable")).splitlines()[0])
            if seen.get("failed") or "state" not in seen:
                why = seen.get("msg") or seen.get("module_stderr") or "it returned no state"
                return {"state": "failed", "cause": f"{asked['module']} could not look: {why}", "remedy": None}
            return seen

        try:
            last = watch(
                look,
                lambda line: display.display(f"  {host}  {line}"),
                time.monotonic,
                time.sleep,
                asked["interval"],
                asked["stall_timeout"],
                party,
            )
        except Stalled as stalled:
            seen = dict(stalled.last or {})
            where = seen.get("progress") or "before the first look"
            cause = f"No news for {stalled.seconds:.0f} s; the last was: {where}"
            if stalled.trouble:
                cause += f" (the machine could not be asked: {stalled.trouble})"
            # A probe may know what it means to stand still at this step.
            remedy = seen.get("if_stalled") or "Read the log for what hangs; if it only is slow, raise stall_timeout."
            if party is not None:
                party.tell({"state": "failed", "cause": cause, "remedy": remedy})
            return (
                result
                | seen
                | {"failed": True, "stalled": True, "cause": cause, "remedy": remedy}
                | _said(cause, remedy)
            )
        result.update({key: value for key, value in last.items() if key not in ("invocation", "failed")})
        result["changed"] = False
        if last["state"] == "failed":
            result["failed"] = True
            result.update(_said(last.get("cause"), last.get("remedy"), last.get("evidence"), last.get("tail")))
        return result


def _said(cause: Any, remedy: Any, evidence: Any = None, tail: Any = None) -> dict[str, str]:
    lines = [f"{str(cause or 'unknown cause').rstrip('.')}."]
    if evidence:
        lines.append(f"Evidence: {evidence}")
    if remedy:
        lines.append(f"Remedy: {remedy}")
    lines += list(tail or [])
    return {"msg": "\n".join(lines)}
