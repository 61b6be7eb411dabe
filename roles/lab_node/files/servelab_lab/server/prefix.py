"""The prefix cache: how many tokens at the beginning of a prompt are known from earlier ones.

Every prefix of what was cached is known by a hash that goes on from the hash of the prefix before it, so that the
longest known one is found by halving. When the KV cache is full, the oldest prefixes go first, however lately they
were used.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import accumulate


def _prefixes(words: Iterable[str]) -> list[int]:
    """Return a hash for the first word, the first two, …"""
    hashes = list(accumulate(words, lambda before, word: hash((before, word)), initial=0))
    return hashes[1:]


class PrefixCache:
    """Room for `capacity` tokens; one more pushes out the oldest."""

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._known: set[int] = set()
        self._order: deque[int] = deque()

    def __len__(self) -> int:
        return len(self._known)

    def match(self, words: Iterable[str]) -> int:
        """Return how many of the first words are known."""
        hashes = _prefixes(words)
        known, unknown = 0, len(hashes) + 1
        while unknown - known > 1:
            middle = (known + unknown) // 2
            if hashes[middle - 1] in self._known:
                known = middle
            else:
                unknown = middle
        return known

    def add(self, words: Iterable[str]) -> None:
        """Remember a sequence and all its beginnings."""
        for prefix in _prefixes(words):
            if prefix not in self._known:
                self._known.add(prefix)
                self._order.append(prefix)
        while len(self._order) > self._capacity:
            self._known.discard(self._order.popleft())

    def clear(self) -> None:
        self._known.clear()
        self._order.clear()
