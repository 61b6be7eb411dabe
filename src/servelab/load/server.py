"""What is asked of the server besides load: who it is, an empty cache. Plain blocking HTTP, never during a level."""

from __future__ import annotations

import http.client
import json
import socket
import time
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from servelab.shared.redact import redact_value

# The same for one start of a server and hardly for two: tells whether the server at the end is the one at the start.
START_MARKS = ("model_path", "version", "random_seed", "startup_time", "launch_command", "port", "simulated")


class ServerError(Exception):
    """The server cannot be used; the message is one sentence for a person."""


@dataclass
class Server:
    """One server, addressed as a person wrote it. `key`: the API key, sent with every request, shown nowhere."""

    url: str
    key: str | None = None
    timeout: float = 20.0
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme != "http" or not parts.hostname:
            raise ServerError(
                f"{self.url!r} is not an address like http://127.0.0.1:30000 (https is not supported yet)"
            )
        if parts.username or parts.password or parts.query:
            raise ServerError("the server's address must not contain a user, a password or a query; use --api-key-file")
        try:
            self.port = parts.port or 80
        except ValueError as problem:
            raise ServerError(f"{self.url!r}: {problem}") from problem
        self.host = parts.hostname
        self.path = parts.path.rstrip("/")

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def address(self) -> tuple[int, tuple[str, int]]:
        """(family, socket address) to connect to."""
        try:
            found = socket.getaddrinfo(self.host, self.port, type=socket.SOCK_STREAM)
        except OSError as problem:
            raise ServerError(f"the name {self.host} cannot be resolved: {problem.strerror}") from problem
        family, _, _, _, address = found[0]
        return int(family), (str(address[0]), int(address[1]))

    def request(self, method: str, path: str) -> tuple[int, bytes]:
        """(status, body). Raises ServerError when there is no HTTP answer."""
        connection = http.client.HTTPConnection(self.host, self.port, timeout=self.timeout)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        try:
            connection.request(method, self.path + path, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as problem:
            raise ServerError(f"no answer from {self.url}{path}: {problem or type(problem).__name__}") from problem
        finally:
            connection.close()

    def model(self) -> str:
        """The name of the model that it serves."""
        status, body = self.request("GET", "/v1/models")
        if status in (401, 403):
            raise ServerError(f"{self.url} wants another API key (HTTP {status}); give it with --api-key-file")
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as problem:
            raise ServerError(
                f"{self.url}/v1/models does not name a model (HTTP {status}): is this SGLang?"
            ) from problem

    def info(self) -> dict[str, Any] | None:
        """Its /server_info (/get_server_info of older releases) without secrets; None where it has neither."""
        for path in ("/server_info", "/get_server_info"):
            status, body = self.request("GET", path)
            if status == 200:
                try:
                    info = json.loads(body)
                except ValueError:
                    continue
                if isinstance(info, dict):
                    return dict(redact_value(info))
        return None

    def flush_cache(self, patience: float = 10.0) -> str:
        """Empty the prefix cache: `flushed`, `absent` (it cannot), or `busy` (requests were still running)."""
        until = time.monotonic() + patience
        while True:
            status, _ = self.request("POST", "/flush_cache")
            if status == 200:
                return "flushed"
            if status in (404, 405):
                return "absent"
            if time.monotonic() >= until:
                return "busy" if status == 400 else f"HTTP {status}"
            time.sleep(0.2)


def simulated(info: dict[str, Any] | None) -> dict[str, Any] | None:
    """{"profile", "time_scale"} of a simulated server, None of a real one."""
    value = (info or {}).get("simulated")
    return value if isinstance(value, dict) else None


def late_seconds(info: dict[str, Any] | None) -> float | None:
    """Wall seconds by which a simulated server has fallen behind its own schedule; None of a real one."""
    value = (info or {}).get("simulated_late_seconds")
    return float(value) if isinstance(value, int | float) else None


def accept_length(info: dict[str, Any] | None) -> float | None:
    """The mean accept length since the last cache flush; None when speculation is off or nothing was verified."""
    if not info or not info.get("speculative_algorithm"):
        return None
    for state in info.get("internal_states") or ():
        value = state.get("avg_spec_accept_length") if isinstance(state, dict) else None
        if isinstance(value, int | float) and value > 0:
            return float(value)
    return None


def most_running(info: dict[str, Any] | None) -> int | None:
    """How many requests the server runs at a time; above it a level measures the queue. None: unknown."""
    for state in (info or {}).get("internal_states") or ():
        value = state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
        if isinstance(value, int):
            return value * int((info or {}).get("dp_size") or 1)
    value = (info or {}).get("max_running_requests")
    return value if isinstance(value, int) else None


def same_start(before: dict[str, Any] | None, after: dict[str, Any] | None) -> list[str]:
    """Names of what differs and should not if both came from one start of one server."""
    if before is None or after is None:
        return [] if before is after else ["server_info"]
    return [mark for mark in START_MARKS if before.get(mark) != after.get(mark)]
