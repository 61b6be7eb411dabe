"""When a server is ready: a ladder whose last rung is an answer, and where the last state wins.

Nothing here touches a machine. `server_probe` looks, fills in a `Look`, and `judge` says what it means.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from .readiness_diagnosis import LOST_PEER, Exit, death_line, diagnose, notices, stalled
from .readiness_log import start_progress, warnings
from .redact import redact


@dataclass(frozen=True)
class Answer:
    """What an HTTP request came to: `status` is None where there was no answer, and `problem` says why."""

    status: int | None = None
    body: Any = None
    problem: str | None = None
    seconds: float | None = None


@dataclass
class Look:
    """One look at a starting server. A rung that was not tried is None."""

    active: str = "inactive"
    """systemd's ActiveState."""
    restarts: int = 0
    end: Exit = field(default_factory=Exit)
    log: str = ""
    kernel: str = ""
    """The kernel's log since the start, where it can be read and matters."""
    elapsed: float = 0.0
    """Seconds since the server's process was started."""
    port: int = 0
    owner: str | None = None
    """Who listens on the port: None is nobody, "ours" is a process of the unit, else a description of the other."""
    health: Answer | None = None
    models: list[str] = field(default_factory=list)
    expected_model: str | None = None
    short: Answer | None = None
    short_tokens: int = 0
    """How many tokens the short completion asked for."""
    long: Answer | None = None
    long_tokens: int = 0
    """The least number of prompt tokens that the long completion must report."""
    watched: bool = False
    """Whether this look is at a start that is known to have been made."""
    rank: int = 0
    """Of the guest in a server over several: all but the first answer nothing, and live as long as it does."""


@dataclass
class Verdict:
    """`state` is working, done or failed; `marker` changes exactly when there is progress."""

    state: str
    phase: str
    progress: str
    marker: str
    cause: str | None = None
    remedy: str | None = None
    evidence: str | None = None
    tail: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    facts: dict[str, float] = field(default_factory=dict)
    if_stalled: str | None = None
    """What to do if nothing more comes, for a start that is at work."""
    peer_lost: bool = False
    """Whether the failure is only the consequence of another rank's."""


def judge(look: Look) -> Verdict:
    """What one look means. A dead or dying server is failed although its port, its health or its log say otherwise."""
    start = start_progress(look.log)
    said = f"{start.phase}{': ' + start.detail if start.detail else ''}"
    marker = f"{start.phase}|{start.detail}|{start.news}"
    said_besides = [*warnings(start), *notices(look.log)]

    def working(phase: str, sentence: str, mark: str = "") -> Verdict:
        what_if = stalled(look.log, "no news").remedy if look.log and phase == start.phase else None
        return Verdict(
            "working", phase, sentence, f"{marker}|{mark}", warnings=said_besides, facts=start.facts, if_stalled=what_if
        )

    def failed(
        phase: str, cause: str, remedy: str, evidence: str = "", tail: list[str] | None = None, lost: bool = False
    ) -> Verdict:
        return Verdict(
            "failed", phase, said, marker, redact(cause), redact(remedy), redact(evidence), tail or [],
            said_besides, start.facts, peer_lost=lost,
        )  # fmt: skip

    dying = death_line(look.log)
    if look.active in ("failed", "inactive", "deactivating") or dying:
        end = look.end
        if look.active == "inactive" and end.code is None:
            if not look.watched and not look.log:
                return failed("unit", "the unit is not running and nobody started it", "Start it first.")
            # A supervisor forgets a unit that ended well; "failed" is what it would call any other end.
            end = replace(end, code="exited", status=0)
        found = diagnose(look.log, end, look.kernel)
        lost = found.name == LOST_PEER
        return failed(start.phase, found.cause, found.remedy, found.evidence or dying or "", found.tail, lost)
    if look.restarts > 0:
        found = diagnose(look.log, look.end, look.kernel)
        return failed(
            "unit",
            f"the unit has restarted {look.restarts} time(s) since it was started: it crashes in a loop",
            f"Stop it and read why: {found.cause}. {found.remedy}",
            found.evidence,
        )
    if look.owner is None:
        return working(start.phase, said)
    if look.owner != "ours":
        return failed(
            "port",
            f"port {look.port} is held by another process ({look.owner}), so whatever answers there is not this server",
            "Stop that process or choose another sglang_server_port.",
        )
    if look.rank:
        return working("the first guest", f"rank {look.rank} is up; waiting for the first guest to answer", "up")
    if look.health is None or look.health.status != 200:
        # Health generates a token and says 503 while starting and during long prefills: slow is not dead.
        what = "no answer yet" if look.health is None else _said(look.health)
        return working("health", f"listening; health: {what}", "health")
    if look.expected_model and look.expected_model not in look.models:
        return failed(
            "model",
            f"the server on port {look.port} serves {', '.join(look.models) or 'no model'}, not {look.expected_model}",
            "Compare served_model_name and model_path of the mode with what is running.",
        )
    for name, answer, check in (
        ("completion", look.short, _short_problem(look)),
        ("long prompt", look.long, _long_problem(look)),
    ):
        if answer is None:
            return working(name, f"healthy; waiting for a {name} to be answered", name)
        if answer.status is None or answer.status >= 500:
            return working(name, f"healthy, but a {name} is not answered yet: {_said(answer)}", name)
        if check:
            return failed(
                name,
                f"the server answers, but wrongly: {check}",
                "Compare model, tokenizer, chat template and attention backend with a setup that works.",
                str(answer.body)[:300],
            )
    sentence = f"ready: answered a completion and a long prompt after {look.elapsed:.0f} s"
    return Verdict("done", "ready", sentence, f"{marker}|ready", warnings=said_besides, facts=start.facts)


def _said(answer: Answer) -> str:
    return answer.problem or f"HTTP {answer.status}"


def completion_problem(answer: Answer, tokens: int | None = None) -> str | None:
    """What is wrong with an answer to /v1/completions, as a sentence part; None where nothing is."""
    body = answer.body
    if answer.status != 200:
        return f"HTTP {answer.status}: {str(body)[:200]}"
    if not isinstance(body, dict) or body.get("error"):
        return f"an error instead of a completion: {str(body)[:200]}"
    choices = body.get("choices") or [{}]
    if not str(choices[0].get("text") or "").strip():
        return "the text is empty"
    counted = (body.get("usage") or {}).get("completion_tokens")
    if not isinstance(counted, int):
        return "usage reports no completion_tokens"
    stopped = choices[0].get("finish_reason") == "stop"
    if tokens is not None and counted != tokens and not (stopped and 0 < counted < tokens):
        return f"usage reports {counted} completion tokens where {tokens} were asked for"
    return None


def _short_problem(look: Look) -> str | None:
    if look.short is None:
        return None
    problem = completion_problem(look.short, look.short_tokens)
    if problem:
        return problem
    model = look.short.body.get("model")
    if look.models and model not in look.models:
        return f"the completion comes from model {model}, the server lists {', '.join(look.models)}"
    return None


def _long_problem(look: Look) -> str | None:
    if look.long is None:
        return None
    problem = completion_problem(look.long)
    if problem:
        return problem
    prompt = (look.long.body.get("usage") or {}).get("prompt_tokens")
    if not isinstance(prompt, int) or prompt < look.long_tokens:
        return f"usage reports {prompt} prompt tokens where at least {look.long_tokens} were sent"
    return None
