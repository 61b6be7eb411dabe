"""Why a server died: from its log, its exit status and the unit's result to one cause and one remedy.

The catalogue's order decides, so the specific stands before the general. What no entry knows stays "unknown" and
carries the last lines of the log: a guess is worse than the text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from .failure_catalogue import CATALOGUE, NOTICES, Entry
from .readiness_log import records, start_progress
from .redact import redact

TAIL_LINES = 40
# SGLang prints all its settings in one line of 20 KB.
LINE_CHARACTERS = 300
# No message of a failure is longer, and a pattern needs quadratic time on a line that is.
SEARCHED_CHARACTERS = 2000


@dataclass(frozen=True)
class Exit:
    """How systemd saw the end. `code` is "exited", "killed" or "dumped"; `status` the exit status or the signal."""

    code: str | None = None
    status: int | None = None
    result: str | None = None
    """The unit's Result: success, exit-code, signal, oom-kill, timeout, start-limit-hit, …"""
    started: bool = True
    """False where ExecStartPre refused and the server itself never ran."""
    node: str | None = None
    """The device node whose check refused, where `started` is False and it is known."""
    sandboxed: bool = True
    """False where systemd could not make the namespaces of the unit (226), before any program of it ran."""


@dataclass(frozen=True)
class Diagnosis:
    """One named cause. `evidence` is the log line that shows it (redacted), `tail` is set for unknown causes.

    `failed` is False where nothing went wrong: the server was asked to stop, or its log has no end yet.
    """

    name: str
    cause: str
    remedy: str
    evidence: str = ""
    tail: list[str] = field(default_factory=list)
    failed: bool = True


# The launcher's word for "a child is gone", what a child writes when it fails by itself, and what the ranks write that
# lose a killed one.
_CHILD_LOST = re.compile(
    r"SIGQUIT received|Received sigquit from a child process|Subprocess \S+ \(pid=\d+\) crashed with exit code"
    r"|scheduler died during initialization|Scheduler or DataParallelController \d+ terminated with -"
)
_CHILD_SIGNAL = re.compile(r"(?:crashed with exit code |\(exit code: |terminated with )-(?P<signal>\d+)")
_ERROR = re.compile(r"[\w.]*(?:Error|Exception|OutOfResources)\b|.*watchdog timeout \((?!.*soft=True)")
_PEER_LOST = re.compile(
    r"gloo.*Connection (?:closed|reset) by peer|gloo.*Connection timed out|.*died during initialization"
    r"|.*Did the remote server shutdown or crash\?"
)
# The peer's address, in the same lines.
_PEER = re.compile(r"gloo.*(?:Connection closed by peer|Read error|Write error) \[(?P<address>[^\]]+)\]")
# The second is of a guest other than the first, which leaves the rest to that one.
_ASKED = re.compile(r"SIGTERM received(?:\.| on node_rank \d+;)")
_READY = "The server is fired up and ready to roll"
_ACCESS = re.compile(r'INFO: +\S+:\d+ - "[A-Z]+ \S+ HTTP/')
_NODES = r"\bnnodes['\"]?[=:] ?(\d+)"
# Only of the launcher's own children, with how they ended.
_OWN_CHILD = re.compile(r"crashed with exit code -|terminated with -")
# What Python's resource tracker finds after a process that could not clean up.
_LEAKED = re.compile(r"resource_tracker: There appear to be \d+ leaked")

# Lines that say the engine is dying, whatever the reason.
DEATH = re.compile(
    r"Scheduler hit an exception|SIGQUIT received|Received sigquit from a child process|kill_process_tree called"
    r"|Scheduler or DataParallelController .* terminated|watchdog timeout \((?!.*soft=True)|\[Errno 98\]"
    r"|Subprocess \S+ \(pid=\d+\) crashed with exit code|scheduler died during initialization"
)
SIGNALS = {4: "SIGILL", 6: "SIGABRT", 7: "SIGBUS", 8: "SIGFPE", 9: "SIGKILL", 11: "SIGSEGV", 15: "SIGTERM"}


