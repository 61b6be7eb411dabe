"""The controller's part of a lease: who its owner is, and which owners on this controller are dead."""

from __future__ import annotations

import os
import pwd
from typing import Any

from ansible.plugins.action import ActionBase
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_holders import start_time
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_lease import Owner, machine


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


class ActionModule(ActionBase):
    """See the documentation of the module of the same name."""

    TRANSFERS_FILES = False
    _supports_check_mode = True

    def run(self, tmp: str | None = None, task_vars: dict[str, Any] | None = None) -> dict[str, Any]:
        """Run the module with what only the controller knows."""
        result: dict[str, Any] = super().run(tmp, task_vars)
        wanted = dict(self._task.args)
        here = machine()

        def ask(more: dict[str, Any]) -> dict[str, Any]:
            return dict(
                self._execute_module(
                    module_name="servelab.sglang.gpu_lease", module_args=wanted | more, task_vars=task_vars
                )
            )

        if wanted.get("state") == "read":
            return result | ask({})
        # A task runs in a fork of ansible-playbook, whose own process lives as long as the play does.
        pid = int(wanted.get("pid") or os.getppid())
        owner = Owner(
            machine=here,
            pid=pid,
            start_time=start_time(pid) or 0,
            who=f"{_user()}@{os.uname().nodename}",
            purpose=str(wanted.get("purpose", "cleaning")),
        )
        seen = ask({"state": "read"})
        if seen.get("failed") or seen.get("unreachable"):
            return result | seen
        owners = [Owner(**lease["owner"]) for lease in seen["leases"]]
        dead = [one.key for one in owners if one.machine == here and start_time(one.pid) != one.start_time]
        return result | ask({"owner": vars(owner), "dead": dead})
