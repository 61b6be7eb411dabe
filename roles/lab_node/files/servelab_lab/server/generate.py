"""One request of /generate: a prompt or a list of them, in one piece or as a stream."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from . import logprobs
from .http import Exchange
from .native import NativeAsk, NativeRefusal, NativeStream, check, finish_reason, speculation
from .sequence import Sequence

if TYPE_CHECKING:
    from .api import Api


class _One:
    """One prompt of the request, with all that its document needs."""

    def __init__(self, api: Api, ask: NativeAsk) -> None:
        self.api, self.ask, self.sequence = api, ask, Sequence(api, ask)
        self.dispatched = time.time()
        self.text = ""
        self.ids: list[int] = []
        self.reason: str | None = None
        self.matched: int | str | None = None
        self.tokens = 0
        self._sent: float | None = None

    def add(self, text: str, tokens: int, reason: str | None, matched: int | str | None) -> None:
        """Take in a step."""
        self.text += text
        self.tokens += tokens
        self.ids += logprobs.token_ids(text, reason == "stop" and isinstance(matched, int))
        self.reason, self.matched = reason, matched

    def document(self, stream: bool) -> dict[str, Any]:
        """Return what is known now, in the order in which a real server writes it."""
        sequence, now = self.sequence, time.time()
        known = sequence.cached_tokens
        meta: dict[str, Any] = {
            "id": sequence.rid,
            "finish_reason": finish_reason(self.reason, self.tokens, self.matched),
            "prompt_tokens": self.ask.prompt_tokens,
            "weight_version": "default",
            "num_retractions": 0,
            "queue_time": 0.0,
        }
        if self.ask.logprobs is not None:
            meta |= self._logprobs(self.ask.logprobs)
        meta |= {
            "reasoning_tokens": 0,
            "completion_tokens": self.tokens,
            "cached_tokens": known,
            "cached_tokens_details": {"device": known, "host": 0} if known else None,
            "dp_rank": None,
        }
        if self.reason is None:
            # Only the first event says when it was sent.
            if self._sent is None:
                self._sent = now
                meta["response_sent_to_client_ts"] = now
        else:
            meta |= self._ended(now, stream)
        return {"text": self.text, "output_ids": self.ids, "meta_info": meta}

    def _ended(self, now: float, stream: bool) -> dict[str, Any]:
        sequence, engine = self.sequence, self.api.driver.engine
        began, finished = sequence.received, sequence.finished or now
        first = sequence.first if sequence.first is not None else finished
        meta: dict[str, Any] = {"e2e_latency": (finished - began)}
        meta |= speculation(sequence.request.spec, engine.widest, self.api.info.args.dialect)
        meta |= {"request_received_ts": began, "api_server_dispatch_finish_ts": self.dispatched}
        if stream:
            meta["response_sent_to_client_ts"] = self._sent if self._sent is not None else now
        meta |= {
            "request_finished_ts": finished,
            "decode_throughput": (self.tokens - 1) / max(finished - first, 2.5e-6),
        }
        if not stream:
            meta["response_sent_to_client_ts"] = now
        return meta

    def _logprobs(self, count: int) -> dict[str, Any]:
        ask = self.ask
        prompt = [logprobs.token_id(word) for word in ask.words][ask.logprob_start :] if ask.logprob_start >= 0 else []
        before = logprobs.native(-len(prompt), prompt, ask.with_text)
        if before and ask.logprob_start == 0:
            # Nothing precedes the first token.
            before[0][0] = None
        shown: dict[str, Any] = {
            "input_token_logprobs": before,
            "output_token_logprobs": logprobs.native(0, self.ids, ask.with_text),
            "output_token_logprobs_length": len(self.ids),
        }
        if count:
            shown["input_top_logprobs"] = [None] * len(before)
            shown["output_top_logprobs"] = [
                [
                    [chance, token, f" w{token}" if ask.with_text else None]
                    for chance, token in logprobs.alternatives(n, said, count)
                ]
                for n, said in enumerate(self.ids)
            ]
        return shown


class Generate:
    """`start()` queues everything; it answers by itself."""

    def __init__(self, api: Api, exchange: Exchange, asks: list[NativeAsk], *, many: bool, stream: bool) -> None:
        self._api, self._exchange, self._asks = api, exchange, asks
        self._many, self._stream = many, stream

    def start(self) -> None:
        """Raises NativeRefusal, but not once a stream has begun."""
        if self._stream:
            self._start_stream()
            return
        for ask in self._asks:
            check(ask, self._api.info.context)
        ones = self._queue()
        left = len(ones)
        for one in ones:

            def deliver(text: str, tokens: int, reason: str | None, matched: int | str | None, one: _One = one) -> None:
                nonlocal left
                one.add(text, tokens, reason, matched)
                if reason is not None:
                    left -= 1
                    if not left:
                        documents = [each.document(False) for each in ones]
                        self._exchange.reply_json(200, documents if self._many else documents[0])

            one.sequence.start(deliver)

    def _queue(self) -> list[_One]:
        ones = [_One(self._api, ask) for ask in self._asks]

        def gone() -> None:
            for one in ones:
                self._api.abandon(one.sequence)

        self._exchange.on_gone = gone
        return ones

    def _start_stream(self) -> None:
        ones: list[_One] = []
        exchange = self._exchange
        current: list[_One] = []
        stream = NativeStream(exchange.send, exchange.stream_head(), lambda: self._event(ones, current[0]))
        try:
            for ask in self._asks:
                check(ask, self._api.info.context)
        except NativeRefusal as refusal:
            stream.refuse(refusal)
            exchange.end()
            return
        ones += self._queue()
        left = len(ones)
        for one in ones:

            def deliver(text: str, tokens: int, reason: str | None, matched: int | str | None, one: _One = one) -> None:
                nonlocal left
                one.add(text, tokens, reason, matched)
                left -= reason is not None
                current[:] = [one]
                stream.step(last=not left)
                if not left:
                    exchange.end()

            one.sequence.start(deliver)

    def _event(self, ones: list[_One], one: _One) -> dict[str, Any]:
        document = one.document(True)
        return {**document, "index": ones.index(one)} if self._many else document
