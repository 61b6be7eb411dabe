"""fuser: find and signal everyone who has given files open, and read its two streams.

PIDs are on stdout, without newlines and repeated for each file; everything else (names, the table, noise about
processes it may not see) is on stderr, whose digits are not PIDs. Exit status 1 means "nobody" and also "no such file".
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from .nvidia_smi import run_bounded

HOLDERS, NOBODY, ERROR = "holders", "nobody", "error"
_MISSING = re.compile(r"Specified filename (.+) does not exist")
_DENIED = re.compile(r"Permission denied")


@dataclass(frozen=True)
class Answer:
    """`outcome`: "holders", "nobody" or "error" (with `detail`). `incomplete`: fuser could not look everywhere."""

    outcome: str
    pids: list[int] = field(default_factory=list)
    incomplete: bool = False
    detail: str = ""


def parse(stdout: str, stderr: str, status: int) -> Answer:
    """Read what `fuser [-k] FILE…` printed."""
    pids = sorted({int(word) for word in stdout.split() if word.isdigit()})
    incomplete = bool(_DENIED.search(stderr))
    if missing := _MISSING.search(stderr):
        return Answer(ERROR, pids, incomplete, f"{missing[1]} does not exist")
    if pids:
        return Answer(HOLDERS, pids, incomplete)
    if status == 1:
        noise = [line for line in stderr.splitlines() if line.strip() and not _DENIED.search(line)]
        return Answer(ERROR, [], incomplete, noise[0].strip()) if noise else Answer(NOBODY, [], incomplete)
    return Answer(ERROR, [], incomplete, stderr.strip().splitlines()[0] if stderr.strip() else f"exit status {status}")


def fuser(paths: Sequence[str], signal: str | None = None, timeout: float = 20.0, executable: str = "fuser") -> Answer:
    """Who has `paths` open; with `signal` ("TERM", "KILL") each of them gets it: fuser has no exclude list.

    A missing fuser, or one that does not answer in time, is an "error".
    """
    argv = [executable, *(["-k", f"-{signal}"] if signal else []), *paths]
    try:
        answer = run_bounded(argv, timeout)
    except (FileNotFoundError, PermissionError):
        return Answer(ERROR, detail="fuser is not installed (Debian package psmisc)")
    if answer is None:
        return Answer(ERROR, detail=f"fuser did not answer within {timeout:g} s")
    status, out, err = answer
    return parse(out, err, status)
