"""The filter between a server and its logs: nothing secret passes, nothing else is lost, and the end stays the end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servelab.shared.run_server import Filter

MODULE_UTILS = Path(__file__).parents[2] / "plugins" / "module_utils"
KEY = "sentinel-4711-öäü'\"\\x"


def start(
    tmp_path: Path, program: str, *, secrets: dict[str, str] | None = None, **environ: str
) -> subprocess.Popen[bytes]:
    """As the unit starts it: the two files alone in a directory, run by their path."""
    for name in ("run_server.py", "redact.py"):
        (tmp_path / name).write_bytes((MODULE_UTILS / name).read_bytes())
    (tmp_path / "secrets.json").write_text(json.dumps(secrets or {}))
    (tmp_path / "logs").mkdir(exist_ok=True)
    command = [sys.executable, str(tmp_path / "run_server.py"), "--logs", str(tmp_path / "logs"), "--keep", "3"]
    command += ["--secrets", str(tmp_path / "secrets.json"), "--", sys.executable, "-uc", program]
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "INVOCATION_ID": "0123abcd", **environ},
    )  # fmt: skip


def test_secrets_go_from_both_streams_and_both_outputs(tmp_path: Path) -> None:
    program = (
        "import sys, json\n"
        f"key = {KEY!r}\n"
        "print(f'server_args=ServerArgs(api_key={key!r}, port=1)')\n"
        "print('plain ' + key, file=sys.stderr)\n"
        "print(json.dumps({'note': key}), json.dumps({'note': key}, ensure_ascii=False))\n"
        "print('HF_TOKEN=hf_abcdefghijklmnopqrstu')\n"
    )
    process = start(tmp_path, program, secrets={"api-key": KEY})
    out, _ = process.communicate(timeout=20)
    log = (tmp_path / "logs" / "0123abcd.log").read_bytes()
    assert process.returncode == 0
    assert out == log
    assert "sentinel" not in out.decode() and "hf_a" not in out.decode()
    assert out.decode().splitlines()[0] == "server_args=ServerArgs(api_key='[redacted]', port=1)"
    assert out.decode().splitlines()[1] == "plain [redacted]"


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import sys; sys.exit(3)", 3),
        ("import os; os.kill(os.getpid(), 9)", -9),
        ("import os; os.kill(os.getpid(), 15)", -15),
        ("import os; os.kill(os.getpid(), 11)", -11),
        ("", 0),
    ],
)
def test_it_ends_as_the_server_ends(tmp_path: Path, program: str, code: int) -> None:
    process = start(tmp_path, program)
    process.communicate(timeout=20)
    assert process.returncode == code


def test_signals_are_passed_on_and_the_last_words_are_kept(tmp_path: Path) -> None:
    program = (
        "import signal, sys, time\n"
        "def stop(number, frame):\n"
        "    print('SIGTERM received.'); sys.exit(7)\n"
        "signal.signal(signal.SIGTERM, stop)\n"
        "print('up')\n"
        "time.sleep(30)\n"
    )
    process = start(tmp_path, program)
    assert process.stdout is not None
    assert process.stdout.readline() == b"up\n"
    process.send_signal(signal.SIGTERM)
    assert process.stdout.read() == b"SIGTERM received.\n"
    assert process.wait(20) == 7


def test_children_that_hold_the_pipe_do_not_hold_the_end(tmp_path: Path) -> None:
    program = "import subprocess; subprocess.Popen(['sleep', '15']); print('gone')"
    process = start(tmp_path, program)
    began = time.monotonic()
    assert process.wait(14) == 0
    assert time.monotonic() - began < 14
    assert process.stdout is not None and process.stdout.readline() == b"gone\n"


def test_the_server_dies_with_its_filter(tmp_path: Path) -> None:
    process = start(tmp_path, "import os, time; print(os.getpid()); time.sleep(60)")
    assert process.stdout is not None
    pid = int(process.stdout.readline())
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 10
    while Path(f"/proc/{pid}").exists() and " Z " not in Path(f"/proc/{pid}/stat").read_text():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_old_logs_go(tmp_path: Path) -> None:
    for number in range(5):
        start(tmp_path, "print(1)", INVOCATION_ID=f"start{number}").communicate(timeout=20)
        time.sleep(0.02)
    assert sorted(path.stem for path in (tmp_path / "logs").iterdir()) == ["start2", "start3", "start4"]


def test_without_its_secrets_nothing_is_started(tmp_path: Path) -> None:
    process = start(tmp_path, "print('started')")
    process.communicate(timeout=20)
    (tmp_path / "secrets.json").write_text(f'{{"api-key": "{KEY}')
    command = [
        sys.executable,
        str(tmp_path / "run_server.py"),
        "--secrets",
        str(tmp_path / "secrets.json"),
        "--",
        "echo",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    assert done.returncode == 1
    assert "nothing was started" in done.stderr and "sentinel" not in done.stderr


def test_any_cut_gives_the_same_lines() -> None:
    text = (
        f"first api_key='{KEY}'\r\nsecond\n\n10%|█ | 1/10\r20%|██ | 2/10\rthird {KEY}\n"
        + "x" * 5000
        + "\nlast without end"
    ).encode()
    whole = Filter([KEY])
    expected = [*whole.feed(text, 0.0), *whole.close()]
    assert expected[:2] == ["first api_key='[redacted]'", "second"]
    assert expected[2:4] == ["10%|█ | 1/10", "third [redacted]"]
    assert expected[-1] == "last without end"
    rng = random.Random(3)
    for _ in range(300):
        cuts = sorted(rng.sample(range(len(text)), rng.randint(1, 40)))
        pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
        each = Filter([KEY])
        assert [line for piece in pieces for line in each.feed(piece, 0.0)] + list(each.close()) == expected


def test_a_progress_bar_says_one_state_a_second_and_its_last() -> None:
    each = Filter()
    said = [line for tenth in range(35) for line in each.feed(f"\r{tenth}/34".encode(), tenth / 10)]
    said += each.feed(b"\ndone\n", 3.5)
    assert said == ["0/34", "10/34", "20/34", "30/34", "34/34", "done"]
