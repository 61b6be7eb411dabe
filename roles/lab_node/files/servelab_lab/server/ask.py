"""What a client asks of the OpenAI endpoints, checked, and refused in a real SGLang's words."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from . import text

# Where FastAPI's message points: the release that was watched, not the installed one.
_PLACES = {
    "/v1/completions": "line 1606, in openai_v1_completions",
    "/v1/chat/completions": "line 1614, in openai_v1_chat_completions",
    "/generate": "line 785, in generate_request",
}
_DEFAULT_MAX_TOKENS = 16
# A request whose prompt and answer fill the context leaves the last position free.
_RESERVED = 1


class Refusal(Exception):
    """A request that gets status 400; `document` is the answer's body."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        super().__init__(document["message"])
        self.document = document


def refusal(message: str, kind: str = "BadRequestError") -> Refusal:
    """Return the refusal that the serving code writes by itself."""
    return Refusal({"object": "error", "message": message, "type": kind, "param": None, "code": 400})


def invalid(errors: Sequence[Mapping[str, Any]], path: str | None, package: str) -> Refusal:
    """Return the refusal for errors that validation found, worded as FastAPI's exception is."""
    listed = "\n".join(f"  {dict(error)}" for error in errors)
    plural = "" if len(errors) == 1 else "s"
    message = f"{len(errors)} validation error{plural}:\n{listed}"
    if path is not None:
        message += f'\n\n  File "{package}/srt/entrypoints/http_server.py", {_PLACES[path]}\n    POST {path}'
    return refusal(f"{message} {[dict(error) for error in errors]}", "Bad Request")


@dataclass(frozen=True)
class Ask:
    """A valid request. `words` are the prompt as the model sees it; `max_tokens` is resolved.

    `logprobs`: None where not asked for, else how many alternatives are shown. `separate` keeps thoughts apart.
    """

    chat: bool
    model: str
    words: list[str]
    max_tokens: int
    ignore_eos: bool
    stop: tuple[str, ...]
    stream: bool
    include_usage: bool
    continuous_usage: bool
    spec_details: bool = False
    rid: str | None = None
    logprobs: int | None = None
    separate: bool = True
    thinks: bool = True

    @property
    def prompt_tokens(self) -> int:
        return len(self.words)


def read_body(body: bytes, content_type: str, path: str, package: str) -> dict[str, Any]:
    """Parse a request's body. Raises Refusal."""
    if content_type.lower().split(";")[0].strip() != "application/json":
        wrong = "Unsupported Media Type: Only 'application/json' is allowed"
        raise invalid([{"loc": ["header", "content-type"], "msg": wrong, "type": "value_error"}], None, package)
    try:
        data = json.loads(body)
    except json.JSONDecodeError as error:
        found = {
            "type": "json_invalid",
            "loc": ("body", error.pos),
            "msg": "JSON decode error",
            "input": {},
            "ctx": {"error": error.msg},
        }
        raise invalid([found], path, package) from error
    if not isinstance(data, dict):
        wrong = "Input should be a valid dictionary or object to extract fields from"
        raise invalid([{"type": "model_attributes_type", "loc": ("body",), "msg": wrong, "input": data}], path, package)
    return data


def understand(data: Mapping[str, Any], path: str, *, default_model: str, context: int, package: str) -> Ask:
    """Turn a body into an Ask. Raises Refusal."""
    chat = path == "/v1/chat/completions"
    errors: list[dict[str, Any]] = []
    needed = "messages" if chat else "prompt"
    if needed not in data:
        errors.append({"type": "missing", "loc": ("body", needed), "msg": "Field required", "input": dict(data)})
    given = _max_tokens(data, chat, errors)
    if errors:
        raise invalid(errors, path, package)
    model = data.get("model") or default_model
    if ":" in model:
        adapter = model.partition(":")[2]
        raise refusal(
            f"LoRA adapter '{adapter}' was requested, but LoRA is not enabled. Please launch the server with "
            "--enable-lora flag and preload adapters using --lora-paths or /load_lora_adapter endpoint."
        )
    if chat and data.get("stream") and data.get("return_meta_info"):
        raise refusal(
            "return_meta_info is not supported with streaming. Please set stream=false when using "
            "return_meta_info=true.",
            "BadRequest",
        )
    _check_sampling(data)
    words = _chat_words(data["messages"]) if chat else prompt_words(data["prompt"])
    options = data.get("stream_options") or {}
    stop = data.get("stop") or ()
    return Ask(
        chat=chat,
        model=model,
        words=words,
        max_tokens=_room(len(words), given, chat, context),
        ignore_eos=bool(data.get("ignore_eos")),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stream=bool(data.get("stream")),
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("continuous_usage_stats")),
        spec_details=bool(data.get("return_spec_tokens_details")),
        rid=data.get("rid"),
        logprobs=_logprobs(data, chat),
        separate=data.get("separate_reasoning") is not False,
        thinks=_thinks(data.get("chat_template_kwargs") or {}),
    )


