"""A small supervisor for machines without systemd: it reads the same unit files and keeps the same rules.

    python3 supervise.py [--prefix DIR] start|stop|show UNIT

Every started unit has one process of this program as its parent: a session of its own, and the subreaper of everything
below it, so that no descendant gets away, daemons and sessions of their own included. It is ended with SIGTERM, and so
is the unit with it: KillMode=mixed or control-group, TimeoutStopSec, SIGKILL for all that is left, ExecStopPost. Its
record says how the unit stands and, after its end, how it ended. Standard library only and no import from beside it:
the role copies this one file to the machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import fcntl
import fnmatch
import json
import os
import pwd
import resource
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = "servelab.supervised/1"
# Starts of a unit whose logs are kept.
KEPT_LOGS = 20
# Seconds that SIGKILL may take: a process in the driver ("D") cannot be killed, and waiting longer does not help.
KILL_WAIT = 20.0
_EXEC_FAILED = 203  # what systemd calls a command that could not be executed
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER, _PR_SET_NO_NEW_PRIVS = 1, 36, 38
# systemd takes these ends for clean ones.
_CLEAN = {signal.SIGHUP, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE}
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_LIMITS = {"LimitMEMLOCK": resource.RLIMIT_MEMLOCK, "LimitNOFILE": resource.RLIMIT_NOFILE}
# What has no meaning here, or is always so.
_IGNORED = {"Description", "Documentation", "After", "Type", "Slice", "TimeoutStartSec", "TasksMax"}
_libc = ctypes.CDLL(None, use_errno=True)


class SuperviseError(Exception):
    """What was asked cannot be done. The text is a sentence for a person."""


@dataclass
class Unit:
    """What a unit file says, as far as it is understood; what is not is refused, never passed over."""

    environment: dict[str, str] = field(default_factory=dict)
    before: list[list[str]] = field(default_factory=list)
    command: list[str] = field(default_factory=list)
    after: list[list[str]] = field(default_factory=list)
    conflicts: list[str] = field(default_factory=list)
    limits: dict[str, str] = field(default_factory=dict)
    user: str = ""
    group: str = ""
    directory: str = "/"
    output: str = ""
    umask: int = 0o022
    mixed: bool = False
    stop_seconds: float = 90.0
    no_new_privileges: bool = False


def _words(value: str, *, dollars: bool) -> list[str]:
    """The words of a value, quoted as module_utils/modes_unit.py quotes them. Raises SuperviseError for expansions."""
    found = []
    for word in shlex.split(value):
        rest = word.replace("%%", "")
        if "%" in rest or (dollars and "$" in word.replace("$$", "")):
            raise SuperviseError(f"{word!r} holds a specifier or a variable, which only systemd expands.")
        word = word.replace("%%", "%")
        found.append(word.replace("$$", "$") if dollars else word)
    return found


def parse(text: str) -> Unit:
    """Read a unit file. Raises SuperviseError for a setting that this supervisor does not keep."""
    unit = Unit()
    for line in text.replace("\\\n", " ").splitlines():
        line = line.strip()
        if not line or line[0] in "#;[":
            continue
        key, _, value = (part.strip() for part in line.partition("="))
        if key == "Environment":
            unit.environment |= dict(word.split("=", 1) for word in _words(value, dollars=False))
        elif key in ("ExecStartPre", "ExecStopPost"):
            (unit.before if key == "ExecStartPre" else unit.after).append(_words(value.lstrip("+-"), dollars=True))
        elif key == "ExecStart":
            unit.command = _words(value, dollars=True)
        elif key == "Conflicts":
            unit.conflicts += value.split()
        elif key in _LIMITS:
            unit.limits[key] = value
        elif key in ("User", "Group", "WorkingDirectory"):
            setattr(unit, {"User": "user", "Group": "group", "WorkingDirectory": "directory"}[key], value)
        elif key in ("StandardOutput", "StandardError") and value.startswith("append:"):
            unit.output = value.removeprefix("append:")
        elif key == "UMask":
            unit.umask = int(value, 8)
        elif key == "KillMode" and value in ("mixed", "control-group"):
            unit.mixed = value == "mixed"
        elif key == "TimeoutStopSec":
            unit.stop_seconds = float(value)
        elif key == "NoNewPrivileges":
            unit.no_new_privileges = value in ("true", "yes", "1", "on")
        elif key not in _IGNORED and (key, value) != ("Restart", "no"):
            raise SuperviseError(f"{key}={value} is not kept by this supervisor; remove it, or use systemd.")
    if not unit.command:
        raise SuperviseError("There is no ExecStart=, so there is nothing to start.")
    return unit


@dataclass(frozen=True)
class Places:
    """Where everything is: below the prefix as on the machine itself."""

    prefix: str = ""

    @property
    def units(self) -> Path:
        return Path(f"{self.prefix}/etc/servelab/units")

    @property
    def run(self) -> Path:
        """Records, locks, and the unit files of what is started once."""
        return Path(f"{self.prefix}/run/servelab/units")

    @property
    def logs(self) -> Path:
        return Path(f"{self.prefix}/var/log/servelab")

    @property
    def program(self) -> Path:
        return Path(f"{self.prefix}/opt/servelab/supervise.py")

    def unit(self, name: str) -> Path:
        once = self.run / name
        return once if once.exists() else self.units / name

    def log(self, name: str, invocation: str) -> Path:
        return self.logs / f"{name}-{invocation}.log"

    def read(self, name: str) -> dict[str, Any]:
        """The record of a unit; {} where it was never started."""
        try:
            record = json.loads((self.run / f"{name}.json").read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        return record if isinstance(record, dict) and record.get("schema") == SCHEMA else {}

    def write(self, record: Mapping[str, Any]) -> None:
        path = self.run / f"{record['unit']}.json"
        new = path.with_suffix(f".{os.getpid()}")
        new.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
        new.replace(path)

    def started(self, pattern: str = "*") -> list[str]:
        """Names of the units that have a record."""
        names = sorted(path.stem for path in self.run.glob("*.json"))
        return [name for name in names if fnmatch.fnmatchcase(name, pattern)]


@dataclass(frozen=True)
class Process:
    """One line of the process table: what identifies it (`start`: clock ticks since boot) and where it belongs."""

    pid: int
    parent: int
    session: int
    start: int
    state: str


def look(pid: int) -> Process | None:
    """One process, None where there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return Process(pid, int(fields[1]), int(fields[3]), int(fields[19]), fields[0].decode())
    except (OSError, IndexError, ValueError):
        return None


