"""A proof holds exactly as long as unit, mode and stack stay as they were."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from servelab.shared.modes_proof import fingerprint


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    for name in ("stacks/one/sglang", "stacks/two/sglang"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "stacks/one/sglang/a.py").write_text("x = 1\n")
    (tmp_path / "stack").symlink_to("stacks/one")
    (tmp_path / "unit").write_text("[Service]\n")
    (tmp_path / "mode").write_text("{}\n")
    return tmp_path


def print_of(machine: Path) -> str:
    return fingerprint([machine / "unit", machine / "mode"], machine / "stack", machine / "stacks/one/sglang")


def relink(machine: Path) -> None:
    (machine / "stack").unlink()
    (machine / "stack").symlink_to("stacks/two")


def patch(machine: Path) -> None:
    source = machine / "stacks/one/sglang/a.py"
    source.write_text("x = 2\n")
    os.utime(source, ns=(1, 1))


@pytest.mark.parametrize(
    "change",
    [
        lambda machine: (machine / "unit").write_text("[Service]\nRestart=no\n"),
        lambda machine: (machine / "mode").write_text('{"args": {}}\n'),
        lambda machine: (machine / "unit").unlink(),
        lambda machine: (machine / "stacks/one/sglang/b.py").write_text(""),
        relink,
        patch,
    ],
)
def test_every_change_needs_a_new_proof(machine: Path, change: Callable[[Path], object]) -> None:
    before = print_of(machine)
    assert print_of(machine) == before
    change(machine)
    assert print_of(machine) != before
