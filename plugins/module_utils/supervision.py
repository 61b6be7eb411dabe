"""The one seam to whatever keeps servers and load clients: systemd, or our own small supervisor (supervise.py).

Everything that starts, stops or asks a unit goes through `supervisor(kind, prefix)`, and both answer the same
questions in the names of `systemctl show`. The unit files are the same.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from . import supervise
from .modes_unit import unit_env, unit_word
from .supervise import Places, SuperviseError

__all__ = ["KINDS", "SUPERVISOR_OPTIONS", "SuperviseError", "Supervisor", "outdated", "supervisor"]

KINDS = ("systemd", "process")
# Options of every module that asks about a unit; documented in doc_fragments/supervisor.py.
SUPERVISOR_OPTIONS: dict[str, dict[str, Any]] = {
    "supervisor": {"type": "str", "choices": list(KINDS), "default": "systemd"},
    "prefix": {"type": "path", "default": ""},
}
PROPERTIES = (
    "LoadState",
    "ActiveState",
    "NRestarts",
    "InvocationID",
    "ControlGroup",
    "Result",
    "ExecMainCode",
    "ExecMainStatus",
    "ExecMainStartTimestampMonotonic",
    "InactiveExitTimestampMonotonic",
)
RUNNING = ("active", "activating", "reloading", "deactivating")


class Supervisor(Protocol):
    """What keeps units. A unit is named with its suffix: servelab-baseline.service."""

    def unit_file(self, unit: str) -> Path:
        """Where the role writes the unit."""

    def show(self, unit: str) -> dict[str, str]:
        """PROPERTIES of a unit; LoadState is "not-found" for one that does not exist."""

    def log(self, invocation: str, *, stamped: bool = False) -> str:
        """What one start wrote, from its first line; `stamped` with times, where the supervisor notes them."""

    def log_hint(self, unit: str) -> str:
        """What a person types to read it."""

    def stop_hint(self, unit: str) -> str:
        """What a person types to stop it."""

    def pids(self, unit: str) -> set[int]:
        """The processes of a unit."""

    def units_of(self, pids: Sequence[int]) -> dict[int, str]:
        """Which of these processes belong to which unit, where a cgroup does not tell."""

    def running(self, pattern: str) -> list[str]:
        """Names of the units that run and fit a shell pattern."""

    def start(self, unit: str) -> bool:
        """Start it and stop those it conflicts with; False where it runs. Raises SuperviseError."""

    def stop(self, unit: str) -> bool:
        """Stop it, wait, and leave it neither running nor failed; False where nothing ran."""

    def run(
        self, unit: str, command: Sequence[str], environment: Mapping[str, str], log: str, limits: Mapping[str, str]
    ) -> None:
        """Start a command once as a unit; both its outputs are appended to `log`.

        `limits`: a unit's settings, such as {"LimitNOFILE": "65536"}. Raises SuperviseError.
        """


def supervisor(kind: str, prefix: str = "") -> Supervisor:
    """The supervisor of this machine; `prefix` is the directory below which etc, run, var and opt are."""
    return Process(prefix.rstrip("/")) if kind == "process" else Systemd()


def outdated(keeper: Supervisor, unit: str, reads: Iterable[str | Path] = ()) -> list[str]:
    """Of a unit's file and those that its process reads at its start, the ones written since it was started.

    It runs with what they said before, whoever wrote them: a task's "changed" is forgotten with its run. Nothing where
    it does not run.
    """
    shown = keeper.show(unit)
    if shown.get("ActiveState") not in RUNNING:
        return []
    began = time.time() - (time.monotonic() - int(shown["InactiveExitTimestampMonotonic"]) / 1e6)
    files = (Path(file) for file in (keeper.unit_file(unit), *reads))
    return [str(file) for file in files if file.is_file() and file.stat().st_mtime > began]


def _ask(*words: str, timeout: float | None = None) -> tuple[int, str, str]:
    try:
        done = subprocess.run(words, check=False, capture_output=True, stdin=subprocess.DEVNULL, timeout=timeout)
    except subprocess.TimeoutExpired as late:
        raise SuperviseError(f"`{' '.join(words)}` gave no answer within {timeout:g} s.") from late
    return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


class Systemd:
    """The system manager."""

    def unit_file(self, unit: str) -> Path:
        return Path("/etc/systemd/system") / unit

    def show(self, unit: str) -> dict[str, str]:
        code, out, said = _ask("systemctl", "show", unit, f"--property={','.join(PROPERTIES)}", timeout=30)
        if code:
            raise SuperviseError(f"systemctl cannot show {unit}: {said.strip()}")
        return dict(line.split("=", 1) for line in out.splitlines() if "=" in line)

    def log(self, invocation: str, *, stamped: bool = False) -> str:
        if not invocation:
            return ""
        # --all: a progress bar's carriage returns would otherwise turn the line into "[blob data]".
        how = "short-iso-precise" if stamped else "cat"
        words = [f"_SYSTEMD_INVOCATION_ID={invocation}", "--all", f"--output={how}", "--no-pager", "--quiet"]
        return _ask("journalctl", *words)[1]

    def log_hint(self, unit: str) -> str:
        return f"journalctl -u {unit}"

    def stop_hint(self, unit: str) -> str:
        return f"systemctl stop {unit}"

    def pids(self, unit: str) -> set[int]:
        group = self.show(unit).get("ControlGroup", "")
        if not group or group == "/":
            return set()
        found: set[int] = set()
        for root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified", "/sys/fs/cgroup/systemd"):
            for path in Path(root + group).rglob("cgroup.procs"):
                try:
                    found.update(int(word) for word in path.read_text().split())
                except OSError:
                    continue
        return found

    def units_of(self, pids: Sequence[int]) -> dict[int, str]:
        return {}

    def running(self, pattern: str) -> list[str]:
        # deactivating is not among them: what ends already disturbs nobody any more.
        words = ("list-units", "--plain", "--no-legend", "--state=active,activating", pattern)
        return [line.split()[0] for line in _ask("systemctl", *words)[1].splitlines() if line.strip()]

    def start(self, unit: str) -> bool:
        _ask("systemctl", "daemon-reload")
        if self.show(unit).get("ActiveState") in ("active", "activating"):
            return False
        code, _, said = _ask("systemctl", "start", unit)
        if code:
            raise SuperviseError(said.strip() or f"systemctl cannot start {unit}.")
        return True

    def stop(self, unit: str) -> bool:
        shown = self.show(unit)
        if shown.get("ActiveState") in ("inactive", "failed") or shown.get("LoadState") == "not-found":
            # A failed unit of a start that nobody stopped stays failed: it says so to whoever looks. One without a file
            # ran one command (`run`), whose caller heard how it ended: it must not degrade the system for good.
            if shown.get("ActiveState") == "failed" and not self.unit_file(unit).exists():
                _ask("systemctl", "reset-failed", unit)
            return False
        code, _, said = _ask("systemctl", "stop", unit)
        if code:
            raise SuperviseError(said.strip() or f"systemctl cannot stop {unit}.")
        # SGLang ends itself with SIGKILL even when it was asked politely, which systemd takes for a failure.
        _ask("systemctl", "reset-failed", unit)
        return True

    def run(
        self, unit: str, command: Sequence[str], environment: Mapping[str, str], log: str, limits: Mapping[str, str]
    ) -> None:
        words = ["systemd-run", "--quiet", "--unit", unit]
        words += [f"--property={key}={value}" for key, value in limits.items()]
        words += [f"--property={which}=append:{log}" for which in ("StandardOutput", "StandardError")]
        words += [f"--setenv={name}={value}" for name, value in environment.items()]
        code, _, said = _ask(*words, *command)
        if code:
            raise SuperviseError(said.strip() or f"systemd-run cannot start {unit}.")


class Process:
    """Our own supervisor."""

    def __init__(self, prefix: str) -> None:
        self.places = Places(prefix)

    def unit_file(self, unit: str) -> Path:
        return self.places.units / unit

    def show(self, unit: str) -> dict[str, str]:
        return supervise.show(self.places, unit)

    def log(self, invocation: str, *, stamped: bool = False) -> str:
        found = next(iter(self.places.logs.glob(f"*-{invocation}.log")), None) if invocation else None
        return found.read_text(encoding="utf-8", errors="replace") if found else ""

    def log_hint(self, unit: str) -> str:
        return f"less {self.places.read(unit).get('log') or self.places.logs}"

    def stop_hint(self, unit: str) -> str:
        prefix = f" --prefix {self.places.prefix}" if self.places.prefix else ""
        return f"python3 {self.places.program}{prefix} stop {unit}"

    def pids(self, unit: str) -> set[int]:
        return supervise.members(self.places.read(unit))

    def units_of(self, pids: Sequence[int]) -> dict[int, str]:
        processes, wanted = supervise.table(), set(pids)
        found: dict[int, str] = {}
        for unit in self.places.started():
            found |= dict.fromkeys(supervise.members(self.places.read(unit), processes) & wanted, unit)
        return found

    def running(self, pattern: str) -> list[str]:
        return [unit for unit in self.places.started(pattern) if self.show(unit)["ActiveState"] in RUNNING]

    def start(self, unit: str) -> bool:
        return supervise.start(self.places, unit, sys.executable)

    def stop(self, unit: str) -> bool:
        stopped = supervise.stop(self.places, unit)
        once = self.places.run / unit
        if once.exists():  # as systemd forgets a transient unit
            once.unlink()
            (self.places.run / f"{unit}.json").unlink(missing_ok=True)
        return stopped

    def run(
        self, unit: str, command: Sequence[str], environment: Mapping[str, str], log: str, limits: Mapping[str, str]
    ) -> None:
        lines = ["[Service]", f"StandardOutput=append:{log}"]
        lines += [f"{key}={value}" for key, value in limits.items()]
        lines += [f"Environment={unit_env(name, value)}" for name, value in environment.items()]
        lines.append("ExecStart=" + " ".join(unit_word(word) for word in command))
        self.places.run.mkdir(parents=True, exist_ok=True)
        (self.places.run / unit).write_text("\n".join(lines) + "\n", encoding="utf-8")
        supervise.start(self.places, unit, sys.executable)
