"""Run the simulated server as a process for tests: without cards, with a few of SGLang's flags, faster than life."""

from __future__ import annotations

import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servelab_lab.server.config import NO_GPU, VARIABLE

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path(__file__).parent / "fixtures" / "sim" / "sglang"


def release(version: str, directory: Path) -> str:
    """Return a package that says it is another release, below `directory`."""
    package = directory / version / "sglang"
    shutil.copytree(PACKAGE, package)
    (package / "_version.py").write_text(f'__version__ = "{version}"\n')
    return str(package)


def free_port() -> int:
    """Return a port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Sim:
    """One server process; a context manager that leaves neither it nor its children behind."""

    def __init__(
        self,
        directory: Path,
        *flags: str,
        port: int | None = None,
        environ: Mapping[str, str] | None = None,
        before: Sequence[str] = (),
        **config: Any,
    ) -> None:
        self.port = port or free_port()
        settings = {"sglang_package": str(PACKAGE), "time_scale": 50, "load_seconds": 1, **config}
        path = directory / f"server-{self.port}.json"
        path.write_text(json.dumps(settings))
        environment = {
            **os.environ,
            VARIABLE: str(path),
            NO_GPU: "1",
            "PYTHONPATH": f"{ROOT}/roles/lab_node/files:{ROOT}/src",
            **(environ or {}),
        }
        self.out, self.err = directory / f"{self.port}.out", directory / f"{self.port}.err"
        command = [*before, sys.executable, "-m", "servelab_lab.server", "--model-path", "/m"]
        command += ["--port", str(self.port), *flags]
        with self.out.open("wb") as out, self.err.open("wb") as err:
            # Its own session, so that children which outlive it can be found and ended.
            self.process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, start_new_session=True)

    def __enter__(self) -> Sim:
        return self

    def __exit__(self, *_: object) -> None:
        for pid in [self.process.pid, *self.children()]:
            try:
                os.kill(pid, 9)
            except ProcessLookupError:
                continue
        self.process.wait()

    def log(self) -> str:
        """Return stderr so far, carriage returns and all."""
        return self.err.read_bytes().decode()

    def children(self) -> dict[int, str]:
        """Return the pids and command lines of all other processes of this server's session that live."""
        found = {}
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                fields = (directory / "stat").read_text().rpartition(")")[2].split()
                title = (directory / "cmdline").read_bytes().rstrip(b"\0").decode()
            except (FileNotFoundError, ProcessLookupError):
                continue
            # State, parent, group, session.
            if fields[0] != "Z" and int(fields[3]) == self.process.pid and int(directory.name) != self.process.pid:
                found[int(directory.name)] = title
        return found

    def ask(
        self, method: str, path: str, body: Any = None, headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Send one request on a connection of its own; return status and body."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        raw = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        connection.request(method, path, raw, {"Content-Type": "application/json", **(headers or {})})
        answer = connection.getresponse()
        content = answer.read()
        connection.close()
        return answer.status, content

    def document(self, method: str, path: str, body: Any = None) -> Any:
        """Send one request that must succeed; return its JSON document."""
        status, content = self.ask(method, path, body)
        assert status == 200, content
        return json.loads(content)

    def wait_ready(self, seconds: float = 20) -> Sim:
        """Wait until /health says 200."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            assert self.process.poll() is None, self.log()
            try:
                if self.ask("GET", "/health")[0] == 200:
                    return self
            except OSError:
                pass
            time.sleep(0.05)
        raise AssertionError(self.log())
