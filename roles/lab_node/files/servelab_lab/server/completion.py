"""One request of the OpenAI endpoints: from the engine's steps to the client's bytes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from . import logprobs
from .ask import Ask
from .http import Exchange
from .sequence import Sequence
from .wire import ChatStream, CompletionStream, Reply, Stream, Thoughts, Whole, spec_details

if TYPE_CHECKING:
    from .api import Api


class Completion:
    """`start()` queues it; it answers by itself."""

    def __init__(self, api: Api, exchange: Exchange, ask: Ask) -> None:
        self._api, self._exchange, self._ask = api, exchange, ask
        thinks = ask.chat and ask.thinks and bool(api.info.args.reasoning_parser)
        self._sequence = Sequence(api, ask, thinks=thinks)
        reply = Reply(self._sequence.rid, int(self._sequence.received), ask.model, ask.prompt_tokens)
        if thinks and ask.separate:
            reply.thoughts = Thoughts()
        self._answer: Stream | Whole = self._stream(reply) if ask.stream else Whole(reply)

    def start(self) -> None:
        self._exchange.on_gone = lambda: self._api.abandon(self._sequence)
        self._sequence.start(self._first)

    def _first(self, text: str, tokens: int, reason: str | None, matched: int | str | None) -> None:
        """Hear of the first step; what is cached is known by then."""
        if self._api.info.args.enable_cache_report:
            self._answer.cached_tokens = self._sequence.cached_tokens
        self._sequence.deliver = deliver = self._steps() if isinstance(self._answer, Stream) else self._collect
        deliver(text, tokens, reason, matched)

    def _steps(self) -> Any:
        """Return what hears of the other steps of a stream, as directly as possible."""
        step, end = self._answer.step, self._exchange.end  # type: ignore[union-attr]

        def deliver(text: str, tokens: int, reason: str | None, matched: int | str | None) -> None:
            step(text, tokens, reason, matched)
            if reason is not None:
                end()

        return deliver

    def _stream(self, reply: Reply) -> Stream:
        ask, exchange = self._ask, self._exchange
        kind = ChatStream if ask.chat else CompletionStream
        return kind(
            reply,
            exchange.send,
            head=exchange.stream_head,
            include_usage=ask.include_usage,
            continuous_usage=ask.continuous_usage,
            sglext=self._sglext if self._tells_speculation else None,
            logprobs=None if ask.logprobs is None else self._logprobs,
        )

    @property
    def _tells_speculation(self) -> bool:
        args = self._api.info.args
        return self._ask.spec_details and self._api.driver.engine.speculates and args.dialect.since("0.5.19")

    def _sglext(self) -> dict[str, Any]:
        details = spec_details(self._sequence.request.spec, self._api.driver.engine.widest)
        return {"routed_experts": None, "cached_tokens_details": None, "spec_tokens_details": details}

    def _logprobs(self, text: str, position: int, ended: bool) -> dict[str, Any]:
        """Return the log probabilities of a step's tokens, the first of which is the answer's number `position`."""
        count = self._ask.logprobs or 0
        tokens = logprobs.token_ids(text, ended)
        texts = [*(f" {word}" for word in logprobs.words_of(text)), *(["</s>"] if ended else [])]
        shape = logprobs.for_chat if self._ask.chat else logprobs.for_completion
        return shape(position, tokens, texts, count)

    def _collect(self, text: str, tokens: int, reason: str | None, matched: int | str | None) -> None:
        whole = self._answer
        assert isinstance(whole, Whole)
        whole.add(text, tokens)
        if reason is None:
            return
        shown = None
        if self._ask.logprobs is not None:
            shown = self._logprobs("".join(whole.text), 0, reason == "stop" and isinstance(matched, int))
        document = whole.document(chat=self._ask.chat, reason=reason, matched=matched, logprobs=shown)
        if self._tells_speculation:
            document["sglext"] = self._sglext()
        self._exchange.reply_json(200, document)