def table() -> dict[int, Process]:
    """Every process of this machine that can be seen."""
    seen = (look(int(entry)) for entry in os.listdir("/proc") if entry.isdigit())  # noqa: PTH208 - thousands
    return {process.pid: process for process in seen if process}


def boot() -> str:
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def below(pid: int, processes: Mapping[int, Process]) -> set[int]:
    """All descendants of a process."""
    found: set[int] = set()
    more = {pid}
    while more:
        more = {one.pid for one in processes.values() if one.parent in more and one.pid not in found}
        found |= more
    return found


def is_alive(record: Mapping[str, Any], which: str) -> bool:
    """Whether the `supervisor` or `main` process of a record is that very process still, of this very boot."""
    noted = record.get(which) or {}
    process = look(int(noted.get("pid") or 0)) if noted.get("pid") else None
    return bool(
        process and process.state != "Z" and process.start == noted["start"] and record.get("boot_id") == boot()
    )


def members(record: Mapping[str, Any], processes: Mapping[int, Process] | None = None) -> set[int]:
    """The processes of a unit: all below its supervisor; where that was killed, those of its session or mark."""
    if not record or record.get("boot_id") != boot():
        return set()
    processes = table() if processes is None else processes
    found: set[int] = set()
    if is_alive(record, "supervisor"):
        found = below(record["supervisor"]["pid"], processes)
    session = (record.get("main") or {}).get("pid")
    leader = processes.get(session or 0)
    if session and (leader is None or leader.start == record["main"]["start"]):
        found |= {one.pid for one in processes.values() if one.session == session}
    mark = f"INVOCATION_ID={record['invocation_id']}".encode()
    for pid in processes:
        with contextlib.suppress(OSError):
            if mark in Path(f"/proc/{pid}/environ").read_bytes().split(b"\0"):
                found.add(pid)
    supervisor = (record.get("supervisor") or {}).get("pid")
    return {pid for pid in found if pid in processes and processes[pid].state != "Z" and pid != supervisor}


