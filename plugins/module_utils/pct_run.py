"""Run Proxmox's `pct` on a node, for the modules that work there."""

from __future__ import annotations

import os
import shutil
import subprocess
from dataclasses import dataclass

__all__ = ["Answer", "PctMissing", "run_pct"]

_PATH = ("/usr/sbin", "/usr/local/sbin", "/usr/local/bin")


class PctMissing(Exception):
    """The machine has no pct. Its text is a sentence with the remedy."""


@dataclass(frozen=True)
class Answer:
    """What pct answered. Of `rc` only "not 0" means anything: Perl leaks errno into it. 124: no answer in time."""

    rc: int
    out: str
    err: str

    @property
    def said(self) -> str:
        return (self.err.strip() and self.err) or self.out


def run_pct(*args: str, timeout: float, text: str | None = None) -> Answer:
    """Run `pct ARGS`, with `text` as its standard input. Raises PctMissing."""
    binary = shutil.which("pct", path=os.pathsep.join([os.environ.get("PATH", ""), *_PATH]))
    if binary is None:
        node = os.uname().nodename
        raise PctMissing(f"There is no pct on {node}, so it is not a Proxmox VE node; correct pve_node.")
    try:
        done = subprocess.run(
            [binary, *args],
            env={**os.environ, "LC_ALL": "C.UTF-8"},
            input=text or "",
            capture_output=True,
            timeout=timeout,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(124, "", f"no answer within {timeout:g} s")
    return Answer(done.returncode, done.stdout, done.stderr)
