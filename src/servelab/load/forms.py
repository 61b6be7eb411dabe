"""Reads the events of a stream as strictly as `read_reply`, without taking each of them apart.

Nearly all events of a level differ in a few values: the text, the tokens so far, an id. A *form* is an event that was
read strictly, with these values left open. It matches what has the same keys in the same order, values of the same
types, the same literals, and neither an empty text nor a zero where the first had none. What `Reader` makes of an event
depends on nothing else but the number of tokens, so that what matches need not be taken apart; what does not match is.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import islice, pairwise

from servelab.shared.sse import Reader, Reply

MOST = 8  # forms of one level
MISSES = 100  # events without a form, when there are so many: this server's events are not alike

# The tokens of JSON that is known to be valid: a key with its colon, a string, what may be a number, anything.
TOKEN = re.compile(r'("(?:[^"\\]|\\.)*"\s*:\s*)|("(?:[^"\\]|\\.)+")|([-+.\deE]+)|(""|.)', re.DOTALL)

# What a strict reader of JSON takes for a string that is not empty, and for a whole number above zero.
STRING = r'"(?!")[^"\\\x00-\x1f]*(?:\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})[^"\\\x00-\x1f]*)*"'
NUMBER = "[1-9][0-9]{0,17}"
COUNTED = '"completion_tokens"'
PROBE = 7654321

Match = Callable[[str], re.Match[str] | None]


class Forms:
    """The forms of one level's events, found as they come."""

    def __init__(self) -> None:
        self._known: list[Match] = []
        self._misses = 0

    def read(self, times: Sequence[int], events: Sequence[str], count: Callable[[str], int] | None = None) -> Reply:
        """The same as `read_reply` of them."""
        reader = Reader()
        reply = reader.reply
        at, size = 0, len(events)
        while at < size:
            deltas = len(reply.chunks)
            reader.take(times[at], events[at])
            at += 1
            # A text in which tokens will have to be counted is needed.
            plain = len(reply.chunks) == deltas + 1 and reply.error is None and reply.finish_reason is None
            if plain and not reply.done and count is None:
                at = self._read_alike(reader, times, events, at)
        return reader.end(count)

    def _read_alike(self, reader: Reader, times: Sequence[int], events: Sequence[str], at: int) -> int:
        """Read the events from `at` on that are like the one before; returns where they end."""
        match = self._form_of(events[at - 1])
        if match is None:
            return at
        found = []
        for data in islice(events, at, None):
            same = match(data)
            if same is None:
                break
            found.append(same)
        last = at + len(found) - 1
        if last <= at or (found[0].re.groups == 1) != (reader.reply.chunks[-1][1] is not None):
            return at
        totals = None
        if found[0].re.groups:
            totals = [int(same[1]) for same in found]
            if any(b < a for a, b in pairwise((reader.total, *totals))):
                return at
            totals.pop()
        reader.take_deltas(times[at:last], totals)
        return last

    def _form_of(self, data: str) -> Match | None:
        """The form of an event that was read and brought one delta."""
        for match in self._known:
            if match(data):
                return match
        if len(self._known) == MOST:
            self._misses += 1
            if self._misses == MISSES:
                self._known = []
        made = form(data) if len(self._known) < MOST and self._misses < MISSES else None
        if made is not None:
            self._known.append(made)
        return made


def form(data: str) -> Match | None:
    """The form of an event that was read and brought one delta. Its group, where it has one, is the number of tokens so
    far. None where more than keys and types decides what the event means."""
    # /generate repeats its text, and verify steps are taken from every event that has them.
    if '"meta_info"' in data or '"sglext"' in data or data.count(COUNTED) > 1:
        return None
    pattern, probe, before = "", "", ""
    groups = 0
    for key, string, number, other in TOKEN.findall(data):
        if "\\" in key:  # another way to write one of the names above
            return None
        counter = re.fullmatch(NUMBER, number) is not None
        if counter and before.startswith(COUNTED):
            groups += 1
            pattern += f"({NUMBER})"
            probe += str(PROBE)
        else:
            pattern += STRING if string else NUMBER if counter else re.escape(key or number or other)
            probe += key or string or number or other
        before = key
    if groups:
        reader = Reader()
        reader.take(0, probe)
        if reader.total != PROBE:  # that number is none of the usage
            return None
    return re.compile(pattern).fullmatch
