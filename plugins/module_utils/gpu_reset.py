"""Reset a GPU with nvidia-smi, and say why where it refuses.

Persistence mode is a client of the card like any other, and the driver refuses to reset a card that has a client. So it
is switched off for this one card and this one moment; nvidia-persistenced, which keeps it on many nodes, then lets go.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from .gpu_holders import is_listed
from .nvidia_smi import run_bounded

Ask = Callable[[Sequence[str], float], tuple[int, str, str] | None]

PERSISTENCED = ("nvidia-persistenced",)
# What nvidia-smi says (releases 535 to 580), in the order in which it is looked for, and what a person does then.
_REFUSALS = (
    (r"primary GPU", "the node's console is on it: reboot the node"),
    (r"in use by|being used by", "the kernel itself uses it (nvidia_drm with modeset=1, a display): reboot the node"),
    (
        r"not supported",
        "it cannot be reset by itself here (an active NVLink, a virtual machine): reboot the node",
    ),
    (r"insufficient permissions", "only root on the node may reset it, not a guest"),
)


def why_not(seen: Mapping[str, Any], minors: Collection[int]) -> str | None:
    """Why cards must not be reset, from what gpu_holders.scan() saw of the node; None: nobody has one of them open."""
    for holder in seen["holders"]:
        if is_listed([holder["name"]], PERSISTENCED):
            continue
        # A process with nvidiactl alone may be about to open any card.
        if not holder["gpus"] or set(minors) & set(holder["gpus"]):
            where = f"guest {holder['vmid']}" if holder["vmid"] is not None else "the node"
            return f"PID {holder['pid']} ({holder['name']}) of {where} has it open; stop that first"
    if seen["unreadable"]:
        one = seen["unreadable"][0]
        return f"PID {one['pid']} ({one['name']}) could not be looked at, so nobody can say that it holds no GPU"
    return None


def reset(uuid: str, timeout: float, ask: Ask = run_bounded) -> tuple[str, str]:
    """("reset" or "failed", what nvidia-smi said and what a person does then). Persistence mode is as before."""
    try:
        answer = ask(["nvidia-smi", "--query-gpu=persistence_mode", "--format=csv,noheader", "-i", uuid], timeout)
    except (FileNotFoundError, PermissionError):
        return "failed", "nvidia-smi is not installed here"
    persistent = answer is not None and answer[1].strip() == "Enabled"
    if persistent:
        status, said = _say(["-pm", "0", "-i", uuid], timeout, ask)
        if status != 0:
            return "failed", f"persistence mode, which keeps it in use, could not be switched off: {said}"
    status, said = _say(["--gpu-reset", "-i", uuid], timeout, ask)
    outcome = "reset" if status == 0 else "failed"
    if status not in (0, None):
        remedies = (remedy for pattern, remedy in _REFUSALS if re.search(pattern, said, re.I))
        said = f"nvidia-smi: {said}" + (f" - {remedy}" if (remedy := next(remedies, None)) else "")
    if persistent:
        status, again = _say(["-pm", "1", "-i", uuid], timeout, ask)
        if status != 0:
            said += f"; its persistence mode is off now: run `nvidia-smi -pm 1 -i {uuid}` on the node ({again})"
    return outcome, said


def _say(options: list[str], timeout: float, ask: Ask) -> tuple[int | None, str]:
    answer = ask(["nvidia-smi", *options], timeout)
    if answer is None:
        return None, f"nvidia-smi did not answer within {timeout:g} s; only a reboot of the node is left"
    status, out, err = answer
    return status, " ".join((out + err).split())[:300] or f"exit status {status}"
