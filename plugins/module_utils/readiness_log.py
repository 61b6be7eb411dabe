"""What a starting SGLang server says about itself in its log, release 0.5.5 to 0.5.23.

Log lines are read as records: progress bars use carriage returns, several ranks may share one physical line, and the
prefix names any set of ranks or none. Fields are read by name, never by position, because releases move them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

_PREFIX = re.compile(r"\[(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d)((?: [A-Z_]+\d+)*)\] ")
_ANSI = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_ACCESS = re.compile(r'INFO: +\S+:\d+ - "[A-Z]+ \S+ HTTP/')
# tqdm: "Capturing batches (bs=96 avail_mem=67.20 GB):   3%|▎         | 1/35 [00:04<02:47,  4.92s/it]"
# and, of the weights: "Multi-thread loading shards:  50% Completed | 1/2 [00:00<00:00,  8.06it/s]"
_BAR = re.compile(r"(?:^|: *)(?P<percent>\d+)%(?: Completed)? *\|(?:[^|\[]*\|)? *(?P<k>\d+)/(?P<n>\d+)")
_NUMBER = r"(-?\d+(?:\.\d+)?)"


@dataclass(frozen=True)
class Record:
    """One log record: `time` and `ranks` ("TP0", "DP0 TP0 EP0") are None where the line has no prefix."""

    text: str
    time: str | None = None
    ranks: str | None = None


def records(text: str) -> Iterator[Record]:
    """Split a log into records at line ends, carriage returns and at every prefix that stands inside a line."""
    for line in re.split(r"[\r\n]+", _ANSI.sub("", text)):
        starts = [match.start() for match in _PREFIX.finditer(line)]
        if not starts or starts[0] != 0:
            starts.insert(0, 0)
        for begin, end in zip(starts, [*starts[1:], len(line)], strict=True):
            piece = line[begin:end]
            if not piece.strip():
                continue
            match = _PREFIX.match(piece)
            if match:
                yield Record(piece[match.end() :].rstrip(), match[1], match[2].strip() or None)
            else:
                yield Record(piece.rstrip())


def number(text: str, *names: str) -> float | None:
    """The number behind `name: 12` or `name=12`, for the first of `names` that is there; None if none is.

    A word before the name makes it another field: `block accept len` is not `accept len`.
    """
    for name in names:
        match = re.search(rf"(?<![\w#])(?<!\w ){re.escape(name)} *[:=] *{_NUMBER}", text)
        if match:
            return float(match[1])
    return None


@dataclass(frozen=True)
class Pool:
    """A KV cache pool: its size in tokens, and in GB of one rank (None where the release does not say)."""

    tokens: int
    gb: float | None
    ranks: str | None


def kv_pools(text: str) -> list[Pool]:
    """Every pool the log reports. From 0.5.23 the line is gone and `max_total_num_tokens=` is all there is."""
    pools = []
    fallback = []
    for record in records(text):
        if "KV Cache is allocated" in record.text:
            tokens = number(record.text, "#tokens")
            whole = number(record.text, "KV size")
            halves = (number(record.text, "K size"), number(record.text, "V size"))
            if whole is None and halves[0] is not None and halves[1] is not None:
                whole = round(halves[0] + halves[1], 6)
            if tokens is not None:
                pools.append(Pool(int(tokens), whole, record.ranks))
        elif (tokens := number(record.text, "max_total_num_tokens")) is not None:
            fallback.append(Pool(int(tokens), None, record.ranks))
    return pools or fallback


@dataclass(frozen=True)
class Decode:
    """A decode report. `accept_len` is None where speculation is off: absent is not zero."""

    tps: float | None
    accept_len: float | None
    cuda_graph: bool | None


def decode_batches(text: str) -> list[Decode]:
    """Every `Decode batch` report of the log, in order."""
    found = []
    for record in records(text):
        if record.text.startswith("Decode batch"):
            graph = re.search(r"cuda graph: (True|False)", record.text)
            found.append(
                Decode(
                    number(record.text, "gen throughput (token/s)"),
                    number(record.text, "accept len"),
                    None if graph is None else graph[1] == "True",
                )
            )
    return found


# The steps of a start in their order, each with what its first line looks like.
PHASES: tuple[tuple[str, re.Pattern[str]], ...] = (
    ("importing", re.compile(r"server_args=")),
    ("joining ranks", re.compile(r"Init (?:torch distributed|parallel) begin")),
    ("loading weights", re.compile(r"Load weight begin|Loading .*(?:shards|checkpoint)")),
    (
        "allocating the KV cache",
        re.compile(r"Load weight end|KV Cache (?:is allocated|VA upper bound)|Memory pool end"),
    ),
    (
        "capturing CUDA graphs",
        re.compile(r"Capture .*(?:cuda|CUDA) ?graph begin|Capturing (?:batches|num tokens|prefill shape)"),
    ),
    (
        "warming up",
        re.compile(r"max_total_num_tokens=|Capture .*(?:cuda|CUDA) ?graph end|Application startup complete"),
    ),
    (
        "listening",
        # The last is all that is heard of a server's guests other than the first.
        re.compile(r"Uvicorn running on|The server is fired up and ready to roll|Dummy health check server started"),
    ),
)


@dataclass
class Start:
    """How far a start has come: `phase` is one of PHASES or "starting"; `detail` is what a person would like to see."""

    phase: str = "starting"
    detail: str = ""
    news: int = 0
    """Count of engine records; access lines do not count, because our own probing writes them."""
    facts: dict[str, float] = field(default_factory=dict)
    uncaptured: int = 0
    """Count of decode reports without a CUDA graph. Prefill has none in healthy servers, so it is not counted."""


def start_progress(text: str) -> Start:
    """Read the log of one start from its first line. A later phase never goes back, except to capture again."""
    start = Start()
    order = {name: position for position, (name, _) in enumerate(PHASES)}
    for record in records(text):
        if _ACCESS.search(record.text):
            continue
        start.news += 1
        for name, pattern in PHASES:
            if not pattern.search(record.text):
                continue
            # EAGLE captures graphs for target and draft in turn: "end" of one is followed by "begin" of the next.
            again = name == "capturing CUDA graphs" and start.phase == "warming up"
            if again or order[name] > order.get(start.phase, -1):
                start.phase, start.detail = name, ""
        bar = _BAR.search(record.text)
        if bar and start.phase in ("loading weights", "capturing CUDA graphs"):
            start.detail = f"{bar['k']} of {bar['n']}"
            if start.phase == "loading weights":
                start.detail = f"{bar['percent']} % ({bar['k']} of {bar['n']} shards)"
        if start.phase == "capturing CUDA graphs":
            what = re.search(r"Capture (.*?) ?(?:cuda|CUDA) ?graph begin", record.text)
            if what:
                start.detail = what[1].strip()
        for name in ("max_total_num_tokens", "context_len", "available_gpu_mem"):
            value = number(record.text, name)
            if value is not None:
                start.facts[name] = value
        if record.text.startswith("Decode batch") and "cuda graph: False" in record.text:
            start.uncaptured += 1
        if "KV Cache is allocated" in record.text:
            tokens = number(record.text, "#tokens")
            if tokens is not None:
                start.facts["kv_tokens"] = tokens
                if start.phase == "allocating the KV cache":
                    start.detail = f"{int(tokens)} tokens"
    return start


def warnings(start: Start) -> list[str]:
    """What a person should know about a server although it serves."""
    tokens = start.facts.get("kv_tokens", start.facts.get("max_total_num_tokens"))
    context, free = start.facts.get("context_len"), start.facts.get("available_gpu_mem")
    said = []
    if tokens is not None and context is not None and tokens < context:
        said.append(
            f"KV pool {int(tokens)} tokens < one request of context {int(context)}; concurrency>1 will queue/retract"
        )
        # A large rest beside a small pool means that the fraction, not the card, made the pool small.
        if free is not None and free > 8:
            said.append(f"available_gpu_mem {free:.2f} GB unused: raise mem-fraction-static")
    if start.uncaptured:
        said.append(
            f"{start.uncaptured} decode report(s) without a CUDA graph: every kernel is launched singly; "
            "capture larger batches (cuda_graph_max_bs) or remove disable_cuda_graph"
        )
    return said
