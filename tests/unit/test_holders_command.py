"""`servelab holders`: the same answer as the role's, for the person at the machine."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from conftest import CARDS

from servelab import holders
from servelab.cli import main
from servelab.shared.gpu_lease import Owner, take

SMI = """#!/bin/sh
echo 'index, memory.used [MiB]'
echo '0, 41000 MiB'
echo '1, [N/A]'
"""


@pytest.fixture
def words(gpu_dir: Path, tmp_path: Path, monkeypatch) -> list[str]:
    """The command on a machine whose nvidia-smi knows one card's memory, and not the other's."""
    smi = tmp_path / "bin" / "nvidia-smi"
    smi.parent.mkdir()
    smi.write_text(SMI)
    smi.chmod(0o755)
    monkeypatch.setenv("PATH", str(smi.parent), prepend=":")
    # Some test machines have an init that even root may not look at.
    init = Path("/proc/1/comm").read_text().strip()
    where = ["--device-dir", str(gpu_dir), "--leases", str(tmp_path / "leases"), "--protect", init]
    return ["holders", *where]


def test_nobody(words, capsys):
    assert main(words) == 0
    said = capsys.readouterr().out.splitlines()
    assert said[:3] == ["nobody holds a GPU", "GPU 0: 41000 MiB in use", "GPU 1: unknown MiB in use"]


def test_somebody_is_named_with_what_to_do_and_the_lease(words, hold, tmp_path, capsys):
    process = hold(0)
    take([2, 0, 1], Owner("boot/pid", 7, 1, "root@ctl", "campaign first"), 130, 60, directory=str(tmp_path / "leases"))
    assert main(words) == 1
    said = capsys.readouterr().out
    row = next(line for line in said.splitlines() if line.startswith(str(process.pid)))
    assert "root" in row and str(CARDS[0]) in row and "sleep 60" in row
    assert f"`kill {process.pid}`" in said
    assert "GPU 0-2 leased: campaign first, by root@ctl (PID 7 there), for guest 130" in said


def test_for_programs(words, hold, capsys):
    process = hold(1)
    assert main([*words, "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert [holder["pid"] for holder in document["holders"]] == [process.pid]
    assert document["complete"] is True and document["cards"][1]["memory_used_mib"] is None
    assert document["diagnosis"] is None and document["leases"] == []


def test_a_name_that_may_stay_is_said_to(words, hold, capsys):
    hold(0)
    assert main([*words, "--protect", "sleep"]) == 1
    assert "tolerate: on the protect list: sleep" in capsys.readouterr().out


def test_what_cannot_be_looked_at_is_not_nobody(words, gpu_dir, hold, monkeypatch, capsys):
    seen = holders.scan(str(gpu_dir)) | {"complete": False, "unreadable": [{"pid": 77, "name": "dark"}]}
    monkeypatch.setattr(holders, "scan", lambda *given, **options: dict(seen))
    assert main(words) == 3
    assert (
        "not looked at, so that nobody can say whether they hold a GPU: 77 (dark); run as root"
        in capsys.readouterr().out
    )


def test_in_a_guest_the_view_is_said_to_be_partial(words, gpu_dir, monkeypatch, capsys):
    (gpu_dir / f"nvidia-uvm{os.getpid()}").touch()
    seen = holders.scan(str(gpu_dir), view="guest", protect=["*"])
    monkeypatch.setattr(holders, "scan", lambda *given, **options: dict(seen))
    assert main(words) == 0
    said = capsys.readouterr().out
    assert "this is a guest" in said and f"nvidia-uvm{os.getpid()} is no device" in said
