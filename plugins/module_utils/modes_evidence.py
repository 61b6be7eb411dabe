"""Did the server do what its mode is for? Judged from its own words, after it is ready.

SGLang swallows the failure of a communicator and goes on with NCCL: the server serves, and only its log knows. A
mode's `probe` holds: path (what is meant to engage), fallback (what a server does instead), must and must_not (an id →
{log: literals, means: what it says when they are missing, or there}), server (a setting as the server resolved it →
its value) and environment (patterns of those of its variables that must have reached the processes that compute). Of
several literals one is enough: releases word things differently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any

from .readiness_log import records
from .redact import redact

_KINDS: dict[str, type] = {
    "path": str,
    "fallback": str,
    "must": dict,
    "must_not": dict,
    "server": dict,
    "environment": list,
}
_WORDS: dict[type, str] = {str: "text", dict: "mapping", list: "list"}
_LINE = 300


@dataclass
class Verdict:
    """`engaged` is None where the mode has no probe. `seen`: the log lines that show it. `reason`: one sentence."""

    engaged: bool | None
    reason: str
    seen: list[str] = field(default_factory=list)
    against: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)


def judge(
    mode: Mapping[str, Any],
    log: str,
    server_info: Mapping[str, Any] | None,
    workers: Mapping[int, Mapping[str, str] | None] | None = None,
) -> Verdict:
    """Hold a mode's probe against the log of one start, the server's own settings (None: it does not tell them) and the
    environment of its schedulers by process id (None: it cannot be read; no `workers`: nobody looked)."""
    probe = mode.get("probe") or {}
    asked = {key: probe.get(key) or {} for key in ("must", "must_not", "server")}
    name, path = mode.get("name", "?"), probe.get("path")
    wanted = _wanted(mode, probe)
    if not any(asked.values()) and not wanted:
        return Verdict(None, f"Mode {name} says nothing about how it would be known to have engaged.")
    lines = [record.text for record in records(log)]
    verdict = Verdict(True, "")
    wrong: list[str] = []
    settings: list[str] = []
    for entry in asked["must_not"].values():
        if (line := _first(lines, entry["log"])) is not None:
            wrong.append(str(entry["means"]))
            verdict.against.append(line)
    for entry in asked["must"].values():
        line = _first(lines, entry["log"])
        if line is not None:
            verdict.seen.append(line)
        elif not verdict.against:
            # With a refusal in the log, what is missing is only its consequence.
            wrong.append(str(entry["means"]))
    for key, value in asked["server"].items():
        if server_info is None or key not in server_info:
            verdict.unknown.append(f"The server does not tell {key}.")
        elif server_info[key] != value:
            settings.append(f"the server runs with {key}={server_info[key]!r}, not {value!r}")
        else:
            verdict.seen.append(f"{key}={value!r}")
    for name_of, value in wanted.items():
        _look_at_workers(name_of, value, workers, settings, verdict)
    if not wrong and not settings:
        verdict.reason = f"{path or name} engaged."
        return verdict
    verdict.engaged = False
    fell = bool(wrong) and probe.get("fallback")
    what = f"Mode {name} fell back to {probe['fallback']}" if fell else f"Mode {name} did not engage"
    verdict.reason = f"{what}: {'; '.join(dict.fromkeys(wrong + settings))}."
    if verdict.against:
        verdict.reason += f" Its log: {verdict.against[0]}"
    return verdict


def _wanted(mode: Mapping[str, Any], probe: Mapping[str, Any]) -> dict[str, str]:
    """The mode's own variables that its probe wants to see in the schedulers."""
    patterns = probe.get("environment") or []
    env = mode.get("env") or {}
    return {
        name: str(value)
        for name, value in env.items()
        if value is not None and any(fnmatchcase(name, pattern) for pattern in patterns)
    }


def _look_at_workers(
    name: str,
    value: str,
    workers: Mapping[int, Mapping[str, str] | None] | None,
    settings: list[str],
    verdict: Verdict,
) -> None:
    if workers is None:
        return
    read = {pid: environ for pid, environ in workers.items() if environ}
    if not read:
        verdict.unknown.append(f"Whether {name} reached the schedulers is not known: their environment cannot be read.")
        return
    others = {pid: environ.get(name) for pid, environ in read.items() if environ.get(name) != value}
    if others:
        pid, found = next(iter(others.items()))
        settings.append(
            f"scheduler {pid} runs without {name}={value}"
            if found is None
            else f"scheduler {pid} runs with {name}={redact(found)}, not {value}"
        )
    else:
        verdict.seen.append(redact(f"{name}={value} in {len(read)} schedulers"))


def _first(lines: Sequence[str], literals: Sequence[str]) -> str | None:
    for line in lines:
        if any(literal in line for literal in literals):
            line = redact(line)
            return line if len(line) <= _LINE else f"{line[:_LINE]} …"
    return None


def check_probe(probe: Mapping[str, Any]) -> list[str]:
    """What is wrong with a `probe` as it stands in its file, without the mode's name."""
    errors = []
    for key, value in probe.items():
        if key not in _KINDS:
            errors.append(f"probe has an unknown key {key!r}; it may have {', '.join(_KINDS)}.")
        elif value is not None and not isinstance(value, _KINDS[key]):
            errors.append(f"probe.{key} is {value!r}, but must be a {_WORDS[_KINDS[key]]}.")
        elif key in ("must", "must_not"):
            entries: Mapping[str, Any] = probe[key] or {}
            errors += [
                f"probe.{key}.{name} must have a list log of texts to look for, and a text means: what they show."
                for name, entry in entries.items()
                if entry is not None and not _is_entry(entry)
            ]
    return errors


def _is_entry(entry: Any) -> bool:
    return (
        isinstance(entry, Mapping)
        and set(entry) == {"log", "means"}
        and isinstance(entry["log"], list)
        and bool(entry["log"])
        and all(isinstance(literal, str) and literal.strip() for literal in entry["log"])
        and isinstance(entry["means"], str)
    )
