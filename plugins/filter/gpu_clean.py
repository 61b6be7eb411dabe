# Apache-2.0
"""The decisions of the role gpu_clean, as filters: they run on the controller and touch no machine."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible.module_utils.parsing.convert_bool import boolean
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_policy import (
    UnknownHolders,
    disposable_units,
    plan,
    table,
    why_not_clean,
)
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import memory_verdict


def gpu_clean_plan(guest: Any, node: Any = None, vmid: int | None = None, force: bool = False) -> dict[str, Any]:
    """Decide about every holder; see the module_utils gpu_policy.plan. A skipped scan is an error, not "nobody"."""
    try:
        # `-e gpu_clean_force=false` arrives as text, and text is true: only what means true may kill.
        return plan(guest, node or None, int(vmid) if vmid else None, boolean(force))
    except UnknownHolders as error:
        raise AnsibleFilterError(f"{error}") from error


def gpu_clean_table(decided: Any, vmid: int | None = None) -> str:
    """The table of holders for people."""
    return table(decided, int(vmid) if vmid else None)


def gpu_memory_verdict(report: Any, threshold_mib: int, uuids: Any = None) -> dict[str, Any]:
    """Whether the cards are empty: clean is true, false, or null when it cannot be known."""
    return memory_verdict(report, int(threshold_mib), uuids)


def gpu_clean_reasons(
    decided: Any, released: Any = (), ailments: Any = None, unseen_ok: Any = False, **memory: Any
) -> list[str]:
    """Why the GPUs are not proved clean; memory verdicts are given as guest=… and node=…."""
    places = {place: verdict for place, verdict in memory.items() if verdict}
    return why_not_clean(decided, places, released, ailments, unseen_ok=boolean(unseen_ok))


class FilterModule:
    """Filters of the role gpu_clean."""

    def filters(self) -> dict[str, Any]:
        return {
            "gpu_clean_plan": gpu_clean_plan,
            "gpu_clean_table": gpu_clean_table,
            "gpu_clean_reasons": gpu_clean_reasons,
            "gpu_clean_units": disposable_units,
            "gpu_memory_verdict": gpu_memory_verdict,
        }
