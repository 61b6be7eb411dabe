"""Which holders of a guest's GPUs may be released, and what to tell a person about the others.

Pure: two scans in (`gpu_holders` on the guest and, where there is one, on its node), a decision out. The rule that
nothing may bend: a process on the protect list, of this connection, of another guest or of the node itself is never
among those to release.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

from .gpu_holders import LISTED, STOPPED, inside_guest
from .gpu_stuck import respawned

RELEASE, TOLERATE, REFUSE = "release", "tolerate", "refuse"
SERVE = "serve"
# Servers that nobody uses, and why: started by a benchmark or by the proof at the end of site.yml, or stopped already.
_DISPOSABLE = {"bench": "by a benchmark", "prove": "by a proof", STOPPED: "by a server that was stopped"}
# Where the system's own units are, seen from inside a guest or from its node; nobody but root makes anything there.
_SYSTEM = re.compile(r"(?:/ns)?/(?:system|servelab)\.slice/([^/]+)(?:/|$)")
# Units that carry what people start in them. Stopping one to get rid of a process would be bad advice.
_CARRIERS = re.compile(r"(sshd?|cron|crond|atd|docker|containerd|podman|user@\d+|getty@\w+|console-getty)\.service")


# nvidia-cuda-mps-control and -server, as the kernel cuts them.
_MPS = re.compile(r"nvidia-cuda-mps.*")


class UnknownHolders(ValueError):
    """A scan that did not happen: who holds the GPUs is unknown, which is not "nobody"."""


def _check(scan: Mapping[str, Any], where: str) -> None:
    if scan.get("skipped") or scan.get("failed") or "holders" not in scan or "complete" not in scan:
        raise UnknownHolders(f"the holders of the GPUs on the {where} are unknown: the scan was skipped or failed")


def is_disposable(holder: Mapping[str, Any], owners: Mapping[str, str]) -> bool:
    """Whether a holder belongs to a unit of ours that nobody uses: by the cgroup of a system unit, or by its record."""
    if holder.get("supervised"):
        return owners.get(str(holder["unit"])) in _DISPOSABLE
    found = _SYSTEM.match(inside_guest(str(holder["cgroup"])))
    return found is not None and owners.get(found[1]) in _DISPOSABLE


def _judge_own(holder: Mapping[str, Any], owners: Mapping[str, str], force: bool) -> tuple[str, str]:
    """Verdict and what to do, for a process of the run's own guest."""
    protected = holder["protected"]
    if protected and str(protected).startswith(LISTED):
        return TOLERATE, f"{protected}; may stay as long as it needs no memory"
    if protected:
        return REFUSE, f"{protected}: close the device there and run again"
    if is_disposable(holder, owners):
        return RELEASE, f"left behind {_DISPOSABLE[owners[holder['unit']]]}"
    if force:
        return RELEASE, "gpu_clean_force is set"
    if _MPS.fullmatch(str(holder["name"])):
        return REFUSE, (
            "the MPS daemon keeps a context for its clients: end those, then `echo quit | nvidia-cuda-mps-control` "
            f"as {holder['user']}, or set gpu_clean_force=true"
        )
    unit = holder["unit"]
    if owners.get(unit) == SERVE:
        return REFUSE, f"a server in use: `{holder.get('stop') or f'systemctl stop {unit}'}`, or set bench_stop_ok=true"
    owned = unit and str(unit).endswith(".service") and not _CARRIERS.fullmatch(str(unit))
    stop = f"`{holder.get('stop') or f'systemctl stop {unit}'}`" if owned else f"`kill {holder['pid']}`"
    return REFUSE, f"not started by a benchmark: {stop}, or set gpu_clean_force=true"


def _judge_foreign(holder: Mapping[str, Any], gpus: Iterable[int]) -> tuple[str, str]:
    """Verdict for a process of another guest, or of the node itself. Never "release"."""
    if not set(holder["gpus"]) & set(gpus):
        return TOLERATE, "uses none of this guest's GPUs"
    protected = holder["protected"]
    if protected and str(protected).startswith(LISTED):
        return TOLERATE, f"{protected}; may stay as long as it needs no memory"
    if holder["vmid"] is None:
        return REFUSE, "runs on the node itself: stop it there"
    return REFUSE, f"belongs to guest {holder['vmid']}: stop it there, or give the guests different GPUs"


