"""The server's endpoints: routes, keys, health, and requests on their way through the engine."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from . import log
from .ask import Ask, Refusal, read_body, understand
from .drive import Driver
from .engine import Request
from .http import Exchange
from .info import Info
from .startup import context_length
from .text import ANSWERS, Continuation, Garbage
from .wire import ChatStream, CompletionStream, Reply, Stream, Whole, spec_details, stopped_by

_FLUSHED = (
    b"Cache flushed.\nPlease check backend logs for more details. "
    b"(When there are running or waiting requests, the operation will not be performed.)\n"
)
_NOT_FLUSHED = b"Flush cache failed.\n"
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
        self._answers = {**ANSWERS, **info.config.answers}
        self._context = context_length(info.args, info.profile)
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
            "/flush_cache": {"GET": self._flush, "POST": self._flush},
            **{path: {"POST": self._complete} for path in _COMPLETIONS},
        }
        if info.args.dialect.since("0.5.20"):
            self._routes["/ready"] = {"GET": self._readiness}

    def handle(self, exchange: Exchange) -> None:
        """Answer one request, now or later."""
        request = exchange.request
        path = request.path
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
        # Flushing is an administrator's endpoint: the admin key, where there is one, and only that.
        key = (args.admin_api_key or args.api_key) if path == "/flush_cache" else args.api_key
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

    def _deprecated(self, successor: str) -> Route:
        def answer(exchange: Exchange) -> None:
            log.launcher(
                f"Endpoint '{exchange.request.path}' is deprecated and will be removed in a future version. "
                f"Please use '{successor}' instead."
            )
            self._routes[successor]["GET"](exchange)

        return answer

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
        self._flush_now(exchange)

    def _flush_now(self, exchange: Exchange) -> None:
        engine = self.driver.engine
        if engine.requests:
            log.rank(0)(
                f"Cache not flushed because there are pending requests. #queue-req: {len(engine.waiting)}, "
                f"#running-req: {len(engine.running)}"
            )
            exchange.reply(400, _NOT_FLUSHED)
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
                context=self._context,
                package=self._package,
            )
        except Refusal as refusal:
            exchange.reply_json(400, refusal.document)
            return
        if self.on_first_request is not None:
            self.on_first_request()
            return
        Generation(self, exchange, ask, next(self._ordinals)).start(self._answers)

    def abandon(self, request: Request) -> None:
        """Cancel a request whose client has gone, as late as SGLang does."""
        after = _ABANDONED_RUNS_ON / self.info.config.time_scale
        asyncio.get_running_loop().call_later(after, self.driver.engine.cancel, request)


class Generation:
    """One completion: from the engine's steps to the client's bytes."""

    def __init__(self, api: Api, exchange: Exchange, ask: Ask, ordinal: int) -> None:
        self._api, self._exchange, self._ask, self._ordinal = api, exchange, ask, ordinal
        self._reply = Reply(os.urandom(16).hex(), int(time.time()), ask.model, ask.prompt_tokens)
        self._request: Request
        self._seen = ""

    def start(self, answers: dict[str, str]) -> None:
        """Queue the request."""
        ask, exchange = self._ask, self._exchange
        kind = Garbage if "garbage_output" in self._api.info.config.faults else Continuation
        says = kind(ask.words, answers)
        deliver: Callable[..., None] = self._stream().step if ask.stream else self._collect(Whole(self._reply))

        def sink(text: str, tokens: int, reason: str | None) -> None:
            deliver(text, tokens, reason, stopped_by(reason, None))
            if reason is not None:
                exchange.end()

        def stopping(text: str, tokens: int, reason: str | None) -> None:
            self._watch_for_stop(deliver, text, tokens, reason)

        self._request = request = Request(
            ask.prompt_tokens,
            ask.max_tokens,
            says.pieces(),
            stopping if ask.stop else sink,
            stops_at=None if ask.ignore_eos else says.natural_length,
            seed=self._ordinal,
        )
        exchange.on_gone = lambda: self._api.abandon(request)
        self._api.driver.submit(request)

    def _stream(self) -> Stream:
        ask, exchange = self._ask, self._exchange
        kind = ChatStream if ask.chat else CompletionStream
        speculative = self._api.driver.engine.speculates
        return kind(
            self._reply,
            exchange.send,
            head=exchange.stream_head,
            include_usage=ask.include_usage,
            continuous_usage=ask.continuous_usage,
            sglext=self._sglext if ask.spec_details and speculative else None,
        )

    def _sglext(self) -> dict[str, Any]:
        details = spec_details(self._request.spec, self._api.driver.engine.mode.draft_tokens)
        return {"routed_experts": None, "cached_tokens_details": None, "spec_tokens_details": details}

    def _collect(self, whole: Whole) -> Callable[..., None]:
        def deliver(text: str, tokens: int, reason: str | None, matched: int | str | None) -> None:
            whole.text.append(text)
            whole.completion_tokens += tokens
            if reason is not None:
                document = whole.document(chat=self._ask.chat, reason=reason, matched=matched)
                if self._ask.spec_details and self._api.driver.engine.speculates:
                    document["sglext"] = self._sglext()
                self._exchange.reply_json(200, document)

        return deliver

    def _watch_for_stop(self, deliver: Callable[..., None], text: str, tokens: int, reason: str | None) -> None:
        """End at the first stop string, with the text before it and the tokens up to its end."""
        before = len(self._seen)
        self._seen += text
        found = [(self._seen.find(stop), stop) for stop in self._ask.stop if stop in self._seen]
        if not found:
            deliver(text, tokens, reason, stopped_by(reason, None))
            if reason is not None:
                self._exchange.end()
            return
        at, stop = min(found)
        counted = self._seen[: at + len(stop)].count(" ") - self._seen[:before].count(" ")
        # A stop string that began in an earlier chunk has been sent in part, and cannot be taken back.
        deliver(self._seen[before : max(at, before)], max(counted, 0), "stop", stop)
        self._api.driver.engine.cancel(self._request)
        self._exchange.end()
