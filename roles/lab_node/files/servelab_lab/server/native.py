"""SGLang's own endpoint /generate: what is asked, and the answers with their meta_info, laid out as 0.5.15 sends them.

A stream repeats the whole text in every event, and its status goes out before anything is known to be right.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from .ask import prompt_words
from .dialect import Dialect
from .engine import Spec
from .wire import chunk, dumps

DONE = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
_DEFAULT_MAX_TOKENS = 128


class NativeRefusal(Exception):
    """Status 400, or an event in a stream that has begun."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.document = {"error": {"message": message}}
        self.event = {"error": {"message": message, "type": "invalid_request_error", "code": 400, "retryable": False}}


@dataclass(frozen=True)
class NativeAsk:
    """One prompt of a request. `logprobs` None: not asked for; else the number of alternatives."""

    words: list[str]
    max_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    rid: str | None
    logprobs: int | None
    logprob_start: int
    with_text: bool

    @property
    def prompt_tokens(self) -> int:
        return len(self.words)


def understand_native(data: Mapping[str, Any], context: int) -> tuple[list[NativeAsk], bool, bool]:
    """Return the prompts, whether they came as a list, and whether a stream is wanted.

    Raises NativeRefusal; a prompt that is too long is refused by `check`, which a stream calls later.
    """
    given = data.get("text") if data.get("text") is not None else data.get("input_ids")
    if given is None:
        raise NativeRefusal("Either text, input_ids or input_embeds should be provided.")
    ids = data.get("text") is None
    many = isinstance(given, list) and (not ids or (bool(given) and isinstance(given[0], list)))
    prompts = given if many else [given]
    sampling, rid = data.get("sampling_params") or {}, data.get("rid")
    asks = []
    for number, prompt in enumerate(prompts):
        own = sampling[number] if isinstance(sampling, list) else sampling
        stop = own.get("stop") or ()
        asks.append(
            NativeAsk(
                words=prompt_words(prompt),
                max_tokens=max(int(own.get("max_new_tokens", _DEFAULT_MAX_TOKENS)), 1),
                ignore_eos=bool(own.get("ignore_eos")),
                stop=(stop,) if isinstance(stop, str) else tuple(stop),
                rid=rid[number] if isinstance(rid, list) else rid,
                logprobs=int(data.get("top_logprobs_num") or 0) if data.get("return_logprob") else None,
                logprob_start=int(data.get("logprob_start_len", -1)),
                with_text=bool(data.get("return_text_in_logprobs")),
            )
        )
    return asks, many, bool(data.get("stream"))


def check(ask: NativeAsk, context: int) -> None:
    """Raise NativeRefusal for what does not fit the context."""
    if ask.prompt_tokens >= context:
        raise NativeRefusal(
            f"The input ({ask.prompt_tokens} tokens) is longer than the model's context length ({context} tokens)."
        )


def finish_reason(reason: str | None, length: int, matched: int | str | None) -> dict[str, Any] | None:
    """Return meta_info's finish_reason."""
    if reason is None:
        return None
    if reason == "length":
        return {"type": "length", "length": length}
    if reason == "stop":
        return {"type": "stop", "matched": matched}
    return {"type": "abort", "message": "Abort before prefill" if length == 0 else "Aborted by AbortReq."}


def speculation(spec: Spec, draft_tokens: int, dialect: Dialect) -> dict[str, Any]:
    """Return meta_info's figures of one request's speculation; nothing before its first verify."""
    if not spec.verify_steps:
        return {}
    steps, correct = spec.verify_steps, spec.correct_drafts
    if not dialect.since("0.5.11"):
        # The sure token counts as a guess here, and is not among the accepted.
        return {
            "spec_accept_rate": correct / (steps * draft_tokens),
            "spec_accept_length": 1 + correct / steps,
            "spec_accept_token_num": correct,
            "spec_draft_token_num": steps * draft_tokens,
            "spec_verify_ct": steps,
            "spec_accept_histogram": spec.histogram,
        }
    proposed = steps * (draft_tokens - 1)
    return {
        "spec_accept_rate": correct / proposed if proposed else 0.0,
        "spec_accept_length": 1 + correct / steps,
        "spec_num_correct_drafts": correct,
        "spec_num_proposed_drafts": proposed,
        "spec_verify_ct": steps,
        "spec_accepted_drafts": correct,
        "spec_proposed_drafts": proposed,
        "spec_correct_drafts_histogram": spec.histogram,
        "spec_accept_histogram": spec.histogram,
    }


class NativeStream:
    """One prompt's events: `document()` is asked for what is known after every step."""

    def __init__(self, send: Callable[[bytes], None], head: bytes, document: Callable[[], dict[str, Any]]) -> None:
        self._send, self._document = send, document
        send(head)

    def step(self, last: bool) -> None:
        """Send what is known now."""
        event = chunk(b"data: %b\n\n" % dumps(self._document()))
        self._send(event + DONE if last else event)

    def refuse(self, refusal: NativeRefusal) -> None:
        self._send(chunk(b"data: %b\n\n" % dumps(refusal.event)) + DONE)