def plan(
    guest: Mapping[str, Any],
    node: Mapping[str, Any] | None = None,
    vmid: int | None = None,
    force: bool = False,
) -> dict[str, Any]:
    """Decide about every holder of the guest's GPUs.

    `guest` and `node` are results of the module gpu_holders; `guest["owners"]` says who started the units. Without a
    node the guest decides alone; holders of nested guests found there are foreign.

    → {"holders": every holder once, each with `verdict` and `action` (and `node_pid`),
       "release": those to release in the guest, "release_on_node": those of the guest that only the node sees,
       "refuse": those a person must decide about, "tolerate": those that may stay,
       "blocking": how many must go before the cards are clean,
       "sweep": True when everyone whom `fuser` would find in the guest may be released,
       "complete": False when a process could not be looked at, "unreadable": which ones,
       "view": "node and guest", "node" or "guest"}.

    Raises UnknownHolders when a scan did not happen.
    """
    _check(guest, "guest")
    owners: Mapping[str, str] = guest.get("owners") or {}
    judged: list[dict[str, Any]] = []
    unseen: dict[tuple[int, int], Mapping[str, Any]] = {}
    if node is not None:
        _check(node, "node")
        if vmid is None:
            raise UnknownHolders("without the guest's vmid its processes cannot be told from other guests' on the node")
        for holder in node["holders"]:
            if holder["vmid"] == vmid:
                # The second PID is the one in the guest's own namespace, also for a process in a container within.
                inner = holder["ns_pids"][1] if len(holder["ns_pids"]) > 1 else holder["pid"]
                unseen[inner, holder["start_time"]] = holder
            else:
                verdict, action = _judge_foreign(holder, guest["gpus"])
                judged.append({**holder, "pid": None, "node_pid": holder["pid"], "verdict": verdict, "action": action})
    for holder in guest["holders"]:
        twin = unseen.pop((holder["pid"], holder["start_time"]), None)
        # Protected in either view is protected: the guest knows its own connection, the node may know a name better.
        merged = {**holder, "protected": holder["protected"] or (twin["protected"] if twin else None)}
        if holder["vmid"] not in (None, vmid):
            verdict, action = _judge_foreign(merged, guest["gpus"])
        else:
            verdict, action = _judge_own(merged, owners, force)
        judged.append({**merged, "node_pid": twin["pid"] if twin else None, "verdict": verdict, "action": action})
    for holder in unseen.values():
        verdict, action = _judge_own(holder, owners, force)
        judged.append({**holder, "pid": None, "node_pid": holder["pid"], "verdict": verdict, "action": action})

    def those(verdict: str) -> list[dict[str, Any]]:
        return [holder for holder in judged if holder["verdict"] == verdict]

    release = those(RELEASE)
    in_guest = [holder for holder in judged if holder["pid"] is not None]
    return {
        "holders": judged,
        "release": [holder for holder in release if holder["pid"] is not None],
        "release_on_node": [{**holder, "pid": holder["node_pid"]} for holder in release if holder["pid"] is None],
        "refuse": those(REFUSE),
        "tolerate": those(TOLERATE),
        "blocking": len(release) + len(those(REFUSE)),
        "sweep": bool(in_guest) and all(holder["verdict"] == RELEASE for holder in in_guest),
        # The node sees everything, so what the guest may not look at does not matter there.
        "complete": bool((guest if node is None else node)["complete"]),
        "unreadable": list((guest if node is None else node).get("unreadable") or []),
        "view": str(guest["view"]) if node is None else "node and guest",
    }


def disposable_units(owners: Mapping[str, str]) -> list[str]:
    """The units that may be stopped without asking anybody."""
    return sorted(unit for unit, owner in owners.items() if owner in _DISPOSABLE)


def gpu_ranges(gpus: Iterable[int]) -> str:
    """[0, 1, 2, 5] → "0-2,5"; [] → "-"."""
    parts: list[list[int]] = []
    for gpu in sorted(gpus):
        if parts and gpu == parts[-1][-1] + 1:
            parts[-1].append(gpu)
        else:
            parts.append([gpu])
    return ",".join(str(p[0]) if len(p) == 1 else f"{p[0]}-{p[-1]}" for p in parts) or "-"


def _who(holder: Mapping[str, Any], vmid: int | None) -> str:
    guest = holder["vmid"] if holder["vmid"] is not None else vmid if holder["pid"] is not None else None
    place = f"guest {guest}" if guest is not None else "node" if holder["pid"] is None else "here"
    return f"{place}, {holder['user']}" + (f", {holder['unit']}" if holder["unit"] else "")


