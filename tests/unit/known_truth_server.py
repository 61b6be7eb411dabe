"""A streaming completions server whose behaviour is known to the nanosecond, for tests of the load client.

One thread per connection, so that a slow stream delays no other. It notes when it had read each request and when it
sent each delta (CLOCK_REALTIME, ns): what the client measures is compared with what really happened, not with what
should have.
"""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field


@dataclass
class Script:
    """What every response looks like. `tokens`: of each delta; `fault`: how the requests in `faulty` go wrong."""

    tokens: list[int]
    first_s: float = 0.03
    gap_s: float = 0.01
    continuous_usage: bool = True
    fault: str | None = None
    faulty: frozenset[int] = frozenset()
    close_each: bool = False
    flush_status: int = 200
    health_status: int = 200
    one_at_a_time: bool = False
    incremental: bool = False  # /generate sends what is new instead of repeating it all
    reasoning: int = 0  # so many deltas of a chat are thoughts
    cached: int | None = None
    info: dict[str, object] = field(default_factory=dict)


@dataclass
class Served:
    """The truth about one response."""

    prompt: str
    received: int
    sent: list[int]


class KnownTruthServer:
    def __init__(self, script: Script, tls: ssl.SSLContext | None = None) -> None:
        self.script = script
        self._tls = tls
        self._turn = threading.Lock()
        self.served: list[Served] = []
        self.requests: list[dict[str, object]] = []
        self.heads: list[str] = []
        self.flushes = 0
        self.at_once = 0
        self.most_at_once = 0
        self._lock = threading.Lock()
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=256)
        self.port = self._listener.getsockname()[1]
        self.url = f"https://localhost:{self.port}" if tls else f"http://127.0.0.1:{self.port}"
        self._open: set[socket.socket] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            for sock in self._open:
                with contextlib.suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                with self._lock:
                    self._open.add(sock)
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with contextlib.suppress(OSError), self._tls.wrap_socket(sock, server_side=True) if self._tls else sock as sock:
            buffer = b""
            while True:
                while b"\r\n\r\n" not in buffer:
                    data = sock.recv(65536)
                    if not data:
                        return
                    buffer += data
                head, buffer = buffer.split(b"\r\n\r\n", 1)
                method, path, _ = head.split(b"\r\n")[0].decode().split()
                self.heads.append(head.decode())
                length = 0
                for line in head.split(b"\r\n")[1:]:
                    if line.lower().startswith(b"content-length:"):
                        length = int(line.split(b":")[1])
                while len(buffer) < length:
                    buffer += sock.recv(65536)
                body, buffer = buffer[:length], buffer[length:]
                received = time.time_ns()
                if (path.startswith("/v1/") or path == "/generate") and method == "POST":
                    if not self._complete(sock, json.loads(body), received):
                        return
                else:
                    self._plain(sock, path)

    def _plain(self, sock: socket.socket, path: str) -> None:
        status, answer = 404, "not found"
        if path == "/v1/models":
            status, answer = 200, json.dumps({"object": "list", "data": [{"id": "known-truth"}]})
        elif path == "/server_info":
            status, answer = 200, json.dumps({"version": "0.5.23", "random_seed": 7, **self.script.info})
        elif path == "/health":
            status, answer = self.script.health_status, ""
        elif path == "/flush_cache":
            self.flushes += 1
            status, answer = self.script.flush_status, "Cache flushed."
        sock.sendall(f"HTTP/1.1 {status} X\r\nContent-Length: {len(answer)}\r\n\r\n{answer}".encode())

    def _complete(self, sock: socket.socket, request: dict[str, object], received: int) -> bool:
        script = self.script
        with self._lock:
            number = len(self.requests)
            self.requests.append(request)
            self.at_once += 1
            self.most_at_once = max(self.most_at_once, self.at_once)
        try:
            fault = script.fault if number in script.faulty else None
            if fault == "http_500":
                sock.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 4\r\n\r\nboom")
                return True
            if fault == "hang":
                time.sleep(60)
            close = "Connection: close\r\n" if script.close_each else ""
            sock.sendall(
                f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\n{close}"
                "Transfer-Encoding: chunked\r\n\r\n".encode()
            )
            sent = []
            with self._turn if script.one_at_a_time else contextlib.nullcontext():
                time.sleep(script.first_s)
                native = "sampling_params" in request
                for message in self._native() if native else self._messages("messages" in request, fault):
                    if isinstance(message, float):
                        time.sleep(message)
                        continue
                    if message == "cut":
                        return False
                    event = f"data: {message}\n\n".encode()
                    if '"finish_reason": null' in message:
                        sent.append(time.time_ns())
                    sock.sendall(b"%x\r\n%s\r\n" % (len(event), event))
                sock.sendall(b"0\r\n\r\n")
            given = [request.get(key) for key in ("prompt", "text", "input_ids")]
            prompt = str(next((p for p in given if p), None) or request["messages"][0]["content"])  # type: ignore[index]
            with self._lock:
                self.served.append(Served(prompt, received, sent))
            return not script.close_each
        finally:
            with self._lock:
                self.at_once -= 1

    def _native(self) -> Iterator[str | float]:
        """The events of /generate: everything again and again, or what is new."""
        total, last = 0, len(self.script.tokens) - 1
        for number, tokens in enumerate(self.script.tokens):
            if number:
                yield self.script.gap_s
            total += tokens
            shown = tokens if self.script.incremental else total
            meta = {"prompt_tokens": 11, "completion_tokens": total, "cached_tokens": 3, "finish_reason": None}
            if number == last:
                meta |= {"finish_reason": {"type": "length", "length": total}, "spec_verify_ct": last}
            yield json.dumps({"text": " w" * shown, "output_ids": [7] * shown, "meta_info": meta})
        yield "[DONE]"

    def _messages(self, chat: bool, fault: str | None) -> Iterator[str | float]:
        """Deltas, with seconds to wait between them."""
        script = self.script
        exact = script.continuous_usage and fault != "no_usage"
        total = 0
        for number, tokens in enumerate(script.tokens):
            if number:
                yield script.gap_s
            if number == 2 and fault == "cut":
                yield "cut"
            if number == 2 and fault == "in_band":
                yield json.dumps({"error": {"message": "engine died", "code": 500}})
                yield "[DONE]"
                return
            total += tokens
            text = " w" * tokens
            channel = "reasoning_content" if number < script.reasoning else "content"
            choice = {"index": 0, "finish_reason": None} | ({"delta": {channel: text}} if chat else {"text": text})
            usage = {"prompt_tokens": 11, "completion_tokens": total}
            if script.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": script.cached}  # type: ignore[assignment]
            yield json.dumps({"choices": [choice], "usage": usage if exact else None})
        last = {"index": 0, "finish_reason": "length"} | ({"delta": {}} if chat else {"text": ""})
        yield json.dumps({"choices": [last]})
        if fault != "no_usage":
            usage = {"prompt_tokens": 11, "completion_tokens": total + (1 if fault == "wrong_token_count" else 0)}
            yield json.dumps({"choices": [], "usage": usage})
        yield "[DONE]"
