"""Check mode on a machine where a probe cannot run or that is not made yet: unknown, and no error."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def check(*options: str) -> subprocess.CompletedProcess[str]:
    """`ansible-playbook --check` with these words."""
    command = [str(Path(sys.executable).with_name("ansible-playbook")), "--check", *options]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)


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
    done = check("-i", "localhost,", "--tags", "cuda_toolkit_verify", str(playbook))
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"The toolchain in {tmp_path}/cuda would be proved" in " ".join(done.stdout.split())
    assert not (tmp_path / "prefix").exists()


def test_a_node_that_is_not_made_yet_is_waited_for_once(tmp_path: Path) -> None:
    """A first `site.yml --check` took a minute: each of its plays waited its ten seconds anew."""
    role = "servelab.sglang.common"
    answers = {"node": "node_answers", "guest": "guest_answers"}
    plays = [
        {
            "hosts": host,
            "gather_facts": False,
            "tasks": [
                {"ansible.builtin.include_role": {"name": role, "tasks_from": answers[host]}},
                {"ansible.builtin.fail": {"msg": f"{host} was not passed over"}},
            ],
        }
        for host in ("node", "guest", "guest")
    ]
    playbook = tmp_path / "play.yml"
    playbook.write_text(json.dumps(plays))
    # It takes every connection, as some networks do for addresses that nobody has, and never greets.
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        hosts = {
            "node": {"ansible_host": "127.0.0.1", "ansible_port": nobody.getsockname()[1]},
            "guest": {"ansible_host": "192.0.2.1", "pve_node": "node", "pve_container_guest": {"vmid": 129}},
        }
        inventory = tmp_path / "hosts.json"
        inventory.write_text(json.dumps({"all": {"hosts": hosts, "vars": {"common_node_may_be_absent": True}}}))
        done = check("-i", str(inventory), str(playbook))
        nobody.setblocking(False)
        waits = 0
        with contextlib.suppress(BlockingIOError):
            while True:
                nobody.accept()[0].close()
                waits += 1
    assert done.returncode == 0, done.stdout + done.stderr
    said = " ".join(done.stdout.split())
    assert [said.count(f"and passes over {host}.") for host in ("node", "guest")] == [1, 2]
    assert waits == 1
