"""Generated prompts. One depends on nothing but (seed, level, index): every mode gets the same ones.

They are plain English, because what a draft model guesses depends on the text, and random words would measure that
wrongly. Each starts with its own number, so that no prefix cache can help, unless a common beginning is asked for.
"""

from __future__ import annotations

import random

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


def words(seed: int, level: int | str, index: int | str, count: int, shared: int = 0) -> list[str]:
    """At least `count` words and full stops of generated English. The first `shared` of them are the same for every
    index."""
    text = _sentences(random.Random(f"servelab/{seed}/{level}/shared"), shared)[:shared] if shared else []
    rng = random.Random(f"servelab/{seed}/{level}/{index}")
    opening = "is the number of this report . Continue it in the same style, sentence by sentence:"
    text += [str(rng.getrandbits(32)), *opening.split()]
    return text + _sentences(rng, count - len(text))


def _sentences(rng: random.Random, count: int) -> list[str]:
    text: list[str] = []
    while len(text) < count:
        text += f"{rng.choice(WHO)} {rng.choice(DID)} {rng.choice(WHAT)} {rng.choice(WHEN)} .".split()
    return text


def join(text: list[str]) -> str:
    """Words and full stops as a person writes them."""
    return " ".join(text).replace(" .", ".")


def prompt(seed: int, level: int | str, index: int | str, count: int, shared: int = 0) -> str:
    """`count` words and full stops of generated English, never fewer than ten that are its own."""
    return join(words(seed, level, index, count, shared)[: max(10 + shared, count)])
