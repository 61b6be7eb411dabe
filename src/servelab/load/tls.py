"""The plainer path: TLS, straight or through a proxy. It stands in a socket's place and does on the way what has to
be done before the first request: the proxy's CONNECT and the handshake. Times are those of the read, on
CLOCK_MONOTONIC: the kernel stamps packets, and nobody can say which packets a decrypted byte came from."""

from __future__ import annotations

import base64
import socket
import ssl
from pathlib import Path
from typing import Any

from servelab.load.wire import NotConnected, WantsRead

PROXY, HANDSHAKE, OPEN = range(3)


def context(ca_file: Path | None) -> ssl.SSLContext:
    """Certificates are always checked, against the system's authorities or those in `ca_file`.

    Raises OSError (ssl.SSLError) for a file without certificates.
    """
    made = ssl.create_default_context(cafile=str(ca_file) if ca_file else None)
    made.set_alpn_protocols(["http/1.1"])
    return made


class TlsSocket:
    """A non-blocking socket that speaks TLS to `host`. `connect_to`: "host:port" to ask a proxy for first, or None;
    `authorization`: the proxy's Basic credentials ("user:password"), or None.

    Everything may raise OSError: a refused tunnel or a bad certificate is a failed connection.
    """

    def __init__(
        self,
        sock: socket.socket,
        tls: ssl.SSLContext,
        host: str,
        connect_to: str | None = None,
        authorization: str | None = None,
    ) -> None:
        self._plain = sock
        self._tls = tls
        self._host = host
        self._state = HANDSHAKE if connect_to is None else PROXY
        self._ask = b""
        self._answer = b""
        if connect_to is not None:
            basic = base64.b64encode(authorization.encode()).decode() if authorization else None
            user = f"Proxy-Authorization: Basic {basic}\r\n" if basic else ""
            self._ask = f"CONNECT {connect_to} HTTP/1.1\r\nHost: {connect_to}\r\n{user}\r\n".encode()
        self._secure: ssl.SSLSocket | None = None
        self.fileno = sock.fileno
        self._number = sock.fileno()

    def send(self, data: bytes) -> int:
        """Like a socket's; WantsRead while the connection is not ready and waits for the other side."""
        if self._state != OPEN:
            try:
                self._step()
            except BlockingIOError:
                raise
            except OSError as problem:
                raise NotConnected(problem.strerror or str(problem)) from problem
        assert self._secure is not None
        try:
            return self._secure.send(data)
        except ssl.SSLWantReadError as problem:
            raise WantsRead from problem
        except ssl.SSLWantWriteError as problem:
            raise BlockingIOError from problem

    def recvmsg(self, size: int, ancillary: int) -> tuple[bytes, list[Any], int, None]:
        """Like a socket's, without ancillary data. BlockingIOError while the connection is not ready."""
        if self._state != OPEN:
            raise BlockingIOError
        assert self._secure is not None
        try:
            data = self._secure.recv(size)
            while data and self._secure.pending():  # decrypted already, so that no poll would tell of it
                data += self._secure.recv(size)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError) as problem:
            raise BlockingIOError from problem
        except ssl.SSLEOFError:
            data = b""  # closed without a goodbye; whether something is missing is seen in what came
        return data, [], 0, None

    def getsockopt(self, level: int, name: int) -> int:
        return self._plain.getsockopt(level, name)

    def close(self) -> None:
        (self._secure or self._plain).close()

    def _step(self) -> None:
        """Go on with what comes before the first request, as far as it goes without waiting."""
        if self._state == PROXY:
            if self._ask:
                self._ask = self._ask[self._plain.send(self._ask) :]
                if self._ask:
                    raise BlockingIOError
            while b"\r\n\r\n" not in self._answer:
                try:
                    # One byte at a time: what follows the head belongs to TLS.
                    byte = self._plain.recv(1)
                except BlockingIOError:
                    raise WantsRead from None
                if not byte or len(self._answer) > 65536:
                    raise NotConnected("the proxy closed the connection instead of answering CONNECT")
                self._answer += byte
            line = self._answer.split(b"\r\n", 1)[0].decode("latin-1")
            if line.split(" ")[1:2] != ["200"]:
                raise NotConnected(f"the proxy refused CONNECT: {line[:100]}")
            self._state = HANDSHAKE
        if self._secure is None:
            self._secure = self._tls.wrap_socket(
                self._plain, server_hostname=self._host, do_handshake_on_connect=False, suppress_ragged_eofs=False
            )
            if self._secure.fileno() != self._number:  # it is polled by its number
                raise NotConnected("TLS did not keep the socket's number")
        try:
            self._secure.do_handshake()
        except ssl.SSLWantReadError:
            raise WantsRead from None
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        self._state = OPEN
