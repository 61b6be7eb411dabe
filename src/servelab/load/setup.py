"""From the words of the command line to what a session needs, with all that is wrong with them at once."""

from __future__ import annotations

import argparse
import hashlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servelab.load import arrivals, datasets, tokens
from servelab.load.server import Server, ServerError
from servelab.load.workload import Workload


@dataclass(frozen=True)
class Level:
    """One level. `name`: as in file names and rows, a number for a closed loop. `rate`: requests per reported
    second."""

    name: int | str
    concurrency: int | None
    shape: str
    rate: float | None = None
    times: Callable[[float], Iterator[float]] | None = None  # reported seconds per wall second → wall seconds
    finite: bool = False
    seconds: float | None = None  # how long a finite one lasts, reported time

    def describe(self) -> dict[str, Any]:
        """For the summary."""
        return {"shape": self.shape, "rate": self.rate}


@dataclass(frozen=True)
class Options:
    """What the command line says. `min_seconds` and `slos` (ms) are reported time, `timeout` wall seconds."""

    server: Server
    out: Path
    mode: str
    levels: list[Level]
    workload: Workload
    workload_says: dict[str, Any]
    min_seconds: float
    min_waves: float
    min_requests: int
    warmup_requests: int
    timeout: float
    drain: bool
    most_waiting: int
    slos: dict[str, float]
    failures_allowed: float
    gpus: int | None
    watch_cards: float
    model: str | None
    expect_model: str | None
    expect_version: str | None
    progress_file: Path | None


def options(args: argparse.Namespace) -> tuple[Options | None, list[str]]:
    """The options, or None and what is wrong with them, a sentence each."""
    problems: list[str] = []
    key = os.environ.get("SERVELAB_API_KEY")
    if args.api_key_file is not None:
        try:
            key = args.api_key_file.read_text().strip()
        except (OSError, UnicodeDecodeError) as problem:
            problems.append(f"--api-key-file: {problem}")
    if key and not (key.isascii() and key.isprintable()):
        problems.append("the API key has characters that no HTTP header can carry")
    proxy = os.environ.get("SERVELAB_PROXY")
    if args.proxy is not None:
        proxy = args.proxy
        if "@" in proxy:
            problems.append(
                "--proxy: a user and password belong in SERVELAB_PROXY in the environment, not on a command line"
            )
    server = None
    try:
        server = Server(args.url, key or None, proxy=proxy or None, ca_file=args.ca_file)
        if server.tls:
            server.wire(False).close()  # its certificates can be read
    except ServerError as problem:
        problems.append(str(problem) if str(problem).startswith("--") else f"--url: {problem}")
    if args.ca_file is not None and not args.url.startswith("https:"):
        problems.append("--ca-file is for https")
    workload = _workload(args, problems)
    levels = _levels(args, workload, problems)
    if problems or server is None or workload is None:
        return None, problems
    found = Options(
        server=server,
        out=args.out,
        mode=args.mode,
        levels=levels,
        workload=workload,
        workload_says=_says(args, workload),
        min_seconds=args.min_seconds,
        min_waves=args.min_waves,
        min_requests=args.min_requests,
        warmup_requests=args.warmup_requests,
        timeout=args.timeout,
        drain=args.after_window == "drain",
        most_waiting=args.most_waiting,
        slos=dict(args.slo),
        failures_allowed=args.failures_allowed,
        gpus=args.gpus,
        watch_cards=args.watch_cards,
        model=args.model,
        expect_model=args.expect_model,
        expect_version=args.expect_version,
        progress_file=args.progress_file,
    )
    return found, []


def _workload(args: argparse.Namespace, problems: list[str]) -> Workload | None:
    tokenizer = None
    entries: list[datasets.Entry] = []
    try:
        if args.tokenizer is not None:
            tokenizer = tokens.Local(args.tokenizer)
        if args.dataset is not None:
            known = tokenizer
            length = (lambda text: len(known.encode(text, False))) if known is not None else None
            entries = datasets.read(args.dataset, length)
    except tokens.TokenizerError as problem:
        problems.append(f"--tokenizer: {problem}")
        return None
    except datasets.DatasetError as problem:
        problems.append(f"--dataset: {problem}")
        return None
    workload = Workload(
        api=args.api,
        seed=args.seed,
        input_tokens=args.input_tokens,
        output_tokens=args.output_tokens,
        form=args.prompt_form,
        ignore_eos=not args.stop_at_eos,
        tokenizer=tokenizer,
        token_range=args.token_range,
        salt=args.salt or ("key" if entries else "text"),
        cached_share=args.cached_share,
        entries=entries,
        in_order=args.arrivals == "trace",
    )
    problems += workload.problems()
    return workload


