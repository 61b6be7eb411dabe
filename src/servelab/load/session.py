"""One run of the client: checks, warm-up, the levels, summary.json."""

from __future__ import annotations

import gc
import itertools
import json
import math
import platform
import resource
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from servelab import __version__
from servelab.load import capture, closed, metrics, prompts, rows
from servelab.load.progress import Progress, write_json
from servelab.load.server import Server, ServerError, accept_length, late_seconds, most_running, same_start, simulated
from servelab.load.wire import Wire, kernel_stamps_work

OK, INVALID, NOT_STARTED = 0, 3, 4
SECOND = 1_000_000_000

# A clock may be slewed by 500 ppm; what goes beyond was a step, and intervals over it are wrong.
CLOCK_SLEW = 600e-6
CLOCK_JITTER_NS = 5_000_000


@dataclass(frozen=True)
class Options:
    """What the command line says. `min_seconds` are reported seconds, `timeout` and `max_ramp` wall seconds."""

    url: str
    out: Path
    mode: str
    levels: list[int]
    api: str
    input_tokens: int
    output_tokens: int
    seed: int
    min_seconds: float
    min_waves: float
    min_requests: int
    warmup_requests: int
    timeout: float
    drain: bool
    key: str | None
    model: str | None
    expect_model: str | None
    expect_version: str | None
    progress_file: Path | None


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
        self.server = Server(options.url, options.key)
        self.progress = Progress(
            options.progress_file or options.out / "progress.json", options.levels, options.output_tokens
        )
        self.stop = Stop()
        self.scale = 1.0
        self.stamped = False
        self.model = ""
        self.before: dict[str, Any] | None = None
        self.after: dict[str, Any] | None = None
        self.started = _now()
        self.request_seconds = 0.0  # how long a request took last, for the next ramp

    def run(self) -> int:
        """Exit status: 0 every level valid, 3 some level not, 4 could not start. `options.out` exists and is empty."""
        try:
            return self._run()
        finally:
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
        levels: list[dict[str, Any]] = []
        for concurrency in self.options.levels:
            if self.stop.asked:
                break
            level = self._level(concurrency)
            levels.append(level)
            self._summarise(levels, finished=False)
            self.progress.end_line()
            self.say(describe(level))
        self._check_identity(levels)
        summary = self._summarise(levels, finished=True)
        bad = [level["concurrency"] for level in levels if not level["valid"]]
        words = "interrupted, partial results" if self.stop.asked else "all levels measured"
        if bad:
            words += f"; not valid: {', '.join(map(str, bad))}"
        status = INVALID if bad or summary["partial"] else OK
        done = sum(level["requests"]["completed"] for level in levels)
        self.progress.phase("finished", words, state="done", done=done, valid=status == OK)
        return status

    def _identify(self) -> None:
        options = self.options
        self.progress.phase("starting", f"asking {options.url} who it is")
        served = self.server.model()
        self.model = options.model or served
        self.before = self.server.info()
        write_json(options.out / "server_info.json", {"before": self.before, "after": None}, indent=1)
        version = (self.before or {}).get("version")
        if options.expect_model is not None and served != options.expect_model:
            raise ServerError(f"{options.url} serves {served!r}, not {options.expect_model!r}")
        if options.expect_version is not None and version != options.expect_version:
            raise ServerError(f"{options.url} is SGLang {version}, not {options.expect_version}")
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
        self.stamped = kernel_stamps_work()
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        need = max(options.levels) + 64
        if soft != resource.RLIM_INFINITY and soft < need:
            if hard != resource.RLIM_INFINITY and hard < need:
                raise ServerError(f"level {max(options.levels)} needs {need} open files, the limit is {hard}")
            resource.setrlimit(resource.RLIMIT_NOFILE, (need, hard))

    def _payloads(self, level: int) -> Iterator[bytes]:
        options = self.options
        return prompts.requests(
            host=self.server.host_header,
            path=self.server.path,
            api=options.api,
            model=self.model,
            seed=options.seed,
            level=level,
            input_tokens=options.input_tokens,
            output_tokens=options.output_tokens,
            key=options.key,
        )

    def _warm_up(self) -> None:
        """The first requests after a start are slow and prove that the server serves. Level 0: prompts of their own."""
        count = self.options.warmup_requests
        if not count:
            return
        self.progress.phase("warming up", f"warming up with {count} request{'s' if count != 1 else ''}")
        path = self.options.out / "warmup.capture"
        atonce = min(count, max(self.options.levels))
        wire = Wire(self.server.address(), self.stamped)
        plan = closed.Plan(atonce, 0, count, 0, self.options.timeout, drain=True)
        try:
            with capture.Writer(path) as writer:
                state = closed.run(wire, plan, self._payloads(0), writer, [], lambda _: self.stop.asked)
            for record in capture.read(path):
                reply = rows.interpret(record, self.options.output_tokens)
                if reply.error is not None and not self.stop.asked:
                    kind, detail = reply.error
                    raise ServerError(f"a warm-up request failed: {kind}: {detail.strip()[:300]}")
        finally:
            wire.close()
            path.unlink(missing_ok=True)
        self.request_seconds = state.seconds_of_ended / state.ended if state.ended else 0.0

    def _level(self, concurrency: int) -> dict[str, Any]:
        options = self.options
        self.progress.phase("flushing", f"level {concurrency}: emptying the server's cache", concurrency)
        try:
            flushed = self.server.flush_cache()
        except ServerError as problem:
            flushed = str(problem)
        plan = closed.Plan(
            concurrency=concurrency,
            min_seconds=options.min_seconds / self.scale,
            min_requests=max(options.min_requests, math.ceil(options.min_waves * concurrency)),
            ramp_seconds=self.request_seconds if concurrency > 1 else 0.0,
            timeout=options.timeout,
            drain=options.drain,
        )
        path = options.out / "levels" / f"level-{concurrency:04d}.capture"
        wire = Wire(self.server.address(), self.stamped)
        late = late_seconds(self._info())
        intervals: list[tuple[int, int]] = []

        def tick(state: closed.State) -> bool:
            self.progress.level(plan, state, wire.clock())
            return self.stop.asked

        gc.collect()
        gc.disable()  # a collection would stop the reading for as long as it takes
        cpu, wall, offset = time.process_time_ns(), time.monotonic_ns(), _clock_offset()
        try:
            with capture.Writer(path) as writer:
                state = closed.run(wire, plan, self._payloads(concurrency), writer, intervals, tick)
        finally:
            gc.enable()
            wire.close()
        wall = time.monotonic_ns() - wall
        cpu_share = (time.process_time_ns() - cpu) / wall
        stepped = abs(_clock_offset() - offset) > CLOCK_JITTER_NS + CLOCK_SLEW * wall
        if state.ended:
            self.request_seconds = state.seconds_of_ended / state.ended
        info = self._info()
        self.progress.phase("reading", f"level {concurrency}: reading what was recorded", concurrency, done=state.ended)
        assert state.window_end is not None
        window = metrics.steady_window(intervals, concurrency, state.window_end)
        tally = metrics.Tally(window)
        epoch_offset = 0 if self.stamped else offset
        with path.with_suffix(".jsonl").open("x") as file:
            for record in capture.read(path):
                reply = rows.interpret(record, options.output_tokens)
                tally.add(record, reply)
                file.write(json.dumps(rows.row(record, reply, concurrency, epoch_offset), separators=(",", ":")) + "\n")
        path.unlink()
        level = tally.summary(concurrency, self.scale, self.stamped, cpu_share)
        # The server's own average starts at a flush; without one it is over everything that ever ran.
        level["accept_length"] = accept_length(info) if flushed == "flushed" else None
        level["cache"] = flushed
        level["after_window"] = "drained" if options.drain and not self.stop.asked else "cancelled"
        level["window"] = window and {
            "start": round((window.start + epoch_offset) / SECOND, 6),
            "end": round((window.end + epoch_offset) / SECOND, 6),
        }
        level["self"]["connections"] = wire.opened
        late_now = late_seconds(info)
        level["simulator_late_share"] = (
            None if late is None or late_now is None else round((late_now - late) * 1e9 / wall, 4)
        )
        level["notices"] = metrics.notices(level, most_running(info))
        reasons = metrics.reasons_invalid(level)
        if stepped:
            reasons.append("the system clock was set during the level")
        if self.stop.asked:
            reasons.append("interrupted")
        return {"concurrency": concurrency, "valid": not reasons, "invalid_reasons": reasons} | level

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
            },
            "server": {
                "url": options.url,
                "model": self.model,
                "sglang_version": (self.before or {}).get("version"),
                "simulated": simulated(self.before),
            },
            "workload": {
                "api": options.api,
                "input_tokens": options.input_tokens,
                "output_tokens": options.output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                "seed": options.seed,
                "prompts": "generated sentences, each with its own beginning",
                "min_seconds": options.min_seconds,
                "min_waves": options.min_waves,
                "min_requests": options.min_requests,
                "warmup_requests": options.warmup_requests,
            },
            "levels": levels,
            "definitions": metrics.DEFINITIONS,
        }
        write_json(options.out / "summary.json", summary, indent=1)
        return summary


def describe(level: dict[str, Any]) -> str:
    """One line for a log."""

    def figure(value: float | None, unit: str) -> str:
        return "-" if value is None else f"{value:.4g} {unit}"

    line = (
        f"level {level['concurrency']}: {figure(level['output_tok_s'], 'tok/s')}, "
        f"TTFT {figure(level['ttft_ms']['mean'], 'ms')}, TPOT {figure(level['tpot_ms']['mean'], 'ms')}, "
        f"{level['requests']['completed']} requests"
    )
    return line if level["valid"] else f"{line}; NOT VALID: {'; '.join(level['invalid_reasons'])}"


def _clock_offset() -> int:
    """CLOCK_REALTIME - CLOCK_MONOTONIC in ns: it moves only when somebody sets or slews the clock."""
    return min((time.time_ns() - time.monotonic_ns() for _ in itertools.repeat(None, 5)), key=abs)


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
