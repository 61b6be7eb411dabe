"""What is asked: the requests of a level. Request i of a level depends on nothing but the options, so that every
mode of a campaign gets the same ones in the same order."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from servelab.load import prompts
from servelab.load.datasets import Entry, Prompt
from servelab.load.tokens import Tokenizer, exactly

PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "generate": "/generate"}
PRIMER = "primer"  # the request that fills the cache before a level whose prompts begin alike


@dataclass(frozen=True)
class Workload:
    """`form`: `text`, or `ids` (token ids; made of text where there is a tokenizer, of `token_range` where not).
    `salt`: what keeps a prefix cache from helping: `text` (a number of its own at the beginning), `key` (SGLang's
    `extra_key`), `none`. `cached_share`: the part of each prompt that all of a level have in common. `entries`: of a
    file, in the order of the seed, or as they are (`in_order`)."""

    api: str
    seed: int
    input_tokens: int
    output_tokens: int
    form: str = "text"
    ignore_eos: bool = True
    tokenizer: Tokenizer | None = None
    token_range: tuple[int, int] | None = None
    salt: str = "text"
    cached_share: float = 0.0
    entries: list[Entry] = field(default_factory=list)
    in_order: bool = False
    spec_details: bool = False

    def expected(self, index: int) -> int | None:
        """How many tokens the response to request `index` must have; None: as many as the model wants."""
        return self._output(index) if self.ignore_eos else None

    def payloads(self, level: int | str, head: str, model: str) -> Iterator[bytes]:
        """The bytes of request 0, 1, 2, … of a level: complete HTTP/1.1. `head`: request line and headers but the
        length."""
        index = 0
        while True:
            yield self.payload(level, index, head, model)
            index += 1

    def payload(self, level: int | str, index: int | str, head: str, model: str) -> bytes:
        body = json.dumps(self.body(level, index, model)).encode()
        return f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body

    def body(self, level: int | str, index: int | str, model: str) -> dict[str, Any]:
        """The request's JSON: greedy, streamed, with cumulative usage on every delta where the server can."""
        prompt, output = self._prompt(level, index), self._output(index)
        if self.salt == "text" and self.entries:
            prompt = _salted(prompt, self._salt(level, index))
        asked: dict[str, Any]
        if self.api == "generate":
            sampling = {"temperature": 0, "max_new_tokens": output, "ignore_eos": self.ignore_eos}
            asked = {("input_ids" if isinstance(prompt, list) else "text"): prompt, "sampling_params": sampling}
            asked["stream"] = True
        else:
            asked = {
                "model": model,
                "max_tokens": output,
                "temperature": 0,
                "ignore_eos": self.ignore_eos,
                "stream": True,
                "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            }
            if self.spec_details:
                asked["return_spec_tokens_details"] = True
            if self.api == "chat":
                asked["messages"] = prompt if _is_chat(prompt) else [{"role": "user", "content": prompt}]
            else:
                asked["prompt"] = prompt
        if self.salt == "key":
            # With a common beginning, every request of the level must find it.
            asked["extra_key"] = self._salt(level, "shared" if self.cached_share else index)
        return asked

    def problems(self) -> list[str]:
        """What cannot be asked, a sentence each."""
        found = []
        if self.form == "ids" and self.api == "chat":
            found.append("--prompt-form ids: a chat is made of texts; use --api completions or generate")
        if self.form == "ids" and not (self.tokenizer or self.token_range or self.entries):
            found.append("--prompt-form ids needs --tokenizer, --token-range or --dataset to take the ids from")
        if self.cached_share and self.entries:
            found.append("--cached-share makes prompts with a common beginning; those of a file are what they are")
        for number, entry in enumerate(self.entries, 1):
            if entry.prompt is None or isinstance(entry.prompt, str):
                continue
            if _is_chat(entry.prompt) != (self.api == "chat"):
                kind = "messages" if _is_chat(entry.prompt) else "token ids"
                found.append(f"entry {number} of the file is {kind}, which --api {self.api} cannot send")
                break
            if self.salt == "text" and not _is_chat(entry.prompt):
                found.append(f"--salt text: entry {number} of the file is token ids; use --salt key or none")
                break
        return found

    def _entry(self, index: int | str) -> Entry | None:
        if not self.entries or isinstance(index, str):
            return None
        turn, place = divmod(index, len(self.entries))
        if self.in_order:
            return self.entries[place]
        return self.entries[_shuffled(len(self.entries), f"servelab/{self.seed}/dataset/{turn}")[place]]

    def _output(self, index: int | str) -> int:
        entry = self._entry(index)
        return entry.output_tokens if entry and entry.output_tokens else self.output_tokens

    def _prompt(self, level: int | str, index: int | str) -> Prompt:
        entry = self._entry(index)
        if entry is not None and entry.prompt is not None:
            return entry.prompt
        count = entry.input_tokens if entry is not None and entry.input_tokens else self.input_tokens
        shared = int(count * self.cached_share)
        if self.form == "ids" and self.tokenizer is None:
            assert self.token_range is not None
            return self._random_ids(level, index, count, shared)
        if self.tokenizer is None:
            return prompts.prompt(self.seed, level, index, count, shared)
        # No word of this text is less than one token; ids[:count] is exact, a text may need another cut.
        text = prompts.join(prompts.words(self.seed, level, index, count + 16, shared))
        if self.form == "ids":
            return self.tokenizer.encode(text, True)[:count]
        return exactly(text, count, self.tokenizer, special=self.api != "chat")

    def _random_ids(self, level: int | str, index: int | str, count: int, shared: int) -> list[int]:
        assert self.token_range is not None
        low, high = self.token_range
        common = random.Random(f"servelab/{self.seed}/{level}/shared")
        own = random.Random(f"servelab/{self.seed}/{level}/{index}")
        ids = [common.randrange(low, high) for _ in range(shared)]
        return ids + [own.randrange(low, high) for _ in range(count - shared)]

    def _salt(self, level: int | str, index: int | str) -> str:
        return f"{random.Random(f'servelab/salt/{self.seed}/{level}/{index}').getrandbits(64):016x}"


@lru_cache(maxsize=4)
def _shuffled(size: int, seed: str) -> list[int]:
    return random.Random(seed).sample(range(size), size)


def _is_chat(prompt: Prompt) -> bool:
    return isinstance(prompt, list) and bool(prompt) and isinstance(prompt[0], dict)


def _salted(prompt: Prompt, salt: str) -> Prompt:
    if isinstance(prompt, str):
        return f"[{salt}]\n{prompt}"
    first: Any = prompt[0]
    if not isinstance(first, dict) or not isinstance(first.get("content"), str):
        return prompt
    return [first | {"content": f"[{salt}]\n{first['content']}"}, *prompt[1:]]
