"""The server's endpoints: routes, keys, health, and requests on their way through the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from . import log
from .ask import Refusal, read_body, understand
from .completion import Completion
from .drive import Driver
from .engine import Request
from .generate import Generate
from .http import Exchange
from .info import Info
from .metrics import KIND, Metrics
from .native import NativeRefusal, understand_native
from .sequence import Sequence
from .text import ANSWERS

_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = b"Flush cache failed.\n"
_STILL_BUSY = b"Timed out waiting for idle state."
_ADMINISTRATION = ("/flush_cache", "/abort_request", "/set_internal_state")
_COMPLETIONS = ("/v1/completions", "/v1/chat/completions")
# A request whose client has gone runs on for this long, in simulated seconds; as watched.
_ABANDONED_RUNS_ON = 2.0
# /health looks once a (simulated) second whether a token has come, for this many.
_HEALTH_TIMEOUT = 20

Route = Callable[[Exchange], None]


class Api:
    """Answers every request. `ready` and `draining` are set by whoever runs the server."""

    def __init__(self, info: Info, driver: Driver) -> None:
        self.info, self.driver = info, driver
        self.ready = self.draining = False
        self.on_first_request: Callable[[], None] | None = None
        self._ordinals = count(1)
        self._tasks: set[asyncio.Task[None]] = set()
        self.answers = {**ANSWERS, **info.config.answers}
        # What has been asked and not yet answered, by its id.
        self.sequences: dict[str, Sequence] = {}
        self.metrics = Metrics(info)
        self._package = str(info.config.package())
        self._routes: dict[str, dict[str, Route]] = {
            "/": {"GET": lambda exchange: exchange.reply_json(200, "SGLang is running")},
            "/ping": {"GET": lambda exchange: exchange.reply(200)},
            "/health": {"GET": self._health},
            "/health_generate": {"GET": self._health},
            "/v1/models": {"GET": lambda exchange: exchange.reply_json(200, info.models())},
            "/server_info": {"GET": lambda exchange: exchange.reply_json(200, info.server())},
            "/get_server_info": {"GET": self._deprecated("/server_info")},
            "/model_info": {"GET": lambda exchange: exchange.reply_json(200, info.model_info())},
            "/get_model_info": {"GET": self._deprecated("/model_info")},
            "/v1/loads": {"GET": lambda exchange: exchange.reply_json(200, info.loads())},
            "/flush_cache": {"GET": self._flush, "POST": self._flush},
            "/abort_request": {"POST": self._abort_request},
            "/set_internal_state": {"POST": self._set_internal_state, "PUT": self._set_internal_state},
            "/generate": {"POST": self._generate, "PUT": self._generate},
            **{path: {"POST": self._complete} for path in _COMPLETIONS},
        }
        if info.args.dialect.since("0.5.20"):
            self._routes["/ready"] = {"GET": self._readiness}
        if not info.args.dialect.since("0.5.21"):
            self._routes["/get_load"] = {"GET": self._deprecated("/v1/loads", lambda: info.load())}
        if info.args.enable_metrics:
            self._routes["/metrics"] = {"GET": self._metrics}

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""
        request = exchange.request
        path = request.path
        endpoint = "/v1/models/{model:path}" if path.startswith("/v1/models/") else path
        self.metrics.came(endpoint, request.method)
        exchange.on_status = lambda status: self.metrics.answered(endpoint, request.method, status)
        if not self._allowed(path, request.headers.get("authorization", "")):
            exchange.reply_json(401, {"error": "Unauthorized"})
            return
        routes = self._routes.get(path)
        if routes is None:
            self._unknown(exchange, path)
        elif request.method not in routes:
            allowed = ", ".join(routes).encode()
            exchange.reply_json(405, {"detail": "Method Not Allowed"}, b"allow: %b\r\n" % allowed)
        else:
            routes[request.method](exchange)

    def _allowed(self, path: str, authorization: str) -> bool:
        args = self.info.args
        if path.startswith(("/health", "/ready", "/metrics")):
            return True
        # These are an administrator's endpoints: the admin key, where there is one, and only that.
        key = (args.admin_api_key or args.api_key) if path in _ADMINISTRATION else args.api_key
        scheme, _, token = authorization.partition(" ")
        return not key or (scheme.lower() == "bearer" and token == key)

    def _unknown(self, exchange: Exchange, path: str) -> None:
        name = path.removeprefix("/v1/models/")
        if name == path or exchange.request.method != "GET":
            exchange.reply_json(404, {"detail": "Not Found"})
        elif name == self.info.model:
            exchange.reply_json(200, self.info.card())
        else:
            wrong = {
                "message": f"The model '{name}' does not exist",
                "type": "invalid_request_error",
                "param": "model",
                "code": "model_not_found",
            }
            exchange.reply_json(404, {"error": wrong})

    def _deprecated(self, successor: str, document: Callable[[], Any] | None = None) -> Route:
        """Answer as `successor` does, or with a document of its own, after saying that one should ask that."""

        def answer(exchange: Exchange) -> None:
            log.launcher(
                f"Endpoint '{exchange.request.path}' is deprecated and will be removed in a future version. "
                f"Please use '{successor}' instead."
            )
            if document is not None:
                exchange.reply_json(200, document())
            else:
                self._routes[successor]["GET"](exchange)

        return answer

    def _metrics(self, exchange: Exchange) -> None:
        exchange.reply_chunked(self.metrics.render(), KIND)

    def _readiness(self, exchange: Exchange) -> None:
        exchange.reply(200 if self.ready and not self.draining else 503)

    def _later(self, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _second(self) -> None:
        """Let a simulated second pass."""
        await asyncio.sleep(1 / self.info.config.time_scale)

    # Health

    def _health(self, exchange: Exchange) -> None:
        if self.draining:
            log.launcher("Health check request received during shutdown. Returning 503.")
            exchange.reply(503)
        elif not self.ready:
            exchange.reply(503)
        else:
            self._later(self._prove_health(exchange))

    async def _prove_health(self, exchange: Exchange) -> None:
        """Answer 200 once the scheduler has ended a step after this request came."""
        came = time.monotonic()
        if self.driver.engine.requests == 0:
            self.driver.submit(Request(1, 1, iter((" ",)), lambda *_: None))
        for _ in range(_HEALTH_TIMEOUT):
            await self._second()
            if self.driver.last_step > came:
                exchange.reply(200)
                return
        exchange.reply(503)

    # Flushing

    def _flush(self, exchange: Exchange) -> None:
        timeout = float(exchange.request.query.get("timeout", 0))
        if self.driver.engine.requests and timeout > 0:
            self._later(self._flush_when_idle(exchange, timeout))
        else:
            self._flush_now(exchange)

    async def _flush_when_idle(self, exchange: Exchange, timeout: float) -> None:
        until = time.monotonic() + timeout / self.info.config.time_scale
        while self.driver.engine.requests and time.monotonic() < until:
            await asyncio.sleep(0.02)
        self._flush_now(exchange, _STILL_BUSY)

    def _flush_now(self, exchange: Exchange, refusal: bytes = _NOT_FLUSHED) -> None:
        engine = self.driver.engine
        if engine.requests:
            log.rank(0)(
                f"Cache not flushed because there are pending requests. #queue-req: {len(engine.waiting)}, "
                f"#running-req: {len(engine.running)}"
            )
            exchange.reply(400, refusal)
            return
        engine.flush()
        log.rank(0)("Cache flushed successfully!")
        exchange.reply(200, _FLUSHED)

    # Completions

    def _complete(self, exchange: Exchange) -> None:
        request = exchange.request
        try:
            data = read_body(request.body, request.headers.get("content-type", ""), request.path, self._package)
            ask = understand(
                data,
                request.path,
                default_model=self.info.model,
                context=self.info.context,
                package=self._package,
            )
        except Refusal as refusal:
            exchange.reply_json(400, refusal.document)
            return
        if not self._dies():
            Completion(self, exchange, ask).start()

    def _generate(self, exchange: Exchange) -> None:
        request = exchange.request
        try:
            data = read_body(request.body, request.headers.get("content-type", ""), request.path, self._package)
            asks, many, stream = understand_native(data, self.info.context)
            if self._dies():
                return
            Generate(self, exchange, asks, many=many, stream=stream).start()
        except (Refusal, NativeRefusal) as refusal:
            exchange.reply_json(400, refusal.document)

    def _dies(self) -> bool:
        if self.on_first_request is None:
            return False
        self.on_first_request()
        return True

    def ordinal(self) -> int:
        """Return the number of the next request."""
        return next(self._ordinals)

    def abandon(self, sequence: Sequence) -> None:
        """Abort a request whose client has gone, as late as SGLang does."""
        after = _ABANDONED_RUNS_ON / self.info.config.time_scale
        asyncio.get_running_loop().call_later(after, self.abort, sequence)

    def abort(self, sequence: Sequence) -> None:
        """End a request before its time."""
        if self.sequences.get(sequence.rid) is sequence:
            self.metrics.aborted()
            self.driver.engine.abort(sequence.request)

    def finished(self, sequence: Sequence) -> None:
        """Count a request that has ended."""
        scale, ended = self.info.config.time_scale, sequence.finished or time.time()
        first = sequence.first if sequence.first is not None else ended
        request = sequence.request
        self.metrics.finished(
            prompt=request.prompt_tokens,
            cached=sequence.cached_tokens,
            generated=request.generated,
            verifies=request.spec.verify_steps,
            first_s=(first - sequence.received) * scale,
            whole_s=(ended - sequence.received) * scale,
        )

    # Administration

    def _abort_request(self, exchange: Exchange) -> None:
        try:
            data = read_body(exchange.request.body, "application/json", exchange.request.path, self._package)
        except Refusal as refusal:
            exchange.reply_json(400, refusal.document)
            return
        rid, everything = str(data.get("rid") or ""), bool(data.get("abort_all"))
        if not everything and not rid:
            log.launcher("Ignore abort_request with empty rid and abort_all=False")
        for sequence in list(self.sequences.values()):
            if everything or (rid and sequence.rid == rid):
                self.abort(sequence)
        exchange.reply(200)

    def _set_internal_state(self, exchange: Exchange) -> None:
        try:
            data = read_body(exchange.request.body, "application/json", exchange.request.path, self._package)
        except Refusal as refusal:
            exchange.reply_json(400, refusal.document)
            return
        if "speculative_accept_threshold_single" in (data.get("server_args") or {}):
            # The one use that is made of it: the average begins anew.
            self.driver.engine.reset_speculation()
        exchange.reply_json(200, [True])
