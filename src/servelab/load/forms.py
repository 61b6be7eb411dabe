"""Reads a recorded stream as strictly as `parse_response`, `split_events` and `read_reply` do one after the other,
without taking each of its events apart: that is most of what the client costs.

Nearly all events of a level differ in a few values: the text, the tokens so far, an id. A *form* is a chunk with one
event that was read strictly, with these values left open. It matches what has the same keys in the same order, values
of the same types, the same literals, and neither an empty text nor a zero where the first had none. What `Reader` makes
of an event depends on nothing else but the number of tokens, so that what matches need not be taken apart; what does
not match is.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Callable, Sequence
from itertools import accumulate, repeat
from operator import add

from servelab.shared.sse import Reader, Reply

MOST = 8  # forms of one level
MISSES = 100  # events without a form, when there are so many: this server's events are not alike

# Bytes that are searched at once for what is alike: in a stream with many breaks not all of it again after each.
FAR, NEAR = 1 << 20, 1 << 12

# A chunk that is one event of one line, in which servers send them. What stands otherwise is read the long way.
SIZE = rb"([0-9A-Fa-f]{1,8})\r\n"
CHUNK = re.compile(SIZE + rb"(data: ([^\r\n]*)\n\n)\r\n")
LAST_CHUNK = b"0\r\n\r\n"

# The tokens of JSON that is known to be valid: a key with its colon, a string, what may be a number, anything.
TOKEN = re.compile(rb'("(?:[^"\\]|\\.)*"\s*:\s*)|("(?:[^"\\]|\\.)+")|([-+.\deE]+)|(""|.)', re.DOTALL)

# What a strict reader of JSON takes for a string that is not empty, for one without escapes (which is all that stands
# behind most keys, and costs a third less), and for a whole number above zero.
STRING = rb'"(?!")[^"\\\x00-\x1f]*+(?:\\(?:["\\/bfnrt]|u[0-9A-Fa-f]{4})[^"\\\x00-\x1f]*+)*"'
PLAIN = rb'"[^"\\\x00-\x1f]++"'
NUMBER = rb"[1-9][0-9]{0,17}+"
TEXTS = (b'"text"', b'"content"', b'"reasoning')
COUNTED = b'"completion_tokens"'
PROBE = 7654321

Form = re.Pattern[bytes]


class Forms:
    """The forms of one level's events, found as they come."""

    def __init__(self) -> None:
        self._known: list[Form] = []
        self._misses = 0

    def read(
        self,
        raw: bytes,
        start: int,
        edges: Sequence[int],
        times: Sequence[int],
        count: Callable[[str], int] | None = None,
    ) -> Reply | None:
        """What a response said whose body begins at `start`; None where not each of its chunks is an event of one line,
        which does not make it wrong. `edges` and `times`: where the reads ended and when their bytes had arrived."""
        reader = Reader()
        reply = reader.reply
        at, end, reach = start, len(raw) - len(LAST_CHUNK), FAR
        while at < end:
            chunk = CHUNK.match(raw, at, end)
            if chunk is None or int(chunk[1], 16) != len(chunk[2]):
                return None
            try:
                text = chunk[3].decode()
            except UnicodeDecodeError:
                return None
            deltas = len(reply.chunks)
            reader.take(times[bisect_left(edges, chunk.end(2))], text)
            at = chunk.end()
            plain = len(reply.chunks) == deltas + 1 and reply.error is None and reply.finish_reason is None
            # A text in which tokens will have to be counted is needed.
            if plain and not reply.done and (count is None or reply.chunks[-1][1] is not None):
                form = self._form_of(chunk)
                if form is not None:
                    behind = _read_alike(reader, form, raw, at, min(end, at + reach), edges, times)
                    at, reach = behind, max(NEAR, 2 * (behind - at))
        return reader.end(count) if at == end else None

    def _form_of(self, chunk: re.Match[bytes]) -> Form | None:
        """The form of an event that was read and brought one delta."""
        for known in self._known:
            if known.fullmatch(chunk.string, chunk.start(), chunk.end()):
                return known
        if len(self._known) == MOST:
            self._misses += 1
            if self._misses == MISSES:
                self._known = []
        made = form(chunk[3]) if len(self._known) < MOST and self._misses < MISSES else None
        if made is not None:
            self._known.append(made)
        return made


def _read_alike(
    reader: Reader, form: Form, raw: bytes, at: int, end: int, edges: Sequence[int], times: Sequence[int]
) -> int:
    """Read the chunks from `at` on that are of that form, as the one before is; returns where they end. No step here is
    taken chunk by chunk in Python."""
    found = form.findall(raw, at, end)  # each (size, event) or (size, event, tokens)
    counted = form.groups == 3
    if len(found) < 2 or counted != (reader.reply.chunks[-1][1] is not None):
        return at
    sizes, events, *stated = zip(*found, strict=True)
    lengths = list(map(len, events))
    if any(int(size, 16) != length for size, length in set(zip(sizes, lengths, strict=True))):
        return at
    # Where chunks end: behind \r\n, as behind the size.
    ends: list[int] = list(accumulate(map(add, map(len, sizes), map((4).__add__, lengths)), initial=at))
    # What was skipped to find the last one is missing in these sums.
    last = len(found) - 1
    if raw.rfind(_chunk(found[last]), at, end) != ends[last]:
        last = next((i for i, one in enumerate(found) if not raw.startswith(_chunk(one), ends[i])), last + 1) - 1
    # The last event is left to be taken apart, because of what else its usage says.
    if last < 1:
        return at
    try:
        raw[at : ends[last]].decode()
    except UnicodeDecodeError:
        return at
    totals = None
    if counted:
        rising = [reader.total, *map(int, stated[0][: last + 1])]
        if sorted(rising) != rising:
            return at
        totals = rising[1:-1]
    # An event has arrived when the last byte of its chunk's data has.
    arrived = map(times.__getitem__, map(bisect_left, repeat(edges), map((-2).__add__, ends[1 : last + 1])))
    reader.take_deltas(list(arrived), totals)
    return ends[last]


def _chunk(found: tuple[bytes, ...]) -> bytes:
    return b"%b\r\n%b\r\n" % found[:2]


def form(data: bytes) -> Form | None:
    """The form of an event that was read and brought one delta. Its groups: the size of its chunk, the event, and where
    there is one the number of tokens so far. None where more than keys and types decides what the event means."""
    # /generate repeats its text, and verify steps are taken from every event that has them.
    if b'"meta_info"' in data or b'"sglext"' in data or data.count(COUNTED) > 1:
        return None
    pattern, probe, before = b"", b"", b""
    counted = False
    for key, string, number, other in TOKEN.findall(data):
        if b"\\" in key:  # another way to write one of the names above
            return None
        whole = re.fullmatch(NUMBER, number) is not None
        if whole and before.startswith(COUNTED):
            counted = True
            pattern += b"(%b)" % NUMBER
            probe += b"%d" % PROBE
        else:
            value = STRING if before.startswith(TEXTS) else PLAIN
            pattern += value if string else NUMBER if whole else re.escape(key or number or other)
            probe += key or string or number or other
        before = key
    if counted:
        reader = Reader()
        reader.take(0, probe.decode())
        if reader.total != PROBE:  # that number is none of the usage
            return None
    return re.compile(SIZE + rb"(data: " + pattern + rb"\n\n)\r\n")
