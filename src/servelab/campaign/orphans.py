"""What a campaign that was killed leaves running: its playbook, which would stop the next run's server at its end.

A terminal that closes ends it; one that was started with nohup, or by a service, lives on.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

# In the environment of every playbook that a campaign starts; the value is the directory of the results.
MARK = "SERVELAB_CAMPAIGN_RESULTS"
PATIENCE = 15.0


def mark(results: Path) -> dict[str, str]:
    return {MARK: str(results.resolve())}


def end(results: Path, say: Callable[[str], None], patience: float = PATIENCE) -> None:
    """End the playbooks of earlier sittings with these results: first SIGTERM, then SIGKILL.

    Only whoever holds the lease of *results* may call it: then no campaign is alive that they could belong to.
    """
    left = playbooks(results)
    if not left:
        return
    say(f"a campaign that was killed left its playbook running (pid {', '.join(map(str, left))}): ending it")
    for number in (signal.SIGTERM, signal.SIGKILL):
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, number)
        until = time.monotonic() + patience
        while left and time.monotonic() < until:
            time.sleep(0.1)
            left = playbooks(results)


def playbooks(results: Path, proc: Path = Path("/proc")) -> list[int]:
    """Ids of living ansible-playbook processes that a campaign with these results started."""
    wanted = f"{MARK}={results.resolve()}".encode()
    found = []
    for directory in proc.glob("[0-9]*"):
        try:
            words = (directory / "cmdline").read_bytes().split(b"\0")
            if not any(word.endswith(b"ansible-playbook") for word in words):
                continue  # a server that it started carries the mark too; the next run stops that properly
            if wanted in (directory / "environ").read_bytes().split(b"\0"):
                found.append(int(directory.name))
        except OSError:
            continue  # ended meanwhile, or somebody else's
    return sorted(found)
