"""Why a server died: from its log, its exit status and the unit's result to one cause and one remedy.

An entry is tried in the catalogue's order, so the specific stands before the general. What no entry knows stays
"unknown" and carries the last lines of the log: a guess is worse than the text.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

from .readiness_log import records, start_progress
from .redact import redact

TAIL_LINES = 40
# SGLang prints all its settings in one line of 20 KB.
LINE_CHARACTERS = 300


@dataclass(frozen=True)
class Exit:
    """How systemd saw the end. `code` is "exited", "killed" or "dumped"; `status` the exit status or the signal."""

    code: str | None = None
    status: int | None = None
    result: str | None = None
    """The unit's Result: success, exit-code, signal, oom-kill, timeout, start-limit-hit, …"""
    started: bool = True
    """False where ExecStartPre refused and the server itself never ran."""


@dataclass(frozen=True)
class Diagnosis:
    """One named cause. `evidence` is the log line that shows it (redacted), `tail` is set for unknown causes."""

    name: str
    cause: str
    remedy: str
    evidence: str = ""
    tail: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class _Entry:
    name: str
    pattern: str
    cause: str
    remedy: str
    when: Callable[[str], bool] = lambda phase: True


def _while_capturing(phase: str) -> bool:
    return phase in ("capturing CUDA graphs", "warming up")


_CATALOGUE = (
    _Entry(
        "usage",
        r"^\S*.*?: error: (?P<what>(?:unrecognized arguments|ambiguous option|the following arguments are required"
        r"|argument \S+).*)$",
        "the server refused its command line ({what}); nothing was started",
        "Correct the mode's args; `servelab.sglang.sglang_flags` checks them against the installed release.",
    ),
    _Entry(
        "port in use",
        r"\[Errno 98\].*\('(?P<host>[^']+)', (?P<port>\d+)\)",
        "port {port} on {host} belongs to another process",
        "Stop that process (`ss -ltnp sport = :{port}` names it) or choose another sglang_server_port.",
    ),
    _Entry(
        "KV pool",
        r"(?P<what>leave no GPU memory for the KV cache.*"
        r"|Not enough memory\. Please try to increase --mem-fraction-static.*)",
        "no GPU memory is left for the KV cache",
        "Raise sglang_server_mem_fraction_static, or make room: fewer tokens of context, a smaller draft, more GPUs.",
    ),
    _Entry(
        "GPUs occupied",
        r"(?P<what>memory capacity is unbalanced.*)",
        "some GPUs are occupied by other processes: their free memory differs",
        "Find and release the holders (playbooks/clean.yml), then start again.",
    ),
    _Entry(
        "out of memory at graph capture",
        r"OutOfMemoryError: (?P<what>CUDA out of memory\..*)",
        "out of GPU memory while CUDA graphs were captured",
        "Lower sglang_server_mem_fraction_static, or capture less: a smaller cuda_graph_max_bs.",
        _while_capturing,
    ),
    _Entry(
        "out of memory at weights",
        r"OutOfMemoryError: (?P<what>CUDA out of memory\..*)",
        "out of GPU memory while the weights were loaded",
        "The weights do not fit: check that the GPUs are free, use more GPUs (tp_size) or a smaller quantisation.",
        lambda phase: phase in ("loading weights", "joining ranks", "importing", "starting"),
    ),
    _Entry(
        "out of memory",
        r"OutOfMemoryError: (?P<what>CUDA out of memory\..*)",
        "out of GPU memory",
        "Lower sglang_server_mem_fraction_static: what is not in the pools is needed for activations.",
    ),
    _Entry(
        "kernel does not fit the GPU",
        r"OutOfResources: out of resource: shared memory, (?P<what>Required: \d+, Hardware limit: \d+)",
        "kernel needs more shared memory than sm_120 has",
        "Choose another attention backend, or a release whose kernel fits (Triton extend attention: 0.5.9 or newer).",
    ),
    _Entry(
        "missing model",
        r"(?P<what>Repo id must be in the form.*|[^\n]*does not appear to have a file named config\.json.*"
        r"|[^\n]*No such file or directory: '[^']*(?:config\.json|\.safetensors|tokenizer[^']*)'.*"
        r"|Unrecognized model in .*|Can't load (?:the configuration|tokenizer).*)",
        "the model (or its draft) is not where the mode says: {what}",
        "Check sglang_server_model_path, sglang_server_draft_model_path and whether sglang_server_user may read them.",
    ),
    _Entry(
        "too few GPUs",
        r"(?P<what>invalid device ordinal.*)",
        "the mode asks for more GPUs than the guest has",
        "Lower sglang_server_tp_size, or pass more GPUs to the guest.",
    ),
    _Entry(
        "NCCL",
        r"(?P<what>NCCL error: .*)",
        "NCCL failed: {what}",
        "Check that the GPUs are free and that P2P works (NCCL_DEBUG=INFO in the mode's env says more).",
    ),
)

