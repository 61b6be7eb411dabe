"""What is asked of the server besides load: who it is, an empty cache. Plain blocking HTTP, never during a level."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from base64 import b64encode
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from servelab.load import tls
from servelab.load.wire import Wire
from servelab.shared.redact import redact_value

# The same for one start of a server and hardly for two: tells whether the server at the end is the one at the start.
START_MARKS = ("model_path", "version", "random_seed", "startup_time", "launch_command", "port", "simulated")

HEALTH_SECONDS = 30.0


class ServerError(Exception):
    """The server cannot be used; the message is one sentence for a person."""


@dataclass
class Server:
    """One server, addressed as a person wrote it. `key`: the API key, sent with every request, shown nowhere.

    `proxy`: an http:// address, or None; the environment's proxies are not used, because what is measured should be
    what was asked for. `ca_file`: certificates to trust instead of the system's.
    """

    url: str
    key: str | None = None
    timeout: float = 20.0
    proxy: str | None = None
    ca_file: Path | None = None
    host: str = field(init=False)
    port: int = field(init=False)
    path: str = field(init=False)
    tls: bool = field(init=False)

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ServerError(f"{self.url!r} is not an address like http://127.0.0.1:30000")
        if parts.username or parts.password or parts.query:
            raise ServerError("the server's address must not contain a user, a password or a query; use --api-key-file")
        self.tls = parts.scheme == "https"
        try:
            self.port = parts.port or (443 if self.tls else 80)
        except ValueError as problem:
            raise ServerError(f"{self.url!r}: {problem}") from problem
        self.host = parts.hostname
        self.path = parts.path.rstrip("/")
        self._proxy_host, self._proxy_port, self._proxy_user = "", 0, None
        if self.proxy is not None:
            asked = urlsplit(self.proxy)
            try:
                self._proxy_host, self._proxy_port = asked.hostname or "", asked.port or 8080
            except ValueError as problem:
                raise ServerError(f"proxy: {problem}") from problem
            if asked.scheme != "http" or not self._proxy_host:
                raise ServerError("the proxy is not an address like http://10.0.0.1:3128")
            if asked.username is not None:
                self._proxy_user = f"{unquote(asked.username)}:{unquote(asked.password or '')}"

    @property
    def host_header(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def way(self) -> str:
        """How bytes travel, for the result: `direct`, `TLS`, `proxy` or `TLS through a proxy`."""
        return {(False, False): "direct", (True, False): "TLS", (False, True): "proxy"}.get(
            (self.tls, self.proxy is not None), "TLS through a proxy"
        )

    def head(self, path: str) -> str:
        """The beginning of a streaming request to `path` (the API's own): request line and headers but the length."""
        plain_proxy = self.proxy is not None and not self.tls
        target = f"http://{self.host_header}{self.path}{path}" if plain_proxy else f"{self.path}{path}"
        lines = [f"POST {target} HTTP/1.1", f"Host: {self.host_header}", "User-Agent: servelab"]
        lines += ["Accept: text/event-stream", "Content-Type: application/json"]
        if self.key:
            lines.append(f"Authorization: Bearer {self.key}")
        if plain_proxy and self._proxy_user:
            lines.append(f"Proxy-Authorization: Basic {_basic(self._proxy_user)}")
        return "".join(f"{line}\r\n" for line in lines)

    def wire(self, kernel_stamps: bool) -> Wire:
        """A wire to it. Kernel stamps only without TLS; `stamps` says so. Raises ServerError."""
        host, port = (self._proxy_host, self._proxy_port) if self.proxy is not None else (self.host, self.port)
        try:
            found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
        except OSError as problem:
            raise ServerError(f"the name {host} cannot be resolved: {problem.strerror}") from problem
        family, _, _, _, address = found[0]
        where = (int(family), (str(address[0]), int(address[1])))
        return Wire(where, kernel_stamps, self._wrap() if self.tls else None)

    def _wrap(self) -> Callable[[socket.socket], Any]:
        made = self._context()
        tunnel = self.host_header if self.proxy is not None else None
        return lambda sock: tls.TlsSocket(sock, made, self.host, tunnel, self._proxy_user)

    def _context(self) -> Any:
        try:
            return tls.context(self.ca_file)
        except OSError as problem:
            raise ServerError(f"--ca-file {self.ca_file}: {problem}") from problem

    def request(self, method: str, path: str, timeout: float | None = None) -> tuple[int, bytes]:
        """(status, body). Raises ServerError when there is no HTTP answer."""
        seconds = timeout or self.timeout
        host, port = (self._proxy_host, self._proxy_port) if self.proxy is not None else (self.host, self.port)
        connection: http.client.HTTPConnection
        if self.tls:
            connection = http.client.HTTPSConnection(host, port, timeout=seconds, context=self._context())
        else:
            connection = http.client.HTTPConnection(host, port, timeout=seconds)
        headers = {"Authorization": f"Bearer {self.key}"} if self.key else {}
        target = self.path + path
        if self.proxy is not None:
            basic = {"Proxy-Authorization": f"Basic {_basic(self._proxy_user)}"} if self._proxy_user else {}
            if self.tls:
                connection.set_tunnel(self.host, self.port, basic)
            else:
                headers |= basic
                target = f"http://{self.host_header}{target}"
        try:
            connection.request(method, target, headers=headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as problem:
            raise ServerError(f"no answer from {self.url}{path}: {problem or type(problem).__name__}") from problem
        finally:
            connection.close()

    def healthy(self) -> None:
        """Raises ServerError where its /health is not well. It generates a token there and may take over a second,
        or long behind a prefill; servers without it count as well."""
        status, body = self.request("GET", "/health", max(self.timeout, HEALTH_SECONDS))
        if status not in (200, 404, 405):
            said = body[:200].decode(errors="replace").strip()
            raise ServerError(
                f"{self.url}/health says HTTP {status}{': ' + said if said else ''}: it is not ready to serve"
            )

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


def _basic(user: str) -> str:
    return b64encode(user.encode()).decode()


def gpus(info: dict[str, Any] | None) -> int | None:
    """How many GPUs the server uses; None: unknown."""
    sizes = [(info or {}).get(name) for name in ("tp_size", "pp_size")]
    if not all(type(size) is int for size in sizes):
        return None
    copies = (info or {}).get("dp_size") or 1
    # With data parallel attention the copies share the cards of the tensor parallel group.
    return int(sizes[0] * sizes[1] * (1 if (info or {}).get("enable_dp_attention") else copies))  # type: ignore[operator]


def tells_verify_steps(info: dict[str, Any] | None) -> bool:
    """Whether its OpenAI routes tell the verify steps of a request when asked: SGLang 0.5.19, under speculation."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", str((info or {}).get("version")))
    return bool((info or {}).get("speculative_algorithm") and found and tuple(map(int, found.groups())) >= (0, 5, 19))


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
