"""The supervisor for machines without systemd: real processes, in a scratch prefix, as whoever runs the tests."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servelab.shared import supervise
from servelab.shared.modes_unit import unit_command, unit_env
from servelab.shared.supervision import Process, outdated, supervisor

UNIT = "servelab-baseline.service"
# Ends on SIGTERM, and leaves a child in a session of its own that is deaf to it: what SGLang's worst day looks like.
TREE = """
import os, signal, sys, time
out = sys.argv[1]
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        open(f"{out}/daemon", "w").write(str(os.getpid()))
        time.sleep(600)
    os._exit(0)
signal.signal(signal.SIGTERM, lambda *_: sys.exit(int(sys.argv[2])))
while not os.path.exists(f"{out}/daemon") or not open(f"{out}/daemon").read():
    time.sleep(0.01)
print("up", flush=True)
time.sleep(600)
"""


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Process]:
    made = supervisor("process", str(tmp_path))
    assert isinstance(made, Process)
    for place in (made.places.units, made.places.program.parent):
        place.mkdir(parents=True)
    shutil.copy(supervise.__file__, made.places.program)
    yield made
    for unit in made.places.started():
        made.stop(unit)


def write(keeper: Process, *command: str, name: str = UNIT, more: str = "KillMode=mixed\nTimeoutStopSec=20\n") -> None:
    text = f"[Unit]\nDescription=x\n[Service]\nType=exec\n{more}Restart=no\nExecStart={unit_command(command)}\n"
    keeper.unit_file(name).write_text(text)


def tree(keeper: Process, tmp_path: Path, status: int = 0) -> int:
    """Start TREE and return the pid of its deaf daemon."""
    write(keeper, sys.executable, "-c", f"exec({TREE!r})", str(tmp_path), str(status))
    assert keeper.start(UNIT)
    until(lambda: "up" in keeper.log(keeper.show(UNIT)["InvocationID"]))
    return int((tmp_path / "daemon").read_text())


def until(true: Callable[[], bool], seconds: float = 20.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    process = supervise.look(pid)
    return process is not None and process.state != "Z"


def main_pid(keeper: Process) -> int:
    return int(keeper.places.read(UNIT)["main"]["pid"])


def test_a_stop_reaches_what_left_the_session_and_is_deaf(keeper: Process, tmp_path: Path) -> None:
    daemon = tree(keeper, tmp_path)
    main = main_pid(keeper)
    assert keeper.pids(UNIT) >= {main, daemon}
    assert keeper.show(UNIT)["ActiveState"] == "active"
    assert not keeper.start(UNIT), "what runs is not started again"
    assert keeper.stop(UNIT)
    assert not alive(daemon) and not alive(main)
    shown = keeper.show(UNIT)
    assert (shown["ActiveState"], shown["Result"], shown["ExecMainCode"], shown["ExecMainStatus"]) == (
        "inactive",
        "success",
        "1",
        "0",
    )
    assert not keeper.stop(UNIT), "what is gone is not stopped again"


def test_a_server_that_ends_by_itself_is_told_and_takes_its_children_along(keeper: Process, tmp_path: Path) -> None:
    daemon = tree(keeper, tmp_path, status=3)
    os.kill(main_pid(keeper), signal.SIGTERM)
    until(lambda: keeper.show(UNIT)["ActiveState"] == "failed")
    assert not alive(daemon)
    shown = keeper.show(UNIT)
    assert (shown["Result"], shown["ExecMainCode"], shown["ExecMainStatus"]) == ("exit-code", "1", "3")


def test_a_killed_server_has_the_signal_in_its_record(keeper: Process, tmp_path: Path) -> None:
    tree(keeper, tmp_path)
    os.kill(main_pid(keeper), signal.SIGKILL)
    until(lambda: keeper.show(UNIT)["ActiveState"] == "failed")
    shown = keeper.show(UNIT)
    assert (shown["Result"], shown["ExecMainCode"], shown["ExecMainStatus"]) == ("signal", "2", "9")


def test_a_deaf_server_is_killed_after_its_time(keeper: Process, tmp_path: Path) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    )
    write(keeper, sys.executable, "-c", deaf, more="KillMode=mixed\nTimeoutStopSec=0.3\n")
    keeper.start(UNIT)
    until(lambda: "up" in keeper.log(keeper.show(UNIT)["InvocationID"]))
    main = main_pid(keeper)
    assert keeper.stop(UNIT)
    assert not alive(main)
    assert keeper.show(UNIT)["Result"] == "timeout"


def test_a_killed_supervisor_takes_its_server_with_it_and_its_survivors_stay_known(
    keeper: Process, tmp_path: Path
) -> None:
    daemon = tree(keeper, tmp_path)
    main = main_pid(keeper)
    os.kill(keeper.places.read(UNIT)["supervisor"]["pid"], signal.SIGKILL)
    until(lambda: not alive(main))
    assert keeper.show(UNIT)["ActiveState"] == "failed"
    assert keeper.show(UNIT)["Result"] == "supervisor-lost"
    # It has another session and another parent now; its environment still says whose it is.
    assert daemon in keeper.pids(UNIT)
    assert keeper.stop(UNIT)
    assert not alive(daemon)


def test_a_pid_of_another_process_is_never_signalled(keeper: Process, tmp_path: Path) -> None:
    other = subprocess.Popen(["sleep", "600"])
    try:
        tree(keeper, tmp_path)
        record = keeper.places.read(UNIT)
        keeper.stop(UNIT)
        stale = record | {"supervisor": {"pid": other.pid, "start": 1}, "main": {"pid": other.pid, "start": 1}}
        keeper.places.write(stale)
        assert keeper.show(UNIT)["ActiveState"] == "failed"
        keeper.stop(UNIT)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_a_kernel_without_pidfds_is_no_hindrance(
    keeper: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_pid: int) -> int:
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(os, "pidfd_open", refuse)
    tree(keeper, tmp_path)
    main = main_pid(keeper)
    assert keeper.stop(UNIT)
    assert not alive(main)


def test_a_record_of_an_earlier_boot_says_nothing(keeper: Process, tmp_path: Path) -> None:
    tree(keeper, tmp_path)
    record = keeper.places.read(UNIT)
    keeper.places.write(record | {"boot_id": "another"})
    assert keeper.show(UNIT)["ActiveState"] == "inactive"
    assert keeper.pids(UNIT) == set()
    keeper.places.write(record)


def test_it_outlives_who_started_it(keeper: Process, tmp_path: Path) -> None:
    write(keeper, "sleep", "600")
    program = str(keeper.places.program)
    # A session that is hung up, as an ssh connection is.
    done = subprocess.run(
        ["setsid", sys.executable, program, "--prefix", str(tmp_path), "start", UNIT], capture_output=True, timeout=30
    )
    assert done.returncode == 0, done.stdout
    assert keeper.show(UNIT)["ActiveState"] == "active"
    record = keeper.places.read(UNIT)
    session = supervise.look(record["supervisor"]["pid"])
    assert session is not None and session.session == session.pid, "its own session"
    main = supervise.look(record["main"]["pid"])
    assert main is not None and main.session == main.pid


def test_environment_umask_directory_and_limits_are_those_of_the_unit(
    keeper: Process, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LEAKED", "from the caller")
    tell = (
        "import json, os, resource; print(json.dumps([dict(os.environ), os.getcwd(), os.umask(0), "
        "resource.getrlimit(resource.RLIMIT_NOFILE), open('/proc/self/status').read()]), flush=True)"
    )
    value = 'a "quoted" \\ 100% $HOME'
    more = (
        f"WorkingDirectory={tmp_path}\nEnvironment={unit_env('TOLD', value)}\nUMask=0077\nLimitNOFILE=512\n"
        "LimitMEMLOCK=infinity\nNoNewPrivileges=true\nKillMode=mixed\n"
    )
    write(keeper, sys.executable, "-c", tell, value, more=more)
    keeper.start(UNIT)
    until(lambda: keeper.show(UNIT)["ActiveState"] == "inactive")
    line = next(one for one in keeper.log(keeper.show(UNIT)["InvocationID"]).splitlines() if one.startswith("["))
    environment, directory, umask, files, status = json.loads(line)
    assert environment["TOLD"] == value
    assert "LEAKED" not in environment
    assert environment["INVOCATION_ID"] == keeper.show(UNIT)["InvocationID"]
    assert directory == str(tmp_path)
    assert umask == 0o077
    assert files == [512, 512]
    assert "NoNewPrivs:\t1" in status
    # No signal may stay blocked: SIGTERM would never arrive.
    assert "SigBlk:\t0000000000000000" in status


def test_a_check_that_refuses_leaves_the_server_unstarted(keeper: Process, tmp_path: Path) -> None:
    write(keeper, "sleep", "600", more="ExecStartPre=/usr/bin/test -c /dev/nonesuch\n")
    keeper.start(UNIT)
    until(lambda: keeper.show(UNIT)["ActiveState"] == "failed")
    shown = keeper.show(UNIT)
    assert shown["Result"] == "exit-code"
    assert shown["ExecMainStartTimestampMonotonic"] == "0"
    assert "/usr/bin/test -c /dev/nonesuch refused: status 1" in keeper.log(shown["InvocationID"])


def test_a_command_that_is_not_there_is_told(keeper: Process) -> None:
    write(keeper, "/nonesuch/sglang")
    keeper.start(UNIT)
    until(lambda: keeper.show(UNIT)["ActiveState"] == "failed")
    assert keeper.show(UNIT)["ExecMainStatus"] == "203"
    assert "cannot be executed" in keeper.log(keeper.show(UNIT)["InvocationID"])


def test_the_note_goes_with_the_server(keeper: Process, tmp_path: Path) -> None:
    note = tmp_path / "baseline.owner"
    note.write_text("bench\n")
    write(keeper, "sleep", "600", more=f"ExecStopPost=+-/usr/bin/rm -f {note}\nKillMode=mixed\n")
    keeper.start(UNIT)
    assert note.exists()
    keeper.stop(UNIT)
    assert not note.exists()


def test_one_server_at_a_time(keeper: Process) -> None:
    write(keeper, "sleep", "600")
    write(keeper, "sleep", "600", name="servelab-eagle3.service", more=f"Conflicts={UNIT}\nAfter={UNIT}\n")
    keeper.start(UNIT)
    keeper.start("servelab-eagle3.service")
    assert keeper.show(UNIT)["ActiveState"] == "inactive"
    assert keeper.running("servelab-*.service") == ["servelab-eagle3.service"]


def test_every_start_has_a_log_of_its_own(keeper: Process) -> None:
    write(keeper, "sh", "-c", "echo $$$$; echo error >&2; exit 7")
    ids = []
    for _ in range(2):
        keeper.start(UNIT)
        until(lambda: keeper.show(UNIT)["ActiveState"] == "failed")
        ids.append(keeper.show(UNIT)["InvocationID"])
    first, second = map(keeper.log, ids)
    assert ids[0] != ids[1]
    assert first != second and first.splitlines()[1] == second.splitlines()[1] == "error"
    assert keeper.places.log(UNIT, ids[0]).stat().st_mode & 0o777 == 0o600


def test_a_command_that_runs_once_is_forgotten_when_it_was_stopped(keeper: Process, tmp_path: Path) -> None:
    log = tmp_path / "client.log"
    name = "servelab-load-x.service"
    keeper.run(name, ["sh", "-c", 'echo "$$TOLD"; exit 3'], {"TOLD": "a b"}, str(log), {"LimitNOFILE": "256"})
    until(lambda: keeper.show(name)["ActiveState"] == "failed")
    assert log.read_text() == "a b\n" or log.read_text().endswith("TOLD\n")
    assert keeper.show(name)["ExecMainStatus"] == "3"
    keeper.stop(name)
    assert keeper.show(name)["LoadState"] == "not-found"


def test_a_holder_is_given_its_unit(keeper: Process, tmp_path: Path) -> None:
    daemon = tree(keeper, tmp_path)
    assert keeper.units_of([daemon, os.getpid()]) == {daemon: UNIT}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("Restart=always", "Restart=always is not kept by this supervisor"),
        ("PrivateTmp=true", "PrivateTmp=true is not kept by this supervisor"),
        ("ExecStart=/bin/echo %i", "holds a specifier or a variable"),
        ("ExecStart=/bin/echo $HOME", "holds a specifier or a variable"),
    ],
)
def test_what_it_cannot_keep_is_refused(line: str, said: str) -> None:
    with pytest.raises(supervise.SuperviseError, match=said):
        supervise.parse(f"[Service]\nExecStart=/bin/true\n{line}\n")


def test_a_file_that_was_written_since_the_start_is_told_whoever_wrote_it(keeper: Process, tmp_path: Path) -> None:
    keys, gone = tmp_path / "keys", tmp_path / "gone"
    keys.write_text("old")
    write(keeper, "/usr/bin/sleep", "600")
    assert outdated(keeper, UNIT, [keys, gone]) == [], "it does not run"
    keeper.start(UNIT)
    assert outdated(keeper, UNIT, [keys, gone]) == []
    # The clock of files is coarse: one that is written within a tick of the start may seem older.
    time.sleep(0.02)
    keys.write_text("new")
    assert outdated(keeper, UNIT, [keys, gone]) == [str(keys)]
    write(keeper, "/usr/bin/sleep", "601")
    assert outdated(keeper, UNIT, [keys, gone]) == [str(keeper.unit_file(UNIT)), str(keys)]
    keeper.stop(UNIT)
    assert outdated(keeper, UNIT, [keys]) == []
    keeper.start(UNIT)
    assert outdated(keeper, UNIT, [keys]) == []