def _levels(args: argparse.Namespace, workload: Workload | None, problems: list[str]) -> list[Level]:
    if args.arrivals in ("closed", "together"):
        if args.rates is not None:
            problems.append("--rates is for an open loop: choose --arrivals poisson, constant, burst or ramp")
        levels = args.levels or [1]
        if len(set(levels)) < len(levels):
            problems.append("--levels names a level twice: each is measured once per run")
        return [Level(level, level, args.arrivals) for level in levels]
    if args.levels is not None:
        problems.append(f"--levels is for a closed loop; --arrivals {args.arrivals} takes --rates")
    if args.after_window == "cancel":
        problems.append(
            "--after-window cancel is for a closed loop: an open one cancels only what came after its window"
        )
    if args.arrivals == "trace":
        return _trace(args, workload, problems)
    if not args.rates:
        problems.append(f"--arrivals {args.arrivals} needs --rates: requests per second")
        return []
    if len(set(args.rates)) < len(args.rates):
        problems.append("--rates names a rate twice: each is measured once per run")
    return [_open(args, rate, problems) for rate in args.rates]


def _open(args: argparse.Namespace, rate: float, problems: list[str]) -> Level:
    shape = args.arrivals
    makes: dict[str, Callable[[float], Iterator[float]]] = {
        "poisson": lambda scale: arrivals.poisson(rate * scale, args.seed),
        "constant": lambda scale: arrivals.constant(rate * scale),
        "burst": lambda scale: arrivals.burst(rate * scale, args.burst),
        "ramp": lambda scale: arrivals.ramp(args.ramp_from * scale, rate * scale, args.min_seconds / scale),
    }
    if shape == "ramp" and (args.ramp_from + rate) / 2 * args.min_seconds < 1:
        problems.append(
            f"a ramp from {args.ramp_from:g} to {rate:g} in --min-seconds {args.min_seconds:g} has no request"
        )
    return Level(f"{shape}-{rate:g}", None, shape, rate, makes[shape], shape == "ramp", args.min_seconds)


def _trace(args: argparse.Namespace, workload: Workload | None, problems: list[str]) -> list[Level]:
    if args.rates is not None:
        problems.append("--rates: a trace has its own times; --trace-speed stretches them")
    if args.dataset is None:
        problems.append("--arrivals trace needs --dataset: the file with the times")
    if workload is None or not workload.entries:
        return []
    try:
        times = datasets.trace(args.dataset, workload.entries, args.trace_speed)
    except datasets.DatasetError as problem:
        problems.append(f"--dataset: {problem}")
        return []
    return [Level("trace", None, "trace", None, lambda scale: (time / scale for time in times), True, times[-1])]


def _says(args: argparse.Namespace, workload: Workload) -> dict[str, Any]:
    """The summary's description of the workload."""
    if args.dataset is not None:
        said = f"{len(workload.entries)} entries of {args.dataset.name}"
    elif args.prompt_form == "ids" and workload.tokenizer is None:
        said = "random token ids (a draft's acceptance on them says nothing)"
    else:
        said = "generated sentences, each with its own beginning"
    return {
        "api": args.api,
        "input_tokens": args.input_tokens,
        "output_tokens": args.output_tokens,
        "ignore_eos": not args.stop_at_eos,
        "temperature": 0,
        "seed": args.seed,
        "prompts": said,
        "dataset_sha256": hashlib.sha256(args.dataset.read_bytes()).hexdigest() if args.dataset is not None else None,
        "prompt_form": args.prompt_form,
        "input_tokens_exact": workload.tokenizer is not None or args.token_range is not None,
        "salt": workload.salt,
        "cached_share": args.cached_share,
        "arrivals": args.arrivals,
        "burst": args.burst if args.arrivals == "burst" else None,
        "min_seconds": args.min_seconds,
        "min_waves": args.min_waves,
        "min_requests": args.min_requests,
        "warmup_requests": args.warmup_requests,
        "failures_allowed": args.failures_allowed,
    }
