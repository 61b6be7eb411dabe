"""Who uses a stack: what is removed is what nobody does."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from servelab.shared.stack_users import unit_files, users

SLEEP = [sys.executable, "-c", "import sys; print(flush=True); sys.stdin.read()"]


@pytest.fixture
def stacks(tmp_path: Path) -> tuple[Path, Path]:
    """Two of them; the directory of all is reached by a link, as where /opt was too small."""
    (tmp_path / "data").mkdir()
    (tmp_path / "stacks").symlink_to("data")
    made = tmp_path / "stacks/0.5.12-light-0123abcd", tmp_path / "stacks/0.5.23-light-4567cdef"
    for stack in made:
        (stack / "bin").mkdir(parents=True)
        (stack / "lib.so").write_bytes(b"\0" * mmap.PAGESIZE)
    return made


def started(words: list[str], **how: object) -> Iterator[int]:
    # Started once it has printed: then its words and files are its own.
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, **how)  # type: ignore[call-overload]
    assert process.stdout.readline() == b"\n"
    try:
        yield process.pid
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


@pytest.fixture(params=["word", "real word", "environment", "real environment", "library", "directory"])
def pid(request: pytest.FixtureRequest, stacks: tuple[Path, Path], tmp_path: Path) -> Iterator[int]:
    """A process of the first stack, by each of the things that may tell it alone."""
    old, real = stacks[0], tmp_path / "data" / stacks[0].name
    load = (
        "import mmap, sys; file = open(sys.stdin.readline().strip(), 'rb'); "
        "kept = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ); file.close(); print(flush=True); sys.stdin.read()"
    )
    match request.param:
        case "word":
            yield from started([*SLEEP, f"--model={old}/model"])
        case "real word":
            yield from started([*SLEEP, str(real / "bin/python")])
        case "environment":
            yield from started(SLEEP, env={"PATH": f"{old}/bin:/usr/bin"})
        case "real environment":
            yield from started(SLEEP, env={"PATH": f"/usr/bin:{real}/bin"})
        case "directory":
            yield from started(SLEEP, cwd=old)
        case "library":
            process = subprocess.Popen([sys.executable, "-c", load], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert process.stdin and process.stdout
            process.stdin.write(f"{old}/lib.so\n".encode())
            process.stdin.flush()
            assert process.stdout.readline() == b"\n"
            yield process.pid
            process.communicate()


def test_a_process_keeps_its_stack_and_no_other(pid: int, stacks: tuple[Path, Path]) -> None:
    old, new = stacks
    assert users(stacks, None, []) == {old: [f"process {pid} runs from it"], new: []}


def test_several_processes_are_one_sentence(stacks: tuple[Path, Path]) -> None:
    one, two = (started(SLEEP, cwd=stacks[1]) for _ in range(2))
    first, second = sorted([next(one), next(two)])
    assert users(stacks, None, [])[stacks[1]] == [f"processes {first}, {second} run from it"]
    one.close()
    two.close()


def test_of_a_process_of_somebody_else_the_words_are_enough(stacks: tuple[Path, Path], tmp_path: Path) -> None:
    """Where nobody may become root, all else of it is barred."""
    theirs = tmp_path / "proc/4711"
    theirs.mkdir(parents=True)
    (theirs / "cmdline").write_bytes(f"{stacks[0]}/bin/python\0-m\0sglang.launch_server\0".encode())
    found = users(stacks, None, [], proc=tmp_path / "proc")
    assert found == {stacks[0]: ["process 4711 runs from it"], stacks[1]: []}


def test_the_link_and_the_units_keep_theirs(stacks: tuple[Path, Path], tmp_path: Path) -> None:
    old, new = stacks
    (tmp_path / "stack").symlink_to(new)
    unit = tmp_path / "servelab-baseline.service"
    unit.write_text(
        f"[Service]\nEnvironment=PATH=/cuda/bin:{old}/bin:/usr/bin\nExecStart=/opt/servelab-lab/bin/simserver\n"
    )
    assert users(stacks, tmp_path / "stack", [unit], proc=tmp_path / "none") == {
        old: ["servelab-baseline.service runs from it"],
        new: [f"{tmp_path}/stack names it"],
    }


def test_a_stack_whose_name_another_begins_with_is_another(stacks: tuple[Path, Path], tmp_path: Path) -> None:
    longer = stacks[0].with_name(stacks[0].name + "0")
    longer.mkdir()
    unit = tmp_path / "servelab-eagle3.service"
    unit.write_text(f"ExecStart={longer}/bin/python -m sglang.launch_server\n")
    found = users([stacks[0], longer], None, [unit], proc=tmp_path / "none")
    assert found == {stacks[0]: [], longer: ["servelab-eagle3.service runs from it"]}


def test_the_units_of_our_own_supervisor_count(tmp_path: Path) -> None:
    place = tmp_path / "etc/servelab/units"
    place.mkdir(parents=True)
    for name in ("servelab-eagle3.service", "servelab-baseline.service", "other.service", "servelab-note.txt"):
        (place / name).write_text("")
    # What systemd calls masked, or left behind: nothing to read.
    (place / "servelab-gone.service").symlink_to("nowhere")
    ours = [path.name for path in unit_files(str(tmp_path)) if path.parent == place]
    assert ours == ["servelab-baseline.service", "servelab-eagle3.service"]


def test_systemds_units_count_whatever_the_prefix(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = []
    real = Path.glob

    def glob(self: Path, pattern: str) -> Iterator[Path]:
        asked.append(os.fspath(self))
        return real(self, pattern)

    monkeypatch.setattr(Path, "glob", glob)
    unit_files(str(tmp_path))
    assert asked == ["/etc/systemd/system", f"{tmp_path}/etc/servelab/units"]