def send(process: Process | None, number: int) -> bool:
    """Signal exactly this process; False where it is gone, or its number is another's."""
    if process is None:
        return False
    try:
        pinned = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return False
    except OSError:  # a sandbox's kernel without pidfds; the start time is compared all the same
        pinned = -1
    try:
        now = look(process.pid)
        if now is None or now.start != process.start:
            return False
        if pinned < 0:
            os.kill(process.pid, number)
        else:
            signal.pidfd_send_signal(pinned, number)
        return True
    except ProcessLookupError:
        return False
    finally:
        if pinned >= 0:
            os.close(pinned)


def show(places: Places, name: str) -> dict[str, str]:
    """How a unit stands, in the names of `systemctl show`."""
    record = places.read(name)
    known = record or places.unit(name).exists()
    shown = {
        "LoadState": "loaded" if known else "not-found",
        "ActiveState": "inactive",
        "NRestarts": "0",
        "InvocationID": "",
        "Result": "success",
        "ExecMainCode": "0",
        "ExecMainStatus": "0",
        "ExecMainStartTimestampMonotonic": "0",
        "InactiveExitTimestampMonotonic": "0",
    }
    if record and record["boot_id"] == boot():
        shown |= {
            "ActiveState": record["state"],
            "InvocationID": record["invocation_id"],
            "Result": record["result"],
            "ExecMainCode": str(record["code"]),
            "ExecMainStatus": str(record["status"]),
            "ExecMainStartTimestampMonotonic": str(record["main_started_us"]),
            "InactiveExitTimestampMonotonic": str(record["started_us"]),
        }
        if record["state"] not in ("inactive", "failed") and not is_alive(record, "supervisor"):
            shown |= {"ActiveState": "failed", "Result": "supervisor-lost"}
    return shown


