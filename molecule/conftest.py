"""Hosts of the lab for testinfra, over ssh, and playbooks run again to see what they would do.

testinfra reads an inventory without evaluating its templates. So Ansible is asked once for what it would connect to,
and testinfra's plain ssh backend does the rest.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import testinfra
from testinfra.host import Host

pytest.register_assert_rewrite("bundles", "routed", "stacks", "units")

ROOT = Path(__file__).resolve().parent.parent
LAB = ROOT / "scripts/lab"
_ASKED = (
    "{'host': ansible_host, 'user': ansible_user, 'key': ansible_ssh_private_key_file, 'args': ansible_ssh_common_args}"
)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """SERVELAB_SHARE=1/2: every second test function from the first on, with all its parameters; 2/2: the others."""
    number, shares = map(int, os.environ.get("SERVELAB_SHARE", "1/1").split("/"))
    functions = list(dict.fromkeys((item.path, item.originalname) for item in items))
    mine = set(functions[number - 1 :: shares])
    left = [item for item in items if (item.path, item.originalname) not in mine]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if item not in left]


@pytest.fixture(scope="session")
def connections() -> dict[str, dict[str, Any]]:
    """How Ansible reaches each machine of the lab: {inventory name: {host, user, key, args}}."""
    return reach("pve_nodes:gpu_guests")


def reach(hosts: str, *options: str) -> dict[str, dict[str, Any]]:
    """How Ansible reaches these machines, for `connect`; `options` as for `told`, such as another inventory's."""
    return told(hosts, _ASKED, *options)


def told(hosts: str, expression: str, *options: str) -> dict[str, Any]:
    """What an expression comes to in the lab's inventory: {inventory name: value}."""
    inventory = str(ROOT / "inventory/lab")
    answer = _ansible(["ansible", hosts, "-i", inventory, "-m", "debug", "-a", f"msg={{{{ {expression} }}}}", *options])
    (task,) = _report(answer.stdout)["plays"][0]["tasks"]
    return {name: result["msg"] for name, result in task["hosts"].items()}


@pytest.fixture(scope="session")
def lab() -> dict[str, str]:
    """The lab's id and directory."""
    return told("localhost", "{'id': lab_id, 'dir': lab_dir}")["localhost"]


@dataclass(frozen=True)
class Played:
    """What a playbook did.

    ok: no host failed. changed: (task without its role, host) of what changed or, with --check, would.
    said: what failed hosts said, with line breaks taken out. diff: the texts before and after that --diff compares.
    results: task without its role → the results of its runs, in order.
    """

    ok: bool
    changed: list[tuple[str, str]]
    said: str
    diff: tuple[str, str]
    results: dict[str, list[dict[str, Any]]]


Play = Callable[..., Played]


@pytest.fixture(scope="module")
def play(request: pytest.FixtureRequest) -> Play:
    """Run a playbook, by default the scenario's converge.yml: play("--check", "--diff"), play(some_variable=value)."""
    converge = request.path.parent.parent / "converge.yml"

    def run(*options: str, playbook: Path = converge, **variables: Any) -> Played:
        command = ["ansible-playbook", "-i", str(ROOT / "inventory/lab"), *options, str(playbook)]
        if variables:
            command += ["-e", json.dumps(variables)]
        done = _ansible(command)
        report = _report(done.stdout)
        tasks = [
            (task["task"]["name"].rsplit(" : ", 1)[-1], host, result)
            for one in report["plays"]
            for task in one["tasks"]
            for host, result in task["hosts"].items()
        ]
        results: dict[str, list[dict[str, Any]]] = {}
        for name, _host, result in tasks:
            results.setdefault(name, []).append(result)
        failed = [result for _name, _host, result in tasks if result.get("failed") or result.get("unreachable")]
        diffs = [diff for _name, _host, result in tasks for diff in _diffs(result)]
        return Played(
            ok=done.returncode == 0,
            changed=[(name, host) for name, host, result in tasks if result.get("changed")],
            said=re.sub(r"\s+", " ", " ".join(str(result.get("msg", result)) for result in failed)),
            diff=(
                "".join(str(diff.get("before", "")) for diff in diffs),
                "".join(str(diff.get("after", "")) for diff in diffs),
            ),
            results=results,
        )

    return run


def _diffs(result: dict[str, Any]) -> list[dict[str, Any]]:
    diff = result.get("diff") or []
    return [diff] if isinstance(diff, dict) else diff


def _ansible(command: list[str]) -> subprocess.CompletedProcess[str]:
    env = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"),
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json",
    }
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)


def _report(output: str) -> dict[str, Any]:
    """The callback's report, which comes last: a plugin may have printed lines before it."""
    start = output.rfind("\n{\n") + 1
    return json.loads(output[start:])


def connect(connection: dict[str, Any]) -> Host:
    return testinfra.get_host(
        f"ssh://{connection['user']}@{connection['host']}",
        ssh_identity_file=connection["key"],
        ssh_extra_args=connection["args"],
    )


@pytest.fixture(scope="session")
def node(connections: dict[str, dict[str, Any]]) -> Host:
    """The simulated Proxmox node."""
    return connect(connections["lab-pve1"])


@pytest.fixture(scope="session")
def guest(connections: dict[str, dict[str, Any]]) -> Host:
    """Guest 129 on it."""
    return connect(connections["lab-gpu1"])


Fault = Callable[[str], contextlib.AbstractContextManager[None]]


@pytest.fixture
def fault(node: Host) -> Fault:
    """A switch of the lab: `with fault("smi_hang"):` plays it for the length of the block."""
    switch = "env PYTHONPATH=/srv/servelab-lab python3 -P -m servelab_lab.faults"

    @contextlib.contextmanager
    def playing(name: str) -> Iterator[None]:
        said = node.check_output(f"{switch} {name} on")
        # "already on" would be somebody else's, and is not ours to switch off.
        assert said.startswith(f"on: {name}: ")
        try:
            yield
        finally:
            node.check_output(f"{switch} {name} off")

    return playing


def reboot(node: Host) -> str:
    """Restart the lab's node as a person does; systemd's verdict on what came up."""
    done = subprocess.run([LAB, "reboot"], cwd=ROOT, capture_output=True, text=True, check=False, timeout=120)
    said = done.stdout.splitlines()
    assert said, done.stderr
    # ssh has to come up too.
    for _ in range(50):
        if node.run("true").rc == 0:
            break
        time.sleep(0.2)
    return said[0]
