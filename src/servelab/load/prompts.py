"""Prompts and request bodies. A prompt depends on nothing but (seed, level, index): every mode gets the same ones.

They are plain generated English, because what a draft model guesses depends on the text, and random words would
measure that wrongly. Each starts with its own number, so that no prefix cache can help. Without a tokenizer
their length is counted in words and full stops, about one token each; the exact number comes back as usage.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator

WHO = [
    *(
        "The harbour master",
        "A young engineer",
        "The old teacher",
        "My neighbour",
        "The night nurse",
        "A careful farmer",
    ),
    *(
        "The captain",
        "The librarian",
        "A tired driver",
        "The baker",
        "Our gardener",
        "The new doctor",
        "A quiet visitor",
    ),
    *("The mayor", "The watchmaker", "A student"),
]
DID = [
    *("repaired", "described", "carried", "found", "measured", "painted", "followed", "opened", "sold", "counted"),
    *("watched", "remembered", "moved", "cleaned", "borrowed", "explained"),
]
WHAT = [
    *("the wooden boat", "a long letter", "the broken clock", "three heavy boxes", "the northern bridge", "an old map"),
    *(
        "the green door",
        "a small machine",
        "the water supply",
        "the missing key",
        "a basket of apples",
        "the last train",
    ),
    *("the winter garden", "a box of tools", "the second window", "the main road"),
]
WHEN = [
    *("before the storm came", "early in the morning", "after a long discussion", "while the others were asleep"),
    *("on the first day of spring", "without saying a word", "at the end of the week", "during the long summer"),
    *("as soon as it was light", "for the third time that year", "when the market closed", "with great patience"),
    *("because nobody else would", "although it was raining", "near the river", "on the way home"),
]


def prompt(seed: int, level: int, index: int, words: int) -> str:
    """About `words` words of generated English, never fewer than ten."""
    rng = random.Random(f"servelab/{seed}/{level}/{index}")
    opening = (
        f"{rng.getrandbits(32)} is the number of this report . Continue it in the same style, sentence by sentence:"
    )
    text = opening.split()
    while len(text) < words:
        text += f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)} {rng.choice(WHEN)} .".split()
    return " ".join(text[: max(10, words)]).replace(" .", ".")


def requests(
    *,
    host: str,
    path: str,
    api: str,
    model: str,
    seed: int,
    level: int,
    input_tokens: int,
    output_tokens: int,
    key: str | None,
) -> Iterator[bytes]:
    """The bytes of request 0, 1, 2, … of a level: complete HTTP/1.1 requests to `path` + the API's own path.

    Greedy, with a fixed number of output tokens, streamed, with cumulative usage on every delta where the server can.
    """
    head = (
        f"POST {path}/v1/{'chat/completions' if api == 'chat' else 'completions'} HTTP/1.1\r\n"
        f"Host: {host}\r\nUser-Agent: servelab\r\nAccept: text/event-stream\r\nContent-Type: application/json\r\n"
    )
    if key:
        head += f"Authorization: Bearer {key}\r\n"
    common = {
        "model": model,
        "max_tokens": output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    index = 0
    while True:
        text = prompt(seed, level, index, input_tokens)
        content = {"messages": [{"role": "user", "content": text}]} if api == "chat" else {"prompt": text}
        body = json.dumps(common | content).encode()
        yield f"{head}Content-Length: {len(body)}\r\n\r\n".encode() + body
        index += 1