def start(places: Places, name: str, python: str = sys.executable) -> bool:
    """Start a unit and stop those it conflicts with; False where it runs. Raises SuperviseError with the reason."""
    while True:
        state = show(places, name)["ActiveState"]
        # Its record is closed a moment before the supervisor itself is gone.
        if state in ("active", "activating") or not is_alive(places.read(name), "supervisor"):
            break
        time.sleep(0.05)
    if state in ("active", "activating"):
        return False
    path = places.unit(name)
    try:
        unit = parse(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SuperviseError(f"The unit file {path} cannot be read: {error.strerror}.") from error
    if not places.program.exists():
        raise SuperviseError(f"{places.program} is not there; site.yml (role sglang_server) brings it.")
    for other in unit.conflicts:
        stop(places, other)
    # What an earlier supervisor that was killed left behind would have the port.
    stop(places, name)
    words = [python, "-P", str(places.program), "--prefix", places.prefix, "run", name]
    # No file of the caller's and a session of its own: it outlives the connection that started it.
    with subprocess.Popen(
        words,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        cwd="/",
        env={"PATH": _PATH},
    ) as daemon:
        assert daemon.stdout is not None
        said = daemon.stdout.readline().decode(errors="replace").strip()
        if said != "started":
            rest = daemon.stdout.read().decode(errors="replace").strip()
            raise SuperviseError(f"{name} did not start: {' '.join(filter(None, [said, rest])) or 'no reason given'}")
        daemon.returncode = 0  # it is not waited for: it is to live
    return True


def stop(places: Places, name: str) -> bool:
    """Stop a unit and everything that belongs to it, and wait until it is gone; False where nothing ran."""
    record = places.read(name)
    if not record or record["boot_id"] != boot():
        return False
    changed = False
    if is_alive(record, "supervisor"):
        changed = True
        send(look(record["supervisor"]["pid"]), signal.SIGTERM)
        deadline = time.monotonic() + record["stop_seconds"] + KILL_WAIT + 10
        while is_alive(record, "supervisor") and time.monotonic() < deadline:
            time.sleep(0.05)
        record = places.read(name)
    deadline = time.monotonic() + KILL_WAIT
    while (left := members(record)) and time.monotonic() < deadline:
        changed = True
        for pid in left:
            send(look(pid), signal.SIGKILL)
        time.sleep(0.05)
    if left:
        raise SuperviseError(
            f"{name}: SIGKILL did not end {', '.join(map(str, sorted(left)))}; what is in state D waits in the driver."
        )
    if record["state"] not in ("inactive", "failed") and not is_alive(record, "supervisor"):
        for words in record["after"]:
            subprocess.run(words, check=False, capture_output=True)
    # An asked-for stop leaves no failure behind, whatever the server's last status was.
    if record["state"] != "inactive":
        places.write(record | {"state": "inactive"})
    return changed


class _Keeper:
    """The supervisor of one start."""

    def __init__(self, places: Places, name: str) -> None:
        self.places, self.name = places, name
        self.unit = parse(places.unit(name).read_text(encoding="utf-8"))
        self.main: Process | None = None
        self.status: int | None = None
        self.stopping = False
        me = look(os.getpid())
        self.record: dict[str, Any] = {
            "schema": SCHEMA,
            "unit": name,
            "invocation_id": uuid.uuid4().hex,
            "boot_id": boot(),
            "state": "activating",
            "result": "success",
            "code": 0,
            "status": 0,
            "started_us": _microseconds(),
            "main_started_us": 0,
            "supervisor": {"pid": os.getpid(), "start": me.start if me else 0},
            "main": None,
            "stop_seconds": self.unit.stop_seconds,
            "after": self.unit.after,
        }

    def note(self, **changes: Any) -> None:
        self.record |= changes
        self.places.write(self.record)

    def run(self) -> None:
        """Everything from the first check to the last process. Says `started` on stdout as soon as it has."""
        _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if self.unit.no_new_privileges:
            _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})
        log = self._open_log()
        for line in self._limit():
            os.write(log, f"supervise: {line}\n".encode())
        self.note()
        if self._begin(log):
            print("started", flush=True)
            quiet = os.open(os.devnull, os.O_RDWR)
            os.dup2(quiet, 1)
            os.dup2(quiet, 2)
            self._wait()
        else:
            print("started", flush=True)  # the record says how far it came, as systemd's would
        self._end()

    def _open_log(self) -> int:
        self.places.logs.mkdir(parents=True, exist_ok=True)
        path = Path(self.unit.output) if self.unit.output else self.places.log(self.name, self.record["invocation_id"])
        old = sorted(self.places.logs.glob(f"{self.name}-*.log"), key=lambda file: file.stat().st_mtime)
        for file in old[: -KEPT_LOGS + 1]:
            file.unlink(missing_ok=True)
        self.record["log"] = str(path)
        return os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)

    def _limit(self) -> list[str]:
        """Set the limits for this process, from which all below inherit; sentences about those that may not be."""
        said = []
        for key, text in self.unit.limits.items():
            wanted = resource.RLIM_INFINITY if text == "infinity" else int(text)
            try:
                resource.setrlimit(_LIMITS[key], (wanted, wanted))
            except (ValueError, OSError):
                hard = resource.getrlimit(_LIMITS[key])[1]
                resource.setrlimit(_LIMITS[key], (hard, hard))
                said.append(f"{key}={text} is not allowed to this user and stays at {hard}")
        return said

    def _how(self, log: int) -> dict[str, Any]:
        """How the unit's commands are started: as whom, where, with what."""
        unit = self.unit
        user = _user(unit.user)
        environment = {
            "PATH": _PATH,
            "LANG": "C.UTF-8",
            "USER": user.pw_name,
            "LOGNAME": user.pw_name,
            "HOME": user.pw_dir,
            "SHELL": user.pw_shell,
            **unit.environment,
            "INVOCATION_ID": self.record["invocation_id"],
        }
        how: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": log, "cwd": unit.directory}
        how |= {"env": environment, "umask": unit.umask, "preexec_fn": _in_child}
        if user.pw_uid != os.geteuid():
            gid = _gid(unit.group) if unit.group else user.pw_gid
            how |= {"user": user.pw_uid, "group": gid, "extra_groups": os.getgrouplist(user.pw_name, gid)}
        return how

    def _begin(self, log: int) -> bool:
        """Checks, then the main process. False where it came to nothing; the record and the log say why."""
        try:
            how = self._how(log)
            for words in self.unit.before:
                done = subprocess.run(words, check=False, **how)
                if done.returncode:
                    os.write(log, f"supervise: {shlex.join(words)} refused: status {done.returncode}\n".encode())
                    self.record |= {"result": "exit-code"}
                    return False
            self.record["main_started_us"] = _microseconds()
            popen = subprocess.Popen(self.unit.command, start_new_session=True, **how)
        except (OSError, KeyError, subprocess.SubprocessError) as error:
            os.write(log, f"supervise: {shlex.join(self.unit.command)} cannot be executed: {error}\n".encode())
            self.record |= {"result": "exit-code", "code": 1, "status": _EXEC_FAILED}
            return False
        popen.returncode = 0  # reaped here, together with everything else below
        self.main = look(popen.pid)
        self.note(state="active", main={"pid": popen.pid, "start": self.main.start if self.main else 0})
        return True

    def _reap(self) -> None:
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if not pid:
                    return
                if self.main and pid == self.main.pid:
                    self.status = status

    def _wait(self) -> None:
        """Until the main process has ended, by itself or because it was asked to."""
        signals = {signal.SIGCHLD, signal.SIGTERM, signal.SIGINT}
        deadline = None
        while True:
            self._reap()
            if self.status is not None:
                return
            left = None if deadline is None else max(0.0, deadline - time.monotonic())
            came = signal.sigwaitinfo(signals) if left is None else signal.sigtimedwait(signals, left)
            if came is None:
                self.record["result"] = "timeout"
                send(self.main, signal.SIGKILL)
                deadline = time.monotonic() + KILL_WAIT
            elif came.si_signo != signal.SIGCHLD and not self.stopping:
                self.stopping = True
                deadline = time.monotonic() + self.unit.stop_seconds
                self.note(state="deactivating")
                everyone = table()
                ask = {self.main.pid} if self.unit.mixed and self.main else below(os.getpid(), everyone)
                for pid in ask:
                    send(everyone.get(pid), signal.SIGTERM)

    def _end(self) -> None:
        """SIGKILL for all that is left, the last commands, and the record."""
        if self.status is not None:
            number = os.waitstatus_to_exitcode(self.status)
            killed = number < 0
            self.record["code"] = 1 if not killed else 3 if os.WCOREDUMP(self.status) else 2
            self.record["status"] = abs(number)
            clean = not number or (killed and -number in _CLEAN)
            if not self.stopping and not clean:
                self.record["result"] = "signal" if killed else "exit-code"
        deadline = time.monotonic() + KILL_WAIT
        while left := below(os.getpid(), everyone := table()):
            for pid in left:
                send(everyone[pid], signal.SIGKILL)
            signal.sigtimedwait({signal.SIGCHLD}, 0.05)
            self._reap()
            if time.monotonic() > deadline:
                self.record["left"] = sorted(left)
                break
        for words in self.unit.after:
            subprocess.run(words, check=False, capture_output=True)
        failed = self.record["result"] != "success" and not self.stopping
        self.note(state="failed" if failed else "inactive")