def death_line(text: str) -> str | None:
    """The first line that says the engine is dying, or None. "Ready to roll" before or after it changes nothing."""
    for record in records(text):
        if DEATH.search(record.text):
            return _short(record.text)
    return None


def diagnose(text: str, end: Exit | None = None, kernel: str = "") -> Diagnosis:
    """Name the cause of the end from the log of one start. Never raises; the unknown stays unknown.

    `kernel` are lines of the kernel's log from the time of this start; empty where they cannot be read.
    """
    end = end or Exit()
    if not end.sandboxed:
        return _without_namespaces(text)
    if not end.started:
        return _refused_before_the_start(end, text)
    for entry in CATALOGUE:
        if entry.kernel and (found := _match(entry, kernel.splitlines(), {})):
            return found
    whole = [record.text for record in records(text)]
    lines = [line[:SEARCHED_CHARACTERS] for line in whole]
    nodes = _last(whole, _NODES)
    if _asked_to_stop(lines):
        evidence = next(line for line in lines if _ASKED.search(line))
        return Diagnosis(
            "asked to stop", "somebody asked the server to stop (SIGTERM), and it did", "Nothing, if that was meant.",
            _short(evidence), failed=False,
        )  # fmt: skip
    phase = start_progress(text).phase
    advice = _advice(whole)
    # What was said before every rank was ready did not end the server. The exception: "ready" is also said by a server
    # whose port another one has, because its warm-up asked that one.
    ready = max((at for at, line in enumerate(lines) if _READY in line), default=0)
    for entry in CATALOGUE:
        if entry.kernel or (entry.phases and phase not in entry.phases):
            continue
        if found := _match(entry, lines if entry.name == "port in use" else lines[ready:], advice):
            return found
    return _without_an_entry(text, lines, end, nodes or 1)


def _match(entry: Entry, lines: list[str], advice: dict[str, str]) -> Diagnosis | None:
    # The last match: an early warning may look like the cause, the end of the log is the cause.
    for line in reversed(lines):
        match = re.search(entry.pattern, line)
        if match is None:
            continue
        words = {key: redact(value).rstrip(" .,:") for key, value in match.groupdict().items() if value}
        words = {"what": "no more is said", "raised": "", "lowered": "", "halved": "", "doubled": ""} | advice | words
        words["colon"] = f": {words['what']}" if match.groupdict().get("what") else ""
        return Diagnosis(
            entry.name, _clip(entry.cause.format(**words)), entry.remedy.format(**words), _short(line.strip())
        )  # fmt: skip
    return None


def _advice(lines: list[str]) -> dict[str, str]:
    """Values to try, from what the log says was set; a key is missing where the log does not say."""
    found: dict[str, str] = {}
    fraction = _last(lines, r"mem[_-]fraction[_-]static['\"]?[=:] ?(0?\.\d+)")
    least = _last(lines, r"Raise --mem-fraction-static above (0?\.\d+)")
    if least is not None or fraction is not None:
        found["raised"] = f" (try {min(0.95, (least or fraction or 0.0) + 0.05):.2f})"
    if fraction is not None and fraction > 0.1:
        found["lowered"] = f" (try {fraction - 0.05:.2f})"
    graphs = _last(lines, r"cuda_graph_max_bs(?:_decode)?['\"]?[=:] ?(\d+)")
    if graphs is not None and graphs >= 2:
        found["halved"] = f" (try {int(graphs) // 2})"
    ranks = _last(lines, r"\btp_size['\"]?[=:] ?(\d+)")
    if ranks is not None:
        found["doubled"] = f" {int(ranks) * 2} instead of {int(ranks)}"
    return found


def _last(lines: list[str], pattern: str) -> float | None:
    for line in reversed(lines):
        if found := re.findall(pattern, line):
            return float(found[-1])
    return None