def _max_tokens(data: Mapping[str, Any], chat: bool, errors: list[dict[str, Any]]) -> int | None:
    names = ("max_completion_tokens", "max_tokens") if chat else ("max_tokens",)
    for name in names:
        value = data.get(name)
        if value is None:
            continue
        try:
            number = int(value)
        except (TypeError, ValueError):
            wrong = "Input should be a valid integer, unable to parse string as an integer"
            errors.append({"type": "int_parsing", "loc": ("body", name), "msg": wrong, "input": value})
            return None
        if number <= 0:
            problem = ValueError(f"{name} must be positive")
            errors.append(
                {
                    "type": "value_error",
                    "loc": ("body", name),
                    "msg": f"Value error, {problem}",
                    "input": value,
                    "ctx": {"error": problem},
                }
            )
        return number
    return None


def _logprobs(data: Mapping[str, Any], chat: bool) -> int | None:
    if chat:
        return int(data.get("top_logprobs") or 0) if data.get("logprobs") else None
    return None if data.get("logprobs") is None else int(data["logprobs"])


def _thinks(kwargs: Mapping[str, Any]) -> bool:
    return kwargs.get("thinking", True) is not False and kwargs.get("enable_thinking", True) is not False


def _check_sampling(data: Mapping[str, Any]) -> None:
    temperature, top_p = data.get("temperature"), data.get("top_p")
    if temperature is not None and float(temperature) < 0:
        raise refusal(f"temperature must be a non-negative finite number, got {float(temperature)}.")
    if top_p is not None and not 0 < float(top_p) <= 1:
        raise refusal(f"top_p must be in (0, 1], got {float(top_p)}.")
    # What the double cannot do it refuses, rather than answer as if it had.
    for name, harmless in (("n", (1,)), ("best_of", (1,)), ("echo", ()), ("tools", ())):
        value = data.get(name)
        if value and value not in harmless:
            raise refusal(f"The simulated server does not support {name}={value!r}.")


def prompt_words(prompt: Any) -> list[str]:
    if isinstance(prompt, str):
        return prompt.split() or ["<s>"]
    if isinstance(prompt, list) and prompt and all(isinstance(token, int) for token in prompt):
        return [f"w{token}" for token in prompt]
    if isinstance(prompt, list) and len(prompt) == 1:
        return prompt_words(prompt[0])
    raise refusal("The simulated server takes one prompt per request: a string or a list of token ids.")


def _chat_words(messages: Any) -> list[str]:
    if not isinstance(messages, list) or not messages:
        raise refusal("Messages cannot be empty.")
    return text.chat_words([(str(message.get("role", "user")), _content(message)) for message in messages])


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, str):
        return content
    return " ".join(str(part.get("text", "")) for part in content if part.get("type") == "text")


def _room(prompt: int, wanted: int | None, chat: bool, context: int) -> int:
    """Return how many tokens may be generated. Raises Refusal when the context is too short."""
    if prompt >= context:
        raise refusal(f"The input ({prompt} tokens) is longer than the model's context length ({context} tokens).")
    if wanted is None:
        wanted = context - prompt - _RESERVED if chat else min(_DEFAULT_MAX_TOKENS, context - prompt)
    if prompt + wanted > context:
        raise refusal(
            f"Requested token count exceeds the model's maximum context length of {context} tokens. "
            f"You requested a total of {prompt + wanted} tokens: {prompt} tokens from the input messages and "
            f"{wanted} tokens for the completion. Please reduce the number of tokens in the input messages or the "
            "completion to fit within the limit."
        )
    return max(wanted, 1)
