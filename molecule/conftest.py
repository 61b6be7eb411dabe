"""Hosts of the lab for testinfra, over ssh.

testinfra reads an inventory without evaluating its templates, and the lab's addresses are templates. So Ansible is
asked once for what it would connect to, and testinfra's plain ssh backend does the rest.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

ROOT = Path(__file__).resolve().parent.parent
_ASKED = (
    "{'host': ansible_host, 'user': ansible_user, 'key': ansible_ssh_private_key_file, 'args': ansible_ssh_common_args}"
)


@pytest.fixture(scope="session")
def connections() -> dict[str, dict[str, Any]]:
    """How Ansible reaches each machine of the lab: {inventory name: {host, user, key, args}}."""
    answer = subprocess.run(
        [
            "ansible",
            "pve_nodes:gpu_guests",
            "-i",
            str(ROOT / "inventory/lab"),
            "-m",
            "debug",
            "-a",
            f"msg={{{{ {_ASKED} }}}}",
        ],
        env={
            **os.environ,
            "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
            "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
            "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
        },
        capture_output=True,
        text=True,
        check=True,
    )
    (task,) = json.loads(answer.stdout)["plays"][0]["tasks"]
    return {name: result["msg"] for name, result in task["hosts"].items()}


def _connect(connection: dict[str, Any]) -> Host:
    return testinfra.get_host(
        f"ssh://{connection['user']}@{connection['host']}",
        ssh_identity_file=connection["key"],
        ssh_extra_args=connection["args"],
    )


@pytest.fixture(scope="session")
def node(connections: dict[str, dict[str, Any]]) -> Host:
    """The simulated Proxmox node."""
    return _connect(connections["lab-pve1"])


@pytest.fixture(scope="session")
def guest(connections: dict[str, dict[str, Any]]) -> Host:
    """Guest 129 on it."""
    return _connect(connections["lab-gpu1"])