def _asked_to_stop(lines: list[str]) -> bool:
    """Whether a SIGTERM came before anything that says the engine is dying."""
    for line in lines:
        if _ASKED.search(line):
            return True
        if DEATH.search(line):
            return False
    return False


def _without_namespaces(text: str) -> Diagnosis:
    told = [line for line in text.splitlines() if "mount namespacing" in line or "step NAMESPACE" in line]
    return Diagnosis(
        "sandbox",
        "systemd could not make the namespaces that bar the server from what it does not need (226/NAMESPACE)",
        "Give the guest Proxmox's feature nesting, or set sglang_server_sandbox to false.",
        _short(told[0].strip()) if told else _last_line(text),
    )


def _refused_before_the_start(end: Exit, text: str) -> Diagnosis:
    # systemd tells the node (`end.node`), our own supervisor writes the check that refused into the log.
    logged = re.search(r"/usr/bin/test -c (\S+) refused", text)
    what = end.node or (logged[1] if logged else "a GPU device node")
    return Diagnosis(
        "device nodes",
        f"a check before the start refused: {what} is missing or is not a character device",
        "Compare `ls -l /dev/nvidia*` on node and guest; the node's unit must create them before guests start.",
        _last_line(text),
    )


def _without_an_entry(text: str, lines: list[str], end: Exit, nodes: float) -> Diagnosis:
    """Ends that no line explains: killed from outside, killed by the kernel, or unknown."""
    tail = [_short(line) for line in lines[-TAIL_LINES:]]
    if end.result == "oom-kill":
        return Diagnosis(
            "host out of memory",
            "the kernel's OOM killer ended the server: the guest ran out of main memory, not of GPU memory",
            "Give the guest more memory or lower the offload and pinned buffers.",
            _last_line(text),
        )
    dead = death_line(text)
    orphan = next((line for line in lines if _CHILD_LOST.search(line)), None)
    if nodes > 1 and (lost := _lost_peer(lines)):
        return lost
    own = [line for line in lines if _ERROR.match(line) and not _PEER_LOST.search(line)]
    crashed = next((match for line in lines if (match := _CHILD_SIGNAL.search(line))), None)
    if crashed and int(crashed["signal"]) not in (9, 15) and not own:
        signal = int(crashed["signal"])
        return Diagnosis(
            "crashed child",
            f"a child process of the server crashed with signal {signal} ({SIGNALS.get(signal, 'unnamed')}), "
            "in compiled code",
            "Leave out what is compiled for this start (mode by mode), and compare the stack with its lock.",
            _short(orphan or crashed[0]),
            tail,
        )
    if orphan and not own:
        return Diagnosis(
            "lost child",
            "a child process of the server died without an error of its own: somebody, or the kernel, killed it",
            "Look for who did: another operator, a script, the OOM killer or an Xid of the node (`dmesg` there).",
            _short(orphan),
            tail,
        )
    leaked = next((line for line in lines[-8:] if _LEAKED.search(line)), None)
    if not dead and (end.code == "killed" and end.status in (9, 15)):
        said_so = f"somebody killed the server with signal {end.status}; its log shows no error"
        return _killed(said_so, leaked or text, tail)
    if not dead and leaked and end.code in (None, "killed"):
        return _killed(
            "somebody killed the server: its log stops without an error, and nothing was cleaned up", leaked, tail
        )
    if lines and all(_ACCESS.search(line) for line in lines):
        return Diagnosis(
            "access log only",
            "these are only requests: SGLang writes them to its standard output, and everything else to standard error",
            "Give it the server's standard error, or both.",
            _last_line(text),
            failed=False,
        )
    if end.code == "exited" and end.status == 0 and not own:
        return Diagnosis(
            "ended by itself",
            "the server ended by itself with exit status 0, and nobody asked it to",
            "Read the last lines of its log; a program in sglang_server_command that waits for no server does this.",
            _last_line(text),
            tail,
        )
    if end == Exit() and not dead and not own:
        phase = start_progress(text).phase
        return stalled(text, f"nothing in this log says that the server ended; the last step it shows is: {phase}")
    return Diagnosis(
        "unknown",
        f"the server ended for a reason this catalogue does not know{_how(end)}",
        f"Read the last {len(tail)} lines of its log.",
        _last_line(text),
        tail,
    )


