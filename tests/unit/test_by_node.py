"""A playbook for every node by itself: with real runs of Ansible over local connections, none of which needs a lab."""

import argparse
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from servelab import by_node
from servelab.shared.inventory_parts import parts

ROOT = Path(__file__).parents[2]

# In one run of Ansible nobody would ever make the file: the guests' play begins when all nodes are through theirs.
PLAYBOOK = """
- hosts: pve_nodes
  connection: local
  gather_facts: false
  tasks:
    - name: Wait for the guest of the other node
      ansible.builtin.wait_for: {path: "%(dir)s/lab-gpu1", timeout: 40}
      when: inventory_hostname == 'lab-pve2'
- hosts: gpu_guests
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
  tasks:
    - name: Say that it was there
      ansible.builtin.file: {path: "%(dir)s/{{ inventory_hostname }}", state: touch}
    - name: Fail where it is asked for
      ansible.builtin.fail: {msg: as asked}
      when: inventory_hostname == fails | default('')
    - name: Stay
      ansible.builtin.wait_for: {timeout: "{{ stay | default(0) | int }}"}
      when: stay is defined
"""
NODES = str(ROOT / "inventory/lab-nodes")


@pytest.fixture
def playbook(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    path = tmp_path / "play.yml"
    path.write_text(PLAYBOOK % {"dir": tmp_path})
    return path


def run(playbook, *options):
    return by_node.run(argparse.Namespace(playbook=str(playbook), options=["-i", NODES, *options]))


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ({}, [["n1", "a"], ["n2", "b", "c"], ["d"]]),
        ({"a": ["a", "b"]}, [["n1", "n2", "a", "b", "c"], ["d"]]),  # they serve together, so their nodes wait too
        ({"d": ["d", "a"]}, [["n1", "a", "d"], ["n2", "b", "c"]]),
        ({"a": ["a", "elsewhere"]}, [["n1", "a"], ["n2", "b", "c"], ["d"]]),  # told by the inventory's rules
    ],
)
def test_a_node_with_its_guests_and_who_serves_with_them(given, found):
    nodes = {"a": "n1", "b": "n2", "c": "n2"}
    hosts = {
        host: {
            **({"pve_node": nodes[host]} if host in nodes else {}),
            **({"sglang_server_nodes": given[host]} if host in given else {}),
        }
        for host in ("n1", "n2", "a", "b", "c", "d")
    }
    assert parts(hosts, {"pve_nodes": ["n1", "n2"], "gpu_guests": ["a", "b", "c", "d"]}) == found


def test_a_guest_does_not_wait_for_another_node(playbook, tmp_path, capfd):
    assert run(playbook) == 0
    assert (tmp_path / "lab-gpu1").exists()
    assert (tmp_path / "lab-gpu3").exists()
    lines = capfd.readouterr().out.splitlines()
    assert lines[0].startswith("localhost | ")  # the lab's machine before all others
    firsts = [line.partition(" ")[0] for line in lines if " | PLAY RECAP" in line]
    assert firsts == ["localhost", "lab-pve1", "lab-pve2"]
    assert [line.rpartition(" after ")[0] for line in lines if " after " in line] == [
        "localhost: ok",
        "lab-pve1, lab-gpu1: ok",
        "lab-pve2, lab-gpu3: ok",
    ]


def test_one_that_fails_is_told_and_the_others_go_on(playbook, tmp_path, capfd):
    (tmp_path / "lab-gpu1").touch()
    assert run(playbook, "-e", "fails=lab-gpu1") == 2
    assert (tmp_path / "lab-gpu3").exists()
    lines = capfd.readouterr().out.splitlines()
    assert [line.rpartition(" after ")[0] for line in lines[-2:]] == [
        "lab-pve1, lab-gpu1: ended with 2",
        "lab-pve2, lab-gpu3: ok",
    ]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--limit", "lab-gpu1"], "the limit is what this command sets"),
        (["-llab-gpu1"], "the limit is what this command sets"),
        (["-e", "pve_node=nowhere"], "pve_node is 'nowhere', which is no host of the group pve_nodes"),
    ],
)
def test_what_is_wrong_is_said_before_anything_runs(playbook, tmp_path, capfd, options, said):
    assert run(playbook, *options) == 2
    assert said in capfd.readouterr().err
    assert not (tmp_path / "lab-gpu1").exists()


def test_a_playbook_that_is_not_there(playbook, capfd):
    assert by_node.run(argparse.Namespace(playbook="nothing.yml", options=[])) == 2
    assert "There is no nothing.yml here" in capfd.readouterr().err


def test_an_interruption_reaches_all_runs(playbook, tmp_path):
    words = [sys.executable, "-m", "servelab", "by-node", str(playbook), "-i", NODES, "-e", "stay=600"]
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    until = time.monotonic() + 60
    while not ((tmp_path / "lab-gpu1").exists() and (tmp_path / "lab-gpu3").exists()):
        assert time.monotonic() < until
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=30)
    assert process.returncode == 128 + signal.SIGINT
    assert "lab-pve1, lab-gpu1: ended with" in out
    assert "lab-pve2, lab-gpu3: ended with" in out