def table(decided: Mapping[str, Any], vmid: int | None = None) -> str:
    """The holders of a plan for people: who, which GPUs, since when, and below each line what to do."""
    if not decided["holders"]:
        return "nobody holds a GPU"
    head = ["PID", "PID ON NODE", "WHO", "GPUS", "SINCE (UTC)", "STATE", "COMMAND"]
    rows = [
        [
            str(holder["pid"] or "-"),
            str(holder["node_pid"] or "-"),
            _who(holder, vmid),
            gpu_ranges(holder["gpus"]) if holder["gpus"] else ",".join(holder["devices"]),
            holder["since"].replace("T", " ").rstrip("Z"),
            holder["state"],
            holder["command"][:60],
        ]
        for holder in decided["holders"]
    ]
    widths = [max(len(row[column]) for row in [head, *rows]) for column in range(len(head))]

    def line(cells: list[str]) -> str:
        return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()

    lines = [line(head)]
    for holder, row in zip(decided["holders"], rows, strict=True):
        lines += [line(row), f"    {holder['verdict']}: {holder['action']}"]
    return "\n".join(lines)


def _ailing(ailments: Mapping[str, Any]) -> list[str]:
    """What the node knows about its sick cards and its dead processes."""
    said = [
        f"GPU at {one['bus_id']}: {one['cause']} ({one['text']}): {one['remedy']}" for one in ailments.get("xids", ())
    ]
    said += [f"GPU at {one['bus_id']}: {one['cause']}: {one['remedy']}" for one in ailments.get("memory_errors", ())]
    for one in ailments.get("zombies", ()):
        said.append(
            f"PID {one['pid']} ({one['name']}) is dead, and its parent PID {one['ppid']} ({one['parent']}) lives and "
            "does not collect it: stop the parent"
        )
    if ailments.get("log_readable") is False:
        said.append("the kernel's log could not be read, so whether the driver reported Xid is unknown")
    return said


def _unexplained(tolerated: Iterable[Mapping[str, Any]]) -> str:
    leaked = (
        "the driver has not given it back: gpu_clean_reset_ok=true lets this role reset the GPU where nobody holds it; "
        "else a reboot of the node frees it"
    )
    names = sorted({str(holder["name"]) for holder in tolerated if holder["gpus"]})
    if names:
        return (
            f"only programs that may stay are on the GPUs ({', '.join(names)}): one of them uses this memory "
            f"(stop it, or name it in gpu_clean_unprotect), or {leaked}"
        )
    return f"nobody holds the GPUs, so {leaked}"


def why_not_clean(
    decided: Mapping[str, Any],
    memory: Mapping[str, Mapping[str, Any]],
    released: Iterable[Mapping[str, Any]] = (),
    ailments: Mapping[str, Any] | None = None,
    *,
    unseen_ok: bool = False,
) -> list[str]:
    """What keeps the GPUs from being proved clean, a sentence each; empty when nothing does.

    `memory` maps a place ("guest", "node") to its verdict (nvidia_smi.memory_verdict); `released`: results of the
    module gpu_release; `ailments`: what the module gpu_ailments found on the node. Neither is a reason by itself. With
    `unseen_ok` processes that could not be looked at are no reason.
    """
    reasons: list[str] = []
    if decided["blocking"]:
        reasons.append(f"{decided['blocking']} process(es) hold the GPUs")
    if not decided["complete"] and not unseen_ok:
        some = ", ".join(f"PID {one['pid']} ({one['name']})" for one in decided["unreadable"][:5])
        reasons.append(
            f"some processes could not be looked at{', as ' + some if some else ''}, so nobody can say they hold no "
            "GPU: run as root, or name in gpu_clean_protect what may stay"
            + ("" if decided["view"] == "node and guest" else ", or set pve_node so that the node looks too")
        )
    for place, verdict in memory.items():
        if verdict["clean"] is True:
            continue
        reasons += [f"on the {place}: {reason}" for reason in verdict["reasons"]]
        if verdict["clean"] is False and not decided["blocking"]:
            reasons.append(_unexplained(decided["tolerate"]))
    if reasons:
        reasons += respawned((holder for holder in decided["holders"] if holder["verdict"] != TOLERATE), released)
        reasons += _ailing(ailments or {})
    return list(dict.fromkeys(reasons))