LOST_PEER = "lost peer"


def _lost_peer(lines: list[str]) -> Diagnosis | None:
    """A rank on another guest went, and no process of this one did: what it wrote there is the cause."""
    if any(_OWN_CHILD.search(line) for line in lines):
        return None
    line = next((line for line in lines if _PEER_LOST.search(line)), None)
    if line is None:
        return None
    address = _PEER.search(line)
    return Diagnosis(
        LOST_PEER,
        f"a rank on another guest is gone{f' ({address[1]})' if address else ''}, and no other goes on without it",
        "Read that rank's own log: here only the consequence stands.",
        _short(line),
    )


def _killed(cause: str, text: str, tail: list[str]) -> Diagnosis:
    return Diagnosis(
        "killed",
        cause,
        "Look for who did: another operator, a script, or the OOM killer of the node (`dmesg` there).",
        _last_line(text),
        tail,
    )


def stalled(text: str, cause: str) -> Diagnosis:
    """What it means when a start that has written `text` writes nothing more; `cause` is the sentence about that."""
    phase = start_progress(text).phase
    last = _last_line(text)
    nodes = _last([record.text for record in records(text)], _NODES)
    if phase == "joining ranks" and (nodes or 1) > 1 and "sglang is using nccl" not in text:
        return Diagnosis(
            "missing ranks",
            f"{cause}; the ranks of {int(nodes or 1)} guests wait for each other",
            "See that every one of them started and reaches sglang_server_dist_address of the first on "
            "sglang_server_dist_port.",
            last,
            failed=False,
        )
    if phase == "joining ranks" or "sglang is using nccl" in last:
        return Diagnosis(
            "NCCL hang",
            f"{cause}; the ranks wait for each other in NCCL",
            "P2P is advertised and does not work: set NCCL_P2P_DISABLE=1 in the mode's env; if it starts then, "
            "correct IOMMU "
            "(iommu=pt or off) and ACS on the node, which playbooks/provision.yml audits.",
            last,
            failed=False,
        )
    if phase == "capturing CUDA graphs":
        return Diagnosis(
            "no end",
            f"{cause}",
            "A compiler may be at work (`ps` in the guest shows nvcc, ninja or cicc), or a rank hangs in its first "
            "all-reduce: "
            "NCCL_P2P_DISABLE=1 tells them apart.",
            last,
            failed=False,
        )
    return Diagnosis("no end", cause, "Ask the server (playbooks/status.yml), or read on.", last, failed=False)


def notices(text: str) -> list[str]:
    """What a person should know about a server that goes on, a sentence with its line each; the first of each kind."""
    lines = [record.text[:SEARCHED_CHARACTERS] for record in records(text)]
    said = []
    for notice in NOTICES:
        line = next((line for line in lines if re.search(notice.pattern, line)), None)
        if line is not None:
            said.append(f"{notice.name}: {notice.meaning} ({_short(line.strip())})")
    return said


def _how(end: Exit) -> str:
    if end.status is None:
        return ""
    return f" (signal {end.status})" if end.code in ("killed", "dumped") else f" (exit status {end.status})"


def _clip(sentence: str) -> str:
    return sentence if len(sentence) <= LINE_CHARACTERS else f"{sentence[:LINE_CHARACTERS]} …"


def _short(line: str) -> str:
    return _clip(redact(line))


def _last_line(text: str) -> str:
    last = ""
    for record in records(text):
        last = record.text
    return _short(last)
