"""The hot path against sockets that send exactly what a test says: where a response ends, however it is torn."""

import contextlib
import random
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from known_truth_server import KnownTruthServer, Script

from servelab.load import tls
from servelab.load.capture import About, Record, Writer, read
from servelab.load.rows import interpret
from servelab.load.wire import BATCH, Exchange, Wire, kernel_stamps_work

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"choices":[{"text":"a","finish_reason":"stop"}],"usage":{"completion_tokens":1}}\n\n'
CHUNKED = HEAD + b"%x\r\n%s\r\n" % (len(EVENT), EVENT) + b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
LENGTH = b"HTTP/1.1 500 Oops\r\nContent-Length: 12\r\n\r\n0\r\n\r\nboom\r\n\r"


class Peer:
    """A server's side of one connection, played by the test."""

    def __init__(self, kernel_stamps: bool = False) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.wire = Wire((socket.AF_INET, self._listener.getsockname()), kernel_stamps)
        self.ended: list[Exchange] = []
        self.sock = socket.socket()

    def accept(self) -> None:
        self.sock.close()
        self._listener.settimeout(5)
        self.sock, _ = self._listener.accept()
        self.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def say(self, data: bytes) -> None:
        """Send it and let the client read it before anything else is sent."""
        before = self.wire.bytes_read
        with contextlib.suppress(BlockingIOError):
            self.sock.recv(65536, socket.MSG_DONTWAIT)  # the request; left unread, closing would reset the connection
        self.sock.sendall(data)
        until = time.monotonic() + 5
        while self.wire.bytes_read < before + len(data):
            self.ended += self.wire.turn(0.001)
            assert time.monotonic() < until

    def stop_listening(self) -> None:
        self._listener.close()

    def turn(self) -> None:
        self.ended += self.wire.turn(0.1)


@pytest.fixture
def peer() -> Iterator[Peer]:
    made = Peer()
    yield made
    made.wire.close()
    made.sock.close()


@pytest.mark.parametrize("raw", [CHUNKED, LENGTH])
def test_a_response_torn_at_every_byte_ends_with_its_last_one(peer: Peer, raw: bytes) -> None:
    for number, cut in enumerate(range(1, len(raw))):
        peer.wire.send(number, b"x", 0)
        if not number:
            peer.turn()
            peer.accept()
        peer.say(raw[:cut])
        assert len(peer.ended) == number, cut
        peer.say(raw[cut:])
        assert len(peer.ended) == number + 1, cut
        exchange = peer.ended[-1]
        assert (exchange.error, exchange.keep, exchange.parts) == (None, True, [raw[:cut], raw[cut:]])
    assert peer.wire.opened == 1  # kept alive all along


def test_a_turn_goes_on_until_something_has_ended(peer: Peer) -> None:
    """Chunks on their way are no reason to go back to who waits for ends."""
    peer.wire.send(0, b"x", 0)
    peer.turn()
    peer.accept()
    answered = threading.Thread(target=_slowly, args=(peer.sock, CHUNKED))
    answered.start()
    (ended,) = peer.wire.turn(30)
    answered.join()
    assert (b"".join(ended.parts), ended.error) == (CHUNKED, None)
    assert len(ended.parts) > 1
    peer.wire.send(1, b"x", 0)
    peer.sock.sendall(CHUNKED[:-1])
    assert peer.wire.turn(0.2) == []
    assert peer.wire.in_flight == 1


def _slowly(sock: socket.socket, data: bytes) -> None:
    for at in range(0, len(data), 40):
        sock.sendall(data[at : at + 40])
        time.sleep(0.02)


def test_a_response_in_random_pieces(peer: Peer) -> None:
    rng = random.Random(7)
    for number in range(60):
        peer.wire.send(number, b"x", 0)
        if not number:
            peer.turn()
            peer.accept()
        at = 0
        while at < len(CHUNKED):
            size = rng.choice((1, 2, 3, 5, 8, 40))
            assert len(peer.ended) == number
            peer.say(CHUNKED[at : at + size])
            at += size
        assert b"".join(peer.ended[-1].parts) == CHUNKED
    assert peer.wire.opened == 1


def test_a_body_without_a_length_ends_with_the_connection(peer: Peer) -> None:
    peer.wire.send(0, b"x", 0)
    peer.turn()
    peer.accept()
    peer.say(b"HTTP/1.1 200 OK\r\n\r\nall that")
    assert peer.ended == []
    peer.sock.close()
    peer.turn()
    assert (peer.ended[0].error, peer.ended[0].keep) == (None, False)


