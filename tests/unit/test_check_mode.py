"""Check mode on a machine where a probe cannot run: its result is unknown, and that is no error."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_toolchain_that_is_there_and_was_never_proved(tmp_path: Path) -> None:
    nvcc = tmp_path / "cuda/bin/nvcc"
    nvcc.parent.mkdir(parents=True)
    nvcc.write_text("#!/bin/sh\nexit 1\n")
    nvcc.chmod(0o755)
    settings = {
        "cuda_toolkit_method": "preinstalled",
        "cuda_toolkit_home": str(tmp_path / "cuda"),
        "cuda_toolkit_prefix": str(tmp_path / "prefix"),
        "cuda_toolkit_python": sys.executable,
        "ansible_python_interpreter": sys.executable,
    }
    play = {"hosts": "localhost", "connection": "local", "roles": ["servelab.sglang.cuda_toolkit"], "vars": settings}
    playbook = tmp_path / "play.yml"
    playbook.write_text(json.dumps([{**play, "gather_facts": False}]))
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--check", "-i", "localhost,"]
    command += ["--tags", "cuda_toolkit_verify", str(playbook)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The toolchain in {tmp_path}/cuda would be proved" in " ".join(done.stdout.split())
    assert not (tmp_path / "prefix").exists()