def _in_child() -> None:
    """Between fork and exec: no signal stays blocked, and a supervisor that is killed takes its server with it."""
    signal.pthread_sigmask(signal.SIG_SETMASK, set())
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _user(name: str) -> pwd.struct_passwd:
    """The user of a name or number, or who runs this. Raises KeyError for a name that does not exist."""
    if name and not name.isdigit():
        return pwd.getpwnam(name)
    uid = int(name) if name else os.geteuid()
    try:
        return pwd.getpwuid(uid)
    except KeyError:  # a sandbox with a number and no name for it
        return pwd.struct_passwd((str(uid), "x", uid, os.getegid(), "", "/", "/bin/sh"))


def _gid(group: str) -> int:
    import grp

    return int(group) if group.isdigit() else grp.getgrnam(group).gr_gid


def _microseconds() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="supervise.py", description="Start, stop or show a unit without systemd.")
    parser.add_argument("--prefix", default="", help="directory below which etc, run, var and opt are")
    parser.add_argument("action", choices=["start", "stop", "show", "run"], help="run: stay, and be its supervisor")
    parser.add_argument("unit")
    asked = parser.parse_args(argv)
    places = Places(asked.prefix.rstrip("/"))
    try:
        if asked.action == "show":
            print("\n".join(f"{key}={value}" for key, value in show(places, asked.unit).items()))
        elif asked.action == "stop":
            stop(places, asked.unit)
        elif asked.action == "start":
            start(places, asked.unit)
        else:
            places.run.mkdir(parents=True, exist_ok=True)
            with (places.run / f"{asked.unit}.lock").open("w") as lock:
                # Two starts at once are one.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _Keeper(places, asked.unit).run()
    except BlockingIOError:
        print(f"{asked.unit} is being started or stopped by somebody else.")
        return 1
    except (SuperviseError, OSError) as error:
        print(error)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
