"""When a router is ready: it took every server, and a completion came through it. Nothing here touches a machine."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from .readiness import Answer
from .redact import redact
from .router import Replica, healthy, problem_of

TAIL = 15
# It colours its log, whoever reads it.
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass
class RouterLook:
    """One look at a router. What was not tried is None."""

    replicas: Sequence[Replica]
    active: str = "inactive"
    """The supervisor's ActiveState."""
    status: int | None = None
    """Exit status of the last end, where there was one."""
    log: str = ""
    port: int = 0
    owner: str | None = None
    """Who listens on the port: None is nobody, "ours" is a process of the unit, else a description of the other."""
    workers: Answer | None = None
    replies: dict[str, Answer] = field(default_factory=dict)
    """What the servers that the router does not use say when they are asked past it: name → answer."""
    completion: Answer | None = None
    """A completion through the router."""
    tokens: int = 0
    """How many tokens it asked for."""


@dataclass
class RouterVerdict:
    """`state` is working, done or failed; `marker` changes exactly when there is progress."""

    state: str
    progress: str
    marker: str
    cause: str | None = None
    remedy: str | None = None
    tail: list[str] = field(default_factory=list)
    if_stalled: str | None = None


def judge(look: RouterLook) -> RouterVerdict:
    """What one look means."""
    if look.active not in ("active", "activating"):
        status = "" if look.status is None else f" with exit status {look.status}"
        tail = [redact(_COLOUR.sub("", line)) for line in look.log.splitlines() if line.strip()][-TAIL:]
        return _failed(
            f"The router is {look.active}: it ended{status}",
            "Its last lines say why; sglang_router_args are its own flags.",
            tail,
        )
    if look.owner is None:
        return RouterVerdict("working", "the router starts", "starts", if_stalled="Read the router's log.")
    if look.owner != "ours":
        return _failed(
            f"Port {look.port} is taken by {look.owner}", "End that process, or set another sglang_router_port."
        )
    if look.workers is None or look.workers.status != 200:
        why = _said(look.workers)
        return RouterVerdict(
            "working", f"the router's list of servers: {why}", f"list|{why}", if_stalled="Read the router's log."
        )
    used = healthy(look.workers.body)
    missing = [one for one in look.replicas if one["url"] not in used]
    if missing:
        names = ", ".join(one["name"] for one in missing)
        whys = [
            problem_of(one, look.replies[one["name"]])
            or f"{one['name']} ({one['url']}) answers itself; the router's log says why it was not taken."
            for one in missing
            if one["name"] in look.replies
        ]
        count = f"{len(look.replicas) - len(missing)} of {len(look.replicas)} servers taken"
        return RouterVerdict("working", f"{count}, not {names}", f"taken|{names}", if_stalled=" ".join(whys) or None)
    taken = f"{len(look.replicas)} of {len(look.replicas)} servers taken"
    if look.completion is None:
        return RouterVerdict("working", taken, "taken")
    if look.completion.status != 200:
        why = _said(look.completion)
        return RouterVerdict(
            "working",
            f"{taken}; a completion through the router: {why}",
            f"completion|{why}",
            if_stalled="Ask the servers themselves (playbooks/status.yml), and read the router's log.",
        )
    got = _tokens(look.completion.body)
    if got != look.tokens:
        return _failed(
            f"A completion through the router has {got} tokens instead of {look.tokens}",
            "Ask the servers themselves (playbooks/status.yml).",
        )
    return RouterVerdict("done", f"{taken}, and a completion came through the router", "done")


def _failed(cause: str, remedy: str, tail: list[str] | None = None) -> RouterVerdict:
    return RouterVerdict("failed", cause, f"failed|{cause}", cause, remedy, tail or [])


def _said(answer: Answer | None) -> str:
    if answer is None:
        return "not asked"
    return redact(answer.problem or f"HTTP {answer.status}")


def _tokens(body: Any) -> int | None:
    usage = body.get("usage") if isinstance(body, dict) else None
    count = usage.get("completion_tokens") if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None
