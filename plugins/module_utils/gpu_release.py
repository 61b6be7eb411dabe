"""Make exactly the given processes go: SIGTERM, a grace period, SIGKILL.

A PID may be another process by the time it is signalled. So each is pinned by a pidfd first, and its start time and
cgroup are compared after that: from then on the signal reaches the process that was judged, or nobody.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .fuser import HOLDERS, fuser
from .gpu_holders import OWN, ancestors, cgroup_of, guest_of, start_time
from .gpu_stuck import stuck

EXITED = "exited"  # after SIGTERM
KILLED = "killed"  # after SIGKILL
GONE = "gone before"
STILL = "still there"
REFUSED = "refused"
WOULD = "would be released"


@dataclass
class _Target:
    holder: Mapping[str, Any]
    pidfd: int
    outcome: str = STILL
    detail: str = ""

    @property
    def pid(self) -> int:
        return int(self.holder["pid"])


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:  # noqa: PTH123
            return file.read()
    except OSError:
        return ""


def _refusal(holder: Mapping[str, Any], own: Iterable[int], vmid: int | None, prefixes: Sequence[str]) -> str | None:
    """Why the process that has this PID *now* must not be signalled, or None."""
    pid = int(holder["pid"])
    if pid == 1:
        return "the machine's first process is never signalled"
    if pid in own:
        return OWN
    if holder.get("protected"):
        return str(holder["protected"])
    cgroup = cgroup_of(_text(f"/proc/{pid}/cgroup"))
    if vmid is not None and guest_of(cgroup) != vmid:
        return f"its cgroup {cgroup} is not one of guest {vmid}"
    if prefixes and not any(cgroup == p.rstrip("/") or cgroup.startswith(p.rstrip("/") + "/") for p in prefixes):
        return f"its cgroup {cgroup} is outside {', '.join(prefixes)}"
    return None


def _row(holder: Mapping[str, Any], outcome: str, detail: str = "") -> dict[str, Any]:
    return {"pid": int(holder["pid"]), "command": holder.get("command", ""), "outcome": outcome, "detail": detail}


def _pin(
    holders: Iterable[Mapping[str, Any]], vmid: int | None, prefixes: Sequence[str]
) -> tuple[list[_Target], list[dict[str, Any]]]:
    """Hold each process fast; (those that may be signalled, rows about the others)."""
    targets: list[_Target] = []
    rows: list[dict[str, Any]] = []
    own = ancestors(os.getpid())
    for holder in holders:
        try:
            pidfd = os.pidfd_open(int(holder["pid"]))
        except ProcessLookupError:
            rows.append(_row(holder, GONE))
            continue
        except OSError as error:
            rows.append(_row(holder, REFUSED, f"it cannot be addressed: {error.strerror}"))
            continue
        if start_time(int(holder["pid"])) != int(holder["start_time"]):
            os.close(pidfd)
            rows.append(_row(holder, GONE, "its PID belongs to another process now"))
        elif reason := _refusal(holder, own, vmid, prefixes):
            os.close(pidfd)
            rows.append(_row(holder, REFUSED, reason))
        else:
            targets.append(_Target(holder, pidfd))
    return targets, rows


def _wait(targets: Sequence[_Target], seconds: float, outcome: str) -> None:
    """Give the targets that are still there time to exit, and note `outcome` for those that do."""
    waiting = {target.pidfd: target for target in targets if target.outcome == STILL}
    poll = select.poll()
    for pidfd in waiting:
        poll.register(pidfd, select.POLLIN)
    deadline = time.monotonic() + seconds
    while waiting:
        left = deadline - time.monotonic()
        for pidfd, _ in poll.poll(max(0, int(left * 1000))):
            waiting.pop(pidfd).outcome = outcome
            poll.unregister(pidfd)
        if left <= 0:
            break


def _signal(targets: Sequence[_Target], number: signal.Signals, nodes: Sequence[str], notes: list[str]) -> None:
    """Signal the targets still there: by `fuser -k` on `nodes` where it would find nobody else, else one by one."""
    remaining = [target for target in targets if target.outcome == STILL]
    if nodes and remaining:
        seen = fuser(nodes)
        strangers = sorted(set(seen.pids) - {target.pid for target in remaining})
        if seen.outcome == HOLDERS and not strangers:
            answer = fuser(nodes, number.name.removeprefix("SIG"))
            if answer.outcome == HOLDERS:
                notes.append(f"fuser -k -{number.name.removeprefix('SIG')}: {', '.join(map(str, answer.pids))}")
                # Who holds a node that fuser cannot see (another inode, a mapping) still has to be told.
                remaining = [target for target in remaining if target.pid not in answer.pids]
        else:
            why = (
                f"PID {', '.join(map(str, strangers))} is not to be released" if strangers else seen.detail or "nobody"
            )
            notes.append(f"fuser not used ({why}); signalled one by one")
    for target in remaining:
        with contextlib.suppress(ProcessLookupError):
            try:
                signal.pidfd_send_signal(target.pidfd, number)
            except PermissionError:
                target.detail = "not permitted to signal it"


def release(
    holders: Sequence[Mapping[str, Any]],
    grace: float = 10.0,
    kill_wait: float = 5.0,
    vmid: int | None = None,
    cgroup_prefixes: Sequence[str] = (),
    nodes: Sequence[str] = (),
    dry_run: bool = False,
) -> dict[str, Any]:
    """Make `holders` (as `gpu_holders` returned them: pid, start_time, …) go.

    `grace` seconds lie between SIGTERM and SIGKILL, `kill_wait` seconds are waited after that. With `vmid` or
    `cgroup_prefixes` a process outside is refused. `nodes` are device nodes to sweep with `fuser -k`; to be given only
    where everyone who holds them may be killed, which is checked again before each sweep.

    → {"results": [{pid, command, outcome, detail}], "signalled": how many were, "notes": [sentence, …]};
    outcome is exited, killed, gone before, refused, still there, or would be released (dry run).
    """
    targets, rows = _pin(holders, vmid, cgroup_prefixes)
    notes: list[str] = []
    try:
        if dry_run:
            rows += [_row(target.holder, WOULD) for target in targets]
            return {"results": rows, "signalled": len(targets), "notes": notes}
        _signal(targets, signal.SIGTERM, nodes, notes)
        _wait(targets, grace, EXITED)
        _signal(targets, signal.SIGKILL, nodes, notes)
        _wait(targets, kill_wait, KILLED)
        for target in targets:
            if target.outcome == STILL and not target.detail:
                target.detail = stuck(target.pid)
            rows.append(_row(target.holder, target.outcome, target.detail))
    finally:
        for target in targets:
            os.close(target.pidfd)
    return {"results": rows, "signalled": len(targets), "notes": notes}
