"""One run of the client: checks, warm-up, the levels, summary.json."""

from __future__ import annotations

import gc
import itertools
import math
import platform
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from types import FrameType
from typing import Any

from servelab import __version__
from servelab.load import arrivals, capture, cards, clock, loop, metrics, rows
from servelab.load.forms import Forms
from servelab.load.progress import Progress, write_json
from servelab.load.server import (
    ServerError,
    accept_length,
    gpus,
    late_seconds,
    most_running,
    same_start,
    simulated,
    tells_verify_steps,
)
from servelab.load.setup import Level, Options
from servelab.load.wire import kernel_stamps_work
from servelab.load.workload import PATHS, PRIMER
from servelab.shared.sse import Reply

OK, INVALID, NOT_STARTED = 0, 3, 4
SECOND = 1_000_000_000
SLACK = 1024  # requests that an open loop may launch before it notices that too many wait


class Stop:
    """Becomes true at the first SIGTERM or SIGINT; a second one ends the process as usual."""

    def __init__(self) -> None:
        self.asked = False
        self._before = {number: signal.signal(number, self._ask) for number in (signal.SIGTERM, signal.SIGINT)}

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        self.restore()

    def restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)


class Session:
    """`say` gets one line per event that a log should keep."""

    def __init__(self, options: Options, say: Callable[[str], None]) -> None:
        self.options = options
        self.say = say
        self.server = options.server
        self.workload = options.workload
        self.progress = Progress(
            options.progress_file or options.out / "progress.json",
            [level.name for level in options.levels],
            options.workload.output_tokens,
        )
        self.stop = Stop()
        self.scale = 1.0
        self.stamped = False
        self.model = ""
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None
        self.started = _now()
        self.cards: cards.Watch | None = None
        self.forms = Forms()
        self.request_seconds = 0.0  # how long a request took last, for the next ramp

    def run(self) -> int:
        """Exit status: 0 every level valid, 3 some level not, 4 could not start. `options.out` exists and is empty."""
        try:
            return self._run()
        finally:
            if self.cards is not None:
                self.cards.end()
            self.progress.end_line()
            self.stop.restore()

    def _run(self) -> int:
        try:
            self._identify()
            self._warm_up()
        except ServerError as problem:
            self.progress.phase("starting", str(problem), state="failed", cause=str(problem))
            self.progress.end_line()
            self.say(f"could not start: {problem}")
            return NOT_STARTED
        (self.options.out / "levels").mkdir()
        if self.options.watch_cards:
            self.cards = cards.Watch(self.options.out, self.options.watch_cards)
            if self.cards.why_not:
                self.say(f"the cards are not watched: {self.cards.why_not}")
        levels: list[dict[str, Any]] = []
        for asked in self.options.levels:
            if self.stop.asked:
                break
            level = self._level(asked)
            levels.append(level)
            self._summarise(levels, finished=False)
            self.progress.end_line()
            self.say(describe(level))
        if self.cards is not None:
            self.cards.end()
            for level in levels:  # the last readings of each came late
                level["cards"] = self._cards(level)
        self._check_identity(levels)
        summary = self._summarise(levels, finished=True)
        bad = [level["level"] for level in levels if not level["valid"]]
        words = "interrupted, partial results" if self.stop.asked else "all levels measured"
        if bad:
            words += f"; not valid: {', '.join(map(str, bad))}"
        status = INVALID if bad or summary["partial"] else OK
        done = sum(level["requests"]["completed"] for level in levels)
        self.progress.phase("finished", words, state="done", done=done, valid=status == OK)
        return status

    def _cards(self, level: dict[str, Any]) -> dict[str, Any] | None:
        window = level["window"]
        if self.cards is None or not window:
            return None
        return cards.summary(self.cards.readings(), window["start"], window["end"])

    def _identify(self) -> None:
        options = self.options
        url = self.server.url
        self.progress.phase("starting", f"asking {url} who it is")
        served = self.server.model()
        self.model = options.model or served
        self.before = self.server.info()
        self.server.healthy()
        write_json(options.out / "server_info.json", {"before": self.before, "after": None}, indent=1)
        version = (self.before or {}).get("version")
        if options.expect_model is not None and served != options.expect_model:
            raise ServerError(f"{url} serves {served!r}, not {options.expect_model!r}")
        if options.expect_version is not None and version != options.expect_version:
            raise ServerError(f"{url} is SGLang {version}, not {options.expect_version}")
        simulation = simulated(self.before)
        if simulation is not None:
            try:
                self.scale = float(simulation.get("time_scale") or 1)
            except (TypeError, ValueError):
                raise ServerError(f"time_scale {simulation.get('time_scale')!r} is not a number") from None
            if not self.scale > 0:
                raise ServerError(f"time_scale {self.scale} is not above 0")
        self.progress.scale = self.scale
        self.progress.simulated = simulation is not None
        if options.workload.api != "generate" and tells_verify_steps(self.before):
            self.workload = replace(options.workload, spec_details=True)
        self.stamped = not self.server.tls and kernel_stamps_work()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        most = max(level.concurrency or options.most_waiting + SLACK for level in options.levels)
        need = most + 64
        if soft != resource.RLIM_INFINITY and soft < need:
            if hard != resource.RLIM_INFINITY and hard < need:
                raise ServerError(f"{most} requests in flight need {need} open files, the limit is {hard}")
            resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

    def _payloads(self, level: int | str) -> Iterator[bytes]:
        head = self.server.head(PATHS[self.workload.api])
        return self.workload.payloads(level, head, self.model)

    def _warm_up(self) -> None:
        """The first requests after a start are slow and prove that the server serves. Level 0: prompts of their own."""
        count = self.options.warmup_requests
        if not count:
            return
        self.progress.phase("warming up", f"warming up with {count} request{'s' if count != 1 else ''}")
        at_once = min(count, max(level.concurrency or count for level in self.options.levels))
        self._ahead("a warm-up request", at_once, count, self._payloads(0))

    def _ahead(self, what: str, at_once: int, count: int, payloads: Iterator[bytes]) -> None:
        """Requests that are not measured but must succeed. Raises ServerError."""
        path = self.options.out / "warmup.capture"
        wire = self.server.wire(self.stamped)
        plan = loop.Plan(0, at_once, 0, count, self.options.timeout, drain=True)
        shape = arrivals.Closed(at_once, 0)
        try:
            with capture.Writer(path, capture.About(0, 0, None)) as writer:
                state = loop.run(wire, shape, plan, payloads, writer, [], lambda _: self.stop.asked)
            for record in capture.read(path):
                reply = self._interpret(record, expect_length=count > 1)
                if reply.error is not None and not self.stop.asked:
                    kind, detail = reply.error
                    raise ServerError(f"{what} failed: {kind}: {detail.strip()[:300]}")
        finally:
            wire.close()
            path.unlink(missing_ok=True)
        self.request_seconds = state.seconds_of_ended / state.ended if state.ended else 0.0

    def _interpret(self, record: capture.Record, expect_length: bool = True) -> Reply:
        tokenizer = self.workload.tokenizer
        count = (lambda text: len(tokenizer.encode(text, False))) if tokenizer is not None else None
        expected = self.workload.expected(record.index) if expect_length else None
        return rows.interpret(record, expected, count, self.forms)

    def _level(self, asked: Level) -> dict[str, Any]:
        options = self.options
        name = asked.name
        flushed = self._flush(name)
        plan = loop.Plan(
            name=name,
            at_once=asked.concurrency or options.most_waiting,
            # A finite shape ends by itself; this only tells how long it will take.
            min_seconds=(options.min_seconds if asked.seconds is None else asked.seconds) / self.scale,
            min_requests=max(options.min_requests, math.ceil(options.min_waves * (asked.concurrency or 0))),
            timeout=options.timeout,
            drain=options.drain,
            failures=options.failures_allowed,
        )
        shape = self._shape(asked)
        path = (
            options.out / "levels" / f"level-{name:04d}.capture"
            if isinstance(name, int)
            else (options.out / "levels" / f"level-{name}.capture")
        )
        wire = self.server.wire(self.stamped)
        late = late_seconds(self._info())
        intervals: list[tuple[int, int]] = []

        def tick(state: loop.State) -> bool:
            self.progress.level(plan, state, wire.clock())
            return self.stop.asked

        gc.collect()
        gc.disable()  # a collection would stop the reading for as long as it takes
        cpu, wall, offset = time.process_time_ns(), time.monotonic_ns(), clock.offset()
        epoch_offset = 0 if self.stamped else offset.ns
        expected = None if self.workload.entries else self.workload.expected(0)
        try:
            with capture.Writer(path, capture.About(name, epoch_offset, expected)) as writer:
                state = loop.run(wire, shape, plan, self._payloads(name), writer, intervals, tick)
        finally:
            gc.enable()
            wire.close()
        wall = time.monotonic_ns() - wall
        cpu_share = (time.process_time_ns() - cpu) / wall
        stepped = clock.stepped(offset, clock.offset(), wall)
        if state.ended:
            self.request_seconds = state.seconds_of_ended / state.ended
        info = self._info()
        self.progress.phase("reading", f"level {name}: reading what was recorded", name, done=state.ended)
        window = _window(asked, state, intervals)
        tally = metrics.Tally(
            window,
            open_loop=asked.concurrency is None,
            slos={figure: most / self.scale for figure, most in options.slos.items()},
        )
        with path.with_suffix(".jsonl").open("x") as file:
            for record in capture.read(path):
                reply = self._interpret(record)
                tally.add(record, reply)
                file.write(rows.line(record, reply, name, epoch_offset))
        path.unlink()
        level: dict[str, Any] = {"level": name, "arrivals": asked.describe(), "steady": not asked.finite}
        level |= tally.summary(asked.concurrency, self.scale, self.stamped, cpu_share)
        if level["accept_length"] is None and flushed == "flushed":
            # The server's own average starts at a flush; without one it is over everything that ever ran.
            level["accept_length"] = accept_length(info)
            level["accept_length_from"] = "server" if level["accept_length"] is not None else None
        count = options.gpus or gpus(self.before)
        if count and level["output_tok_s"] is not None:
            level["output_tok_s_per_gpu"] = float(f"{level['output_tok_s'] / count:.6g}")
        level["failures_allowed"] = options.failures_allowed
        level["cache"] = flushed
        level["after_window"] = "drained" if options.drain and not self.stop.asked else "cancelled"
        level["window"] = window and {
            "start": round((window.start + epoch_offset) / SECOND, 6),
            "end": round((window.end + epoch_offset) / SECOND, 6),
        }
        level["cards"] = self._cards(level)
        level["self"]["connections"] = wire.opened
        late_now = late_seconds(info)
        level["simulator_late_share"] = (
            None if late is None or late_now is None else round((late_now - late) * 1e9 / wall, 4)
        )
        level["notices"] = metrics.notices(level, most_running(info), self.workload.cached_share)
        reasons = metrics.reasons_invalid(level, self.scale)
        if state.gave_up is not None:
            reasons.append(state.gave_up)
        if stepped:
            reasons.append("the system clock was set during the level")
        if self.stop.asked:
            reasons.append("interrupted")
        return {"concurrency": asked.concurrency, "valid": not reasons, "invalid_reasons": reasons} | level

    def _flush(self, name: int | str) -> str:
        """Empty the server's cache, and put the common beginning of the level's prompts into it where there is one."""
        self.progress.phase("flushing", f"level {name}: emptying the server's cache", name)
        try:
            flushed = self.server.flush_cache()
        except ServerError as problem:
            flushed = str(problem)
        if self.workload.cached_share and not self.stop.asked:
            self.progress.phase(
                "priming", f"level {name}: filling the cache with what its prompts have in common", name
            )
            head = self.server.head(PATHS[self.workload.api])
            primer = self.workload.payload(name, PRIMER, head, self.model)
            seconds = self.request_seconds
            try:
                self._ahead("the request that fills the cache", 1, 1, itertools.repeat(primer))
            except ServerError as problem:
                flushed = str(problem)
            self.request_seconds = seconds
        return flushed

    def _shape(self, asked: Level) -> arrivals.Shape:
        if asked.concurrency is not None:
            at_once = asked.concurrency == 1 or asked.shape == "together"
            return arrivals.Closed(asked.concurrency, 0.0 if at_once else self.request_seconds)
        assert asked.times is not None
        return arrivals.Open(asked.times(self.scale), finite=asked.finite)

    def _info(self) -> dict[str, Any] | None:
        try:
            self.after = self.server.info()
        except ServerError:
            self.after = None
        return self.after

    def _check_identity(self, levels: list[dict[str, Any]]) -> None:
        if not levels:
            return
        write_json(self.options.out / "server_info.json", {"before": self.before, "after": self.after}, indent=1)
        changed = same_start(self.before, self.after)
        if changed:
            reason = f"the server at the end is not the one at the start: {', '.join(changed)} differ"
            for level in levels:
                level["valid"] = False
                level["invalid_reasons"].append(reason)

    def _summarise(self, levels: list[dict[str, Any]], *, finished: bool) -> dict[str, Any]:
        options = self.options
        summary = {
            "schema": "servelab.summary/1",
            "mode": options.mode,
            "started": self.started,
            "ended": _now(),
            "partial": not finished or len(levels) < len(options.levels) or self.stop.asked,
            "client": {
                "version": __version__,
                "python": platform.python_version(),
                "clock": "CLOCK_REALTIME kernel receive stamps" if self.stamped else "CLOCK_MONOTONIC at each read",
                "way": self.server.way,
            },
            "server": {
                "url": self.server.url,
                "model": self.model,
                "sglang_version": (self.before or {}).get("version"),
                "gpus": options.gpus or gpus(self.before),
                "simulated": simulated(self.before),
            },
            "workload": options.workload_says,
            "levels": levels,
            "definitions": metrics.DEFINITIONS,
        }
        write_json(options.out / "summary.json", summary, indent=1)
        return summary


def _window(asked: Level, state: loop.State, intervals: list[tuple[int, int]]) -> metrics.Window | None:
    assert state.window_end is not None
    if asked.concurrency is not None:
        return metrics.steady_window(intervals, asked.concurrency, state.window_end)
    if state.window_start is None or state.gave_up is not None:
        return None
    end = max(ended for _, ended in intervals) if asked.finite and intervals else state.window_end
    return metrics.open_window(intervals, state.started if asked.finite else state.window_start, end)


def describe(level: dict[str, Any]) -> str:
    """One line for a log."""

    def figure(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:.4g} {unit}"

    line = (
        f"level {level['level']}: {figure(level['output_tok_s'], 'tok/s')}, "
        f"TTFT {figure(level['ttft_ms']['mean'], 'ms')}, TPOT {figure(level['tpot_ms']['mean'], 'ms')}, "
        f"{level['requests']['completed']} requests"
    )
    return line if level["valid"] else f"{line}; NOT VALID: {'; '.join(level['invalid_reasons'])}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
