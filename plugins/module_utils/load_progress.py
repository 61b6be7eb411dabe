"""Say how a running load client stands, from its progress.json and the state of the systemd unit that runs it.

Pure: what was read goes in, the verdict comes out. The unit says whether the client lives, progress.json how far it is;
the exit status decides at the end, because a client that was killed cannot write that it failed.
"""

from __future__ import annotations

import json
from typing import Any

EVERY_LEVEL_VALID, WRONG_USAGE, SOME_LEVEL_INVALID, NOT_STARTED = 0, 2, 3, 4
LIVING = ("active", "activating", "reloading", "deactivating")
EXITED = ("1", "exited")  # ExecMainCode, as a number or as systemd's word


def read_progress(text: str | None) -> dict[str, Any] | None:
    """The content of progress.json; None when there is none yet or it is not one."""
    try:
        record = json.loads(text or "")
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("state"), str) else None


def judge(name: str, unit: dict[str, str], record: dict[str, Any] | None) -> dict[str, Any]:
    """state (working, done, failed), phase, progress, marker, cause, remedy, valid.

    `unit`: properties of the unit `name` as `systemctl show` gives them; `record`: its progress.json, or None. `valid`
    is True when every level is, False when some level is not, None while that is not known.
    """
    record = record or {}
    verdict = {
        "state": "working",
        "phase": str(record.get("phase") or "starting"),
        "progress": str(record.get("sentence") or "the client starts"),
        "marker": f"{unit.get('InvocationID', '')}:{record.get('marker') or 'no progress yet'}",
        "cause": None,
        "remedy": None,
        "valid": None,
    }
    if unit.get("ActiveState") in LIVING:
        return verdict
    status = _exit_status(unit)
    if status is None and unit.get("ExecMainCode", "0") in ("", "0") and record.get("state") == "done":
        # A transient unit that ended well is forgotten by systemd at once.
        status = EVERY_LEVEL_VALID if record.get("valid") else SOME_LEVEL_INVALID
    if status in (EVERY_LEVEL_VALID, SOME_LEVEL_INVALID) and record.get("state") == "done":
        return verdict | {"state": "done", "valid": status == EVERY_LEVEL_VALID}
    cause, remedy = _failure(name, unit, record, status)
    return verdict | {"state": "failed", "cause": cause, "remedy": remedy}


def _exit_status(unit: dict[str, str]) -> int | None:
    if unit.get("ExecMainCode") not in EXITED:
        return None
    status = unit.get("ExecMainStatus", "")
    return int(status) if status.isdigit() else None


def _failure(name: str, unit: dict[str, str], record: dict[str, Any], status: int | None) -> tuple[str, str]:
    log = f"read journalctl -u {name}"
    if status == NOT_STARTED or record.get("state") == "failed":
        why = record.get("cause") or "it did not say why"
        return f"The load client could not start: {why}", f"see that the server runs and is the one expected; {log}"
    if status == WRONG_USAGE:
        return "The load client was called with options that it refuses.", log
    if unit.get("Result") == "oom-kill":
        return "The load client was killed because memory ran out.", "give the guest more memory or use smaller levels"
    if status is not None:
        return f"The load client ended with status {status} before it was done.", log
    if unit.get("ExecMainCode", "0") not in ("", "0"):
        number = unit.get("ExecMainStatus", "?")
        return f"The load client was killed by signal {number}.", f"find out who did it, or whether it crashed: {log}"
    if not record:
        return f"There is no running unit {name} and no progress: the load client was never started.", log
    return f"The unit {name} is gone and the load client had not finished.", log