def test_a_cut_response_is_an_error_and_its_connection_is_not_used_again(peer: Peer) -> None:
    peer.wire.send(0, b"x", 0)
    peer.turn()
    peer.accept()
    peer.say(CHUNKED[:-1])
    peer.sock.close()
    peer.turn()
    assert peer.ended[0].error == ("cut", "the server closed the connection before the response was complete")
    peer.wire.send(1, b"x", 0)
    assert peer.wire.opened == 2


def test_bytes_that_nobody_asked_for_close_an_idle_connection(peer: Peer) -> None:
    peer.wire.send(0, b"x", 0)
    peer.turn()
    peer.accept()
    peer.say(CHUNKED)
    peer.sock.sendall(b"HTTP/1.1 408 Request Timeout\r\n\r\n")
    for _ in range(3):
        peer.turn()
    peer.wire.send(1, b"x", 0)
    assert peer.wire.opened == 2


def test_a_large_request_goes_out_in_parts_and_counts_from_its_last_byte(peer: Peer) -> None:
    payload = bytes(8_000_000)
    peer.wire.send(0, payload, 0)
    peer.turn()
    peer.accept()
    peer.turn()
    began = time.monotonic_ns()
    got = 0
    while got < len(payload):
        peer.turn()
        got += len(peer.sock.recv(1 << 20))
    peer.say(CHUNKED)
    assert peer.ended[0].sent > began


def test_overdue_and_cancelled_exchanges_say_so(peer: Peer) -> None:
    for number in range(2):
        peer.wire.send(number, b"x", 0)
    peer.turn()
    given_up = peer.wire.overdue(peer.wire.clock())
    assert [exchange.error and exchange.error[0] for exchange in given_up] == ["timeout", "timeout"]
    peer.wire.send(2, b"x", 0)
    assert [exchange.error and exchange.error[0] for exchange in peer.wire.cancel()] == ["cancelled"]
    assert peer.wire.in_flight == 0


