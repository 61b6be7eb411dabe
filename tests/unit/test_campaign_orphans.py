"""Playbooks that outlived their campaign are ended, and nothing else is."""

import os
import subprocess
import sys

import pytest

from servelab.campaign import orphans

# Python's own arguments: the second word is what a playbook's command line has there.
SLEEP = "import time; print('up', flush=True); time.sleep(60)"
DEAF = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); " + SLEEP


@pytest.fixture
def start():
    started = []

    def begin(results, script=SLEEP, name="/x/bin/ansible-playbook"):
        command = [sys.executable, "-c", script, name, "bench.yml"]
        environment = {**os.environ, **(orphans.mark(results) if results else {})}
        process = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE)
        process.stdout.readline()
        started.append(process)
        return process

    yield begin
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


def test_a_playbook_of_these_results_is_ended_and_others_are_left(tmp_path, start):
    mine = start(tmp_path / "results")
    others = [
        start(tmp_path / "other"),
        start(None),
        start(tmp_path / "results", name="sglang-server"),
    ]
    said = []
    orphans.end(tmp_path / "results", said.append, patience=10)
    assert mine.wait(10) == -15
    assert [process.poll() for process in others] == [None] * 3
    assert said == [f"a campaign that was killed left its playbook running (pid {mine.pid}): ending it"]


def test_one_that_does_not_listen_is_killed(tmp_path, start):
    deaf = start(tmp_path, DEAF)
    orphans.end(tmp_path, lambda _: None, patience=0.5)
    assert deaf.wait(10) == -9


def test_nothing_is_said_where_nothing_is_left(tmp_path):
    orphans.end(tmp_path, lambda _: pytest.fail("nothing is there"))
