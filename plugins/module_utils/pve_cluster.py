"""What a cluster says about a guest: whether /etc/pve can be written, and whether HA looks after the guest."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HaState", "ha_state", "unwritable"]

PVE = Path("/etc/pve")


@dataclass(frozen=True)
class HaState:
    """wanted: what HA was told (started, stopped, disabled, ignored); state: what it is about ("" where unknown)."""

    wanted: str
    state: str = ""

    @property
    def notice(self) -> str:
        return (
            f"HA manages this guest (it is to be {self.wanted}): pct's start and stop are requests to it, and it may "
            "move the guest to another node, where pve_node has to follow."
        )


def unwritable(pve: Path = PVE) -> str | None:
    """A sentence if nothing can be written to /etc/pve now; None if it can, as far as that is to be seen.

    Without quorum /etc/pve looks as always and refuses every write.
    """
    try:
        members = json.loads((pve / ".members").read_text(encoding="utf-8"))
        cluster = members.get("cluster") or {}
    except (OSError, ValueError, AttributeError):
        cluster = {}
    if cluster and str(cluster.get("quorate", 1)) == "0":
        online = [name for name, node in (members.get("nodelist") or {}).items() if str(node.get("online")) == "1"]
        return (
            f"The cluster {cluster.get('name', '')} has no quorum ({len(online) or '?'} of {cluster.get('nodes', '?')} "
            "nodes online), so /etc/pve cannot be written and no guest be changed or started; bring its nodes back "
            "(`pvecm status`)."
        )
    try:
        flags = os.statvfs(pve).f_flag
    except OSError:
        return None
    if flags & os.ST_RDONLY:
        return (
            "/etc/pve is mounted read-only, so nothing can be changed; see `systemctl status pve-cluster` on the node."
        )
    return None


def ha_state(vmid: int, pve: Path = PVE) -> HaState | None:
    """What HA has to do with a container; None where it leaves it alone."""
    try:
        resources = (pve / "ha/resources.cfg").read_text(encoding="utf-8")
    except OSError:
        return None
    section = re.search(rf"^ct:\s*{vmid}[ \t]*$((?:\n[ \t]+.*)*)", resources, re.M)
    if section is None:
        return None
    state = re.search(r"^[ \t]+state[ \t]+(\S+)", section[1], re.M)
    try:
        status = json.loads((pve / "ha/manager_status").read_text(encoding="utf-8"))
        now = str(status["service_status"][f"ct:{vmid}"]["state"])
    except (OSError, ValueError, KeyError, TypeError):
        now = ""
    return HaState(state[1] if state else "started", now)