def test_a_reset_a_refusal_and_a_socket_that_cannot_be_had_are_told_apart(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kind() -> str | None:
        until = time.monotonic() + 5
        while not peer.ended and time.monotonic() < until:
            peer.turn()
        error = peer.ended.pop().error
        return error and error[0]

    peer.wire.send(0, b"x", 0)
    peer.turn()
    peer.accept()
    peer.turn()
    time.sleep(0.05)
    peer.sock.close()  # with the request unread: the kernel answers with a reset
    assert kind() == "reset"
    peer.stop_listening()
    peer.wire.send(1, b"x", 0)
    assert kind() == "refused"

    def none_left(*_: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("servelab.load.wire.socket.socket", none_left)
    peer.wire.send(2, b"x", 0)
    monkeypatch.undo()
    assert kind() == "socket"
    assert peer.wire.in_flight == 0


@pytest.mark.skipif(not kernel_stamps_work(), reason="this kernel or sandbox gives no receive stamps")
def test_a_chunk_is_stamped_when_it_arrived_however_late_it_is_read(tmp_path: Path) -> None:
    peer = Peer(kernel_stamps=True)
    try:
        for number in range(3):  # stamping is switched on shortly after the first socket asks
            peer.wire.send(number, b"x", 0)
            if not number:
                peer.turn()
                peer.accept()
            before = time.time_ns()
            peer.sock.sendall(CHUNKED)
            time.sleep(0.1)
            late = time.time_ns()
            peer.turn()
        with Writer(tmp_path / "c", About(0, 0, None)) as writer:
            writer.add(peer.ended[-1])
        (record,) = read(tmp_path / "c")
        assert before <= record.times[0] < late <= record.reads[0]
        assert (record.unstamped, record.ended) == (0, record.times[0])
    finally:
        peer.wire.close()


class Clock:
    """In place of the module `time`: it stands still unless somebody sleeps. ns."""

    time_ns = staticmethod(time.time_ns)

    def __init__(self) -> None:
        self.now = 0

    def monotonic_ns(self) -> int:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += round(seconds * 1e9)


@pytest.mark.parametrize(
    ("stamps", "in_flight", "reads", "rest_ms"),
    [
        (True, 100, 1000, 1),  # in 250 ms: every connection once in 25 ms; an eighth is more than the longest
        (True, 100, 5000, 0.625),  # once in 5 ms
        (True, 32, 400, 1),
        (True, 31, 400, 0),  # no crowd
        (True, 100, 0, 0),  # nothing is known of the gaps
        (False, 100, 1000, 0),  # a read is its stamp
    ],
)
def test_the_rest_between_two_turns(
    monkeypatch: pytest.MonkeyPatch, stamps: bool, in_flight: int, reads: int, rest_ms: float
) -> None:
    clock = Clock()
    monkeypatch.setattr("servelab.load.wire.time", clock)
    peer = Peer(kernel_stamps=stamps)
    peer.wire.send(0, b"x", 0)
    peer.wire._look(0.1, [])  # no whole turn: its clock stands still
    peer.accept()
    peer.wire.in_flight, peer.wire._reads = in_flight, reads
    clock.now = 250_000_000
    peer.wire.set_rest()

    def slept(timeout: float) -> float:
        """ms that the wire rests before it looks."""
        before = clock.now
        peer.sock.sendall(b"y")  # something to read, so that no turn waits
        peer.wire._look(timeout, [])
        return (clock.now - before) / 1e6

    assert slept(5) == 0  # nothing was read before
    assert slept(0) == 0  # never where there is no time
    assert slept(5) == rest_ms  # since the last read
    assert slept(0.0003) == min(0.3, rest_ms)
    clock.now += 2_000_000
    assert slept(5) == 0  # the last read is long ago
    peer.wire.close()


def test_a_first_chunk_is_read_before_a_crowd_and_amid_it(peer: Peer) -> None:
    """What waits to be read gets the last one's stamp; for a first chunk that would be the TTFT."""
    crowd = 200
    ends, order = [], []
    for number in range(crowd + 2):
        peer.wire.send(number, b"x", 0)
        peer.wire.turn(0.001)
        peer.accept()
        ends.append(peer.sock.dup())
    exchanges = [connection.exchange for connection in peer.wire._connections.values()]
    for piece in (HEAD, b"1\r\na\r\n", b"1\r\nb\r\n"):  # a head, a role, the first text
        for end in ends[:crowd]:
            end.sendall(piece)
        before = peer.wire.bytes_read + crowd * len(piece)
        while peer.wire.bytes_read < before:
            peer.wire.turn(0.001)

    def clock() -> int:
        """Called once for each read. In the middle of them the second latecomer's first bytes arrive."""
        order.append(sum(len(exchange.parts) for exchange in exchanges[crowd:] if exchange))
        if len(order) == 100:
            ends[crowd + 1].sendall(HEAD)
        return time.monotonic_ns()

    for end in ends[:crowd]:
        end.sendall(b"1\r\nc\r\n")
    ends[crowd].sendall(HEAD)
    peer.wire.clock = clock
    while len(order) < crowd + 2:
        before = len(order)
        peer.wire._look(1, [])
        # What ends in a look is started anew and written down before the next one, so it must not be many.
        assert 0 < len(order) - before <= BATCH + 1
    assert order.index(1) == 1  # the first latecomer's was the first read
    assert order.index(2) <= 100 + BATCH + 1
    for end in ends:
        end.close()


# The plainer path.


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, ssl.SSLContext]:
    """A certificate for localhost that trusts itself, and a server's context with it."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "localhost")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(1)
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        .sign(key, hashes.SHA256())
    )
    directory = tmp_path_factory.mktemp("tls")
    (directory / "cert.pem").write_bytes(made.public_bytes(serialization.Encoding.PEM))
    (directory / "key.pem").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(directory / "cert.pem", directory / "key.pem")
    return directory / "cert.pem", context


class Proxy:
    """Forwards one connection after another: CONNECT with a 200, plain requests to `to`. Notes the heads it saw."""

    def __init__(self, to: int, status: str = "200 OK") -> None:
        self.heads: list[str] = []
        self._to, self._status = to, status
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            sock, _ = self._listener.accept()
            threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        data = b""
        while b"\r\n\r\n" not in data:
            data += sock.recv(65536)
        head, rest = data.split(b"\r\n\r\n", 1)
        self.heads.append(head.decode())
        with socket.create_connection(("127.0.0.1", self._to)) as server:
            if head.startswith(b"CONNECT"):
                sock.sendall(f"HTTP/1.1 {self._status}\r\nVia: test\r\n\r\n".encode())
            else:
                server.sendall(data.replace(b"http://target.invalid:1", b"", 1))
                rest = b""
            assert not rest
            threading.Thread(target=_pump, args=(sock, server), daemon=True).start()
            _pump(server, sock)


def _pump(source: socket.socket, sink: socket.socket) -> None:
    try:
        while data := source.recv(65536):
            sink.sendall(data.replace(b"http://target.invalid:1", b""))
        sink.shutdown(socket.SHUT_WR)
    except OSError:
        return


def exchange(make: Callable[[], Wire], payload: bytes, tmp_path: Path, count: int = 3) -> tuple[list[Record], int]:
    """`count` requests one after the other; (their records, connections opened)."""
    wire = make()
    with Writer(tmp_path / "capture", About(0, 0, None)) as writer:
        for number in range(count):
            wire.send(number, payload, wire.clock())
            ended: list[Exchange] = []
            until = time.monotonic() + 10
            while not ended:
                ended = wire.turn(0.5)
                assert time.monotonic() < until
            writer.add(ended[0])
    wire.close()
    return list(read(tmp_path / "capture")), wire.opened


BODY = b'{"prompt": "x", "stream": true}'
PAYLOAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)


@pytest.mark.parametrize("proxied", [False, True])
def test_tls_straight_and_through_a_proxy(
    certificate: tuple[Path, ssl.SSLContext], tmp_path: Path, proxied: bool
) -> None:
    from servelab.load.server import Server

    ca_file, context = certificate
    server = KnownTruthServer(Script(tokens=[1, 4, 2], first_s=0.05, gap_s=0.02), context)
    proxy = Proxy(server.port) if proxied else None
    named = proxy.url.replace("http://", "http://me:p%40ss@") if proxy else None
    asked = Server(server.url, proxy=named, ca_file=ca_file)
    assert asked.way == ("TLS through a proxy" if proxied else "TLS")
    assert asked.model() == "known-truth"
    records, opened = exchange(lambda: asked.wire(False), PAYLOAD, tmp_path)
    assert opened == 1
    for record in records:
        reply = interpret(record, 7)
        assert reply.error is None
        assert [tokens for _, tokens in reply.chunks] == [1, 4, 2]
        assert reply.chunks[0][0] - record.sent >= 50e6  # what the server takes
    if proxy:
        assert proxy.heads[-1].splitlines()[0] == f"CONNECT localhost:{server.port} HTTP/1.1"
        assert "Proxy-Authorization: Basic bWU6cEBzcw==" in proxy.heads[-1]  # me:p@ss
    server.close()


def test_a_certificate_that_nobody_vouches_for(certificate: tuple[Path, ssl.SSLContext], tmp_path: Path) -> None:
    from servelab.load.server import Server

    server = KnownTruthServer(Script(tokens=[1]), certificate[1])
    (record,), _ = exchange(lambda: Server(server.url).wire(False), PAYLOAD, tmp_path, 1)
    assert record.error is not None
    assert record.error[0] == "connect"
    assert "CERTIFICATE_VERIFY_FAILED" in record.error[1]
    server.close()


def test_a_proxy_that_refuses(certificate: tuple[Path, ssl.SSLContext], tmp_path: Path) -> None:
    from servelab.load.server import Server

    server = KnownTruthServer(Script(tokens=[1]), certificate[1])
    proxy = Proxy(server.port, "407 Proxy Authentication Required")
    asked = Server(server.url, proxy=proxy.url, ca_file=certificate[0])
    (record,), _ = exchange(lambda: asked.wire(False), PAYLOAD, tmp_path, 1)
    assert record.error == ("connect", "the proxy refused CONNECT: HTTP/1.1 407 Proxy Authentication Required")
    server.close()


def test_plain_http_through_a_proxy(tmp_path: Path) -> None:
    from servelab.load.server import Server

    server = KnownTruthServer(Script(tokens=[1, 1]))
    proxy = Proxy(server.port)
    asked = Server("http://target.invalid:1/base", proxy=proxy.url.replace("http://", "http://me:secret@"))
    assert asked.way == "proxy"
    head = asked.head("/v1/completions")
    assert head.startswith("POST http://target.invalid:1/base/v1/completions HTTP/1.1\r\nHost: target.invalid:1\r\n")
    assert "Proxy-Authorization: Basic bWU6c2VjcmV0\r\n" in head
    payload = PAYLOAD.replace(b"POST /", b"POST http://target.invalid:1/")
    records, _ = exchange(lambda: asked.wire(False), payload, tmp_path)
    assert [interpret(record, 2).error for record in records] == [None] * 3
    server.close()


def test_certificates_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty.pem").write_text("")
    with pytest.raises(OSError):
        tls.context(tmp_path / "empty.pem")