# The launcher's word for "a child is gone", what a child writes when it fails by itself, and what the ranks write that
# lose a killed one.
_CHILD_LOST = re.compile(r"SIGQUIT received|Received sigquit from a child process")
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|OutOfResources)\b|.*watchdog timeout")
_PEER_LOST = re.compile(r"gloo.*Connection (?:closed|reset) by peer")

# Lines that say the engine is dying, whatever the reason.
DEATH = re.compile(
    r"Scheduler hit an exception|SIGQUIT received|Received sigquit from a child process|kill_process_tree called"
    r"|Scheduler or DataParallelController .* terminated|watchdog timeout|\[Errno 98\]"
)


def death_line(text: str) -> str | None:
    """The first line that says the engine is dying, or None. "Ready to roll" before or after it changes nothing."""
    for record in records(text):
        if DEATH.search(record.text):
            return _short(record.text)
    return None


def diagnose(text: str, end: Exit | None = None) -> Diagnosis:
    """Name the cause of the end from the log of one start. Never raises; the unknown stays unknown."""
    end = end or Exit()
    if not end.started:
        return Diagnosis(
            "device nodes",
            "a check before the start refused: a GPU device node is missing or is not a character device",
            "Compare `ls -l /dev/nvidia*` on node and guest; the node's unit must create them before guests start.",
            _last_line(text),
        )
    phase = start_progress(text).phase
    lines = [record.text for record in records(text)]
    for entry in _CATALOGUE:
        if not entry.when(phase):
            continue
        # The last match: an early warning may look like the cause, the end of the log is the cause.
        for line in reversed(lines):
            match = re.search(entry.pattern, line)
            if match:
                words = {key: redact(value).rstrip(". ") for key, value in match.groupdict().items() if value}
                return Diagnosis(
                    entry.name, entry.cause.format(**words), entry.remedy.format(**words), _short(line.strip())
                )
    if end.result == "oom-kill":
        return Diagnosis(
            "host out of memory",
            "the kernel's OOM killer ended the server: the guest ran out of main memory, not of GPU memory",
            "Give the guest more memory or lower the offload and pinned buffers.",
            _last_line(text),
        )
    tail = [_short(line) for line in lines[-TAIL_LINES:]]
    orphan = next((line for line in lines if _CHILD_LOST.search(line)), None)
    own = [line for line in lines if _ERROR.match(line) and not _PEER_LOST.search(line)]
    if orphan and not own:
        return Diagnosis(
            "lost child",
            "a child process of the server died without an error of its own: somebody, or the kernel, killed it",
            "Look for who did: another operator, a script, the OOM killer or an Xid of the node (`dmesg` there).",
            _short(orphan),
            tail,
        )
    if end.code == "killed" and end.status in (9, 15) and not death_line(text):
        return Diagnosis(
            "killed",
            f"somebody killed the server with signal {end.status}; its log shows no error",
            "Look for who did: another operator, a script, or the OOM killer of the node (`dmesg` there).",
            _last_line(text),
            tail,
        )
    return Diagnosis(
        "unknown",
        f"the server ended for a reason this catalogue does not know{_how(end)}",
        f"Read the last {len(tail)} lines of its log.",
        _last_line(text),
        tail,
    )


def _how(end: Exit) -> str:
    if end.status is None:
        return ""
    return f" (signal {end.status})" if end.code in ("killed", "dumped") else f" (exit status {end.status})"


def _short(line: str) -> str:
    line = redact(line)
    return line if len(line) <= LINE_CHARACTERS else f"{line[:LINE_CHARACTERS]} …"


def _last_line(text: str) -> str:
    last = ""
    for record in records(text):
        last = record.text
    return _short(last)
