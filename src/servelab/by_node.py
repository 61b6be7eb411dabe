"""`servelab by-node PLAYBOOK [OPTION…]`: a playbook for every node with its guests, each in a run of its own, at once.

In one run of Ansible all machines wait for the slowest at the end of each play. Machines that do not need each other
(`parts` of inventory_check) need not: each part gets its own ansible-playbook, limited to it. What is in no part, as
the lab's own machine, comes before them.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import IO, Any

CHECK = "playbooks/validate.yml"


class ByNodeError(Exception):
    """Nothing was run; the text says why."""


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "by-node",
        help="run a playbook for every node by itself, all at the same time",
        epilog="Where a password is needed, give it in a file: nobody can be asked by several runs at once.",
    )
    parser.add_argument("playbook", metavar="PLAYBOOK", help="as site.yml")
    parser.add_argument(
        "options", nargs=argparse.REMAINDER, metavar="OPTION", help="ansible-playbook's own, as -i INVENTORY or --check"
    )


def run(args: argparse.Namespace) -> int:
    try:
        first, parts = plan(args.playbook, args.options)
    except ByNodeError as error:
        print(f"servelab by-node: {error}", file=sys.stderr)
        return 2
    runs = Runs(args.playbook, args.options)
    old = {number: signal.signal(number, runs.pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if first and (status := runs.play([first])):
            return status
        return runs.play(parts)
    finally:
        for number, handler in old.items():
            signal.signal(number, handler)


def plan(playbook: str, options: Sequence[str]) -> tuple[list[str], list[list[str]]]:
    """The machines that come before the others, and the parts. Raises ByNodeError."""
    for word in options:
        if word == "--limit" or word.startswith(("--limit=", "-l")):
            raise ByNodeError(f"{word}: the limit is what this command sets; ansible-playbook itself takes one.")
    for path in (playbook, CHECK):
        if not Path(path).is_file():
            raise ByNodeError(f"There is no {path} here; run it from the collection's directory.")
    found = _ask(options)
    parts = [list(map(str, part)) for part in found["parts"]]
    spread = {host for part in parts for host in part}
    return [host for host in found["machines"] if host not in spread], parts


def _ask(options: Sequence[str]) -> dict[str, Any]:
    """What inventory_check returned: `parts`, and `machines`, all that the inventory has."""
    import ansible_runner

    found: dict[str, Any] = {}
    said: list[str] = []

    def listen(event: dict[str, Any]) -> bool:
        result = (event.get("event_data") or {}).get("res") or {}
        if event.get("event") == "runner_on_failed":
            said.append(str(result.get("msg")))
        elif "parts" in result:
            found.update(result)
        elif event.get("event") in ("warning", "error", "verbose"):
            said.append(str(event.get("stdout")))
        return False

    with tempfile.TemporaryDirectory(prefix="servelab-by-node-") as scratch:
        ansible_runner.run(
            private_data_dir=scratch,
            project_dir=str(Path.cwd()),
            playbook=CHECK,
            cmdline=shlex.join(options) or None,
            envvars={"PWD": str(Path.cwd())},
            event_handler=listen,
            quiet=True,
        )
    if not found:
        raise ByNodeError("\n".join(filter(None, said)) or f"{CHECK} ended without a word; run it by itself.")
    return found


@dataclass
class Runs:
    """Runs of one playbook, each limited to some machines. `pass_on` is a signal's handler."""

    playbook: str
    options: Sequence[str]
    _processes: list[subprocess.Popen[str]] = field(default_factory=list)
    _caught: int = 0

    def play(self, parts: Sequence[Sequence[str]]) -> int:
        """Run all at once, each line behind its part's first machine; returns the highest exit status."""
        began = time.monotonic()
        width = max(len(part[0]) for part in parts)
        ends: dict[str, tuple[int, float]] = {}

        def follow(part: Sequence[str], process: subprocess.Popen[str], lines: IO[str]) -> None:
            for line in lines:
                print(f"{part[0]:{width}} | {line}", end="", flush=True)
            ends[part[0]] = process.wait(), time.monotonic() - began

        readers = []
        for part in parts:
            process = self._start(part)
            assert process.stdout is not None
            readers.append(threading.Thread(target=follow, args=(part, process, process.stdout)))
            readers[-1].start()
        if self._caught:  # while they were started
            self.pass_on(self._caught, None)
        for reader in readers:
            reader.join()
        self._processes.clear()
        for part in parts:
            status, seconds = ends[part[0]]
            print(f"{', '.join(part)}: {'ok' if status == 0 else f'ended with {status}'} after {seconds:.0f} s")
        return 128 + self._caught if self._caught else max(abs(status) for status, _ in ends.values())

    def _start(self, part: Sequence[str]) -> subprocess.Popen[str]:
        words = ["ansible-playbook", self.playbook, "--limit", ",".join(part), *self.options]
        color = {"ANSIBLE_FORCE_COLOR": "1"} if sys.stdout.isatty() else {}
        # A session of its own: a Ctrl-C reaches it from here, once, and not also from the terminal.
        process = subprocess.Popen(
            words,
            env={**color, **os.environ},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self._processes.append(process)
        return process

    def pass_on(self, number: int, frame: FrameType | None) -> None:
        self._caught = number
        for process in self._processes:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                if process.poll() is None:
                    os.killpg(process.pid, number)
