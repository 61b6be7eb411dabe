"""From the command line to a server that can answer: SGLang's phases, their log lines, order and failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NoReturn

from . import log
from .cards import Seat, seats, simulated
from .config import Config
from .cost import Mode, Profile
from .memory import Plan, StartFailure, out_of_memory, plan
from .schedulers import ClaimFailed, Scheduler, kill, spawn, spawn_detokenizer
from .serverargs import ServerArgs, graph_batches, max_running

# Parts of a start's time, as a real one divides it: imports, distributed set-up, weights, graphs.
_IMPORTS, _DISTRIBUTED, _WEIGHTS, _GRAPHS = 0.45, 0.05, 0.35, 0.15
_SHARDS = 64


@dataclass
class Started:
    """What a successful start leaves behind."""

    plan: Plan
    schedulers: list[Scheduler]
    detokenizer: int
    survivors: bool

    @property
    def pids(self) -> list[int]:
        return [scheduler.pid for scheduler in self.schedulers] + [self.detokenizer]

    def mortal(self) -> list[int]:
        """The children that die with the launcher."""
        return [self.detokenizer] if self.survivors else self.pids


class Start:
    """One start. `run()` returns once everything is loaded, or ends the process as SGLang ends it."""

    def __init__(self, config: Config, args: ServerArgs, profile: Profile, mode: Mode) -> None:
        self.config, self.args, self.profile, self.mode = config, args, profile, mode
        self.started: Started | None = None
        self._ranks = range(int(args.tp_size or 1))

    def run(self) -> Started:
        """Go through the phases."""
        self._announce()
        try:
            places = seats(len(self._ranks), int(self.args.base_gpu_id or 0), int(self.args.gpu_id_step or 1))
        except StartFailure as failure:
            if failure.ranks:
                self._fork([Seat(0, 0)] * len(self._ranks), hold=False)
                self._fail(failure)
            log.plain(f"{failure.kind}: {failure.text}")
            sys.exit(1)
        self._fork(places, hold=simulated())
        self._pause(_IMPORTS)
        try:
            self._distributed(places)
            division = plan(
                self.profile, self.mode, float(self.args.mem_fraction_static), [place.used_mib for place in places]
            )
            self._load(division)
            self._pool(division)
            self._capture(division)
        except StartFailure as failure:
            self._fail(failure)
        assert self.started is not None
        self.started.plan = division
        self._ready_line(division)
        return self.started

    def _announce(self) -> None:
        shown = self.args if self.args.old_logs else dict(self.args.values)
        log.launcher(f"server_args={shown}")
        log.launcher("Using default HuggingFace chat template with detected content format: string")

    def _pause(self, part: float) -> None:
        """Let a part of the simulated loading time pass, and end if a scheduler died meanwhile."""
        time.sleep(self.config.load_seconds * part / self.config.time_scale)
        if self.started is not None:
            for pid in self.started.pids:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._end()

    def _fork(self, places: list[Seat], hold: bool) -> None:
        children = [
            spawn(rank, place.minor, survivor=self.config.survivors, holds_card=hold)
            for rank, place in enumerate(places)
        ]
        nothing = Plan(0, 0, 0, 0, 0, 0, 0, 0)
        self.started = Started(nothing, children, spawn_detokenizer(), self.config.survivors)

    def _hold(self, mib: int) -> None:
        assert self.started is not None
        for scheduler in self.started.schedulers:
            try:
                scheduler.hold(mib)
            except ClaimFailed as error:
                text = f"CUDA error: {error}"
                raise StartFailure("torch.AcceleratorError", text, [scheduler.rank]) from error

    def _each(self, text: str) -> None:
        for rank in self._ranks:
            log.rank(rank)(text)

    def _distributed(self, places: list[Seat]) -> None:
        elapsed = self.config.load_seconds * _DISTRIBUTED
        context = self.profile.memory["context_gib"]
        self._each("Init torch distributed begin." if self.args.old_logs else "Init parallel begin.")
        log.rank(0)("sglang is using nccl==2.30.7")
        if all(place.used_mib / 1024 + context < self.profile.memory["card_mib"] / 1024 for place in places):
            self._hold(round(context * 1024))
        self._pause(_DISTRIBUTED)
        if self.args.old_logs:
            self._each(f"Init torch distributed ends. elapsed={elapsed:.2f} s, mem usage={context:.2f} GB")
        else:
            self._each(f"Init parallel ends. elapsed={elapsed:.2f} s")

    def _load(self, division: Plan) -> None:
        context = self.profile.memory["context_gib"]
        elapsed = self.config.load_seconds * _WEIGHTS

        def loaded(done: int) -> None:
            self._hold(round((context + division.weights * done / _SHARDS) * 1024))

        self._each(f"Load weight begin. avail mem={division.available:.2f} GB")
        self._progress("Multi-thread loading shards", ["Completed"] * _SHARDS, elapsed, _WEIGHTS, loaded)
        self._each(
            f"Load weight end. elapsed={elapsed:.2f} s, type={self.profile.model}, "
            f"avail mem={division.after_weights:.2f} GB, mem usage={division.weights:.2f} GB."
        )
        if self.mode.speculative:
            self._each(f"Load weight begin. avail mem={division.after_weights:.2f} GB")
            self._hold(round((context + division.weights + division.draft) * 1024))
            self._each(
                "Load weight end. elapsed=0.80 s, type=LlamaForCausalLMEagle3, "
                f"avail mem={division.after_draft:.2f} GB, mem usage={division.draft:.2f} GB."
            )

    def _pool(self, division: Plan) -> None:
        self._hold(division.claim_mib)
        self._each(
            f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {division.tokens}, KV size: {division.kv:.2f} GB"
        )
        self._each(f"Memory pool end. avail mem={division.after_pool + division.draft_kv:.2f} GB")
        if self.mode.speculative:
            half = division.draft_kv / 2
            self._each(
                f"KV Cache is allocated. dtype: torch.bfloat16, #tokens: {division.tokens}, "
                f"K size: {half:.2f} GB, V size: {half:.2f} GB"
            )
            self._each(f"Memory pool end. avail mem={division.after_pool:.2f} GB")

    def _capture(self, division: Plan) -> None:
        batches = graph_batches(self.args)
        self._each(
            "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
            "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
        )
        if not batches:
            self._pause(_GRAPHS)
            return
        if division.after_pool < division.graph:
            raise out_of_memory(self.profile, 0.041, division.after_pool, list(self._ranks))
        # A verify that runs outside CUDA graphs has none to capture; the draft's steps have.
        name = "target decode"
        if self.mode.speculative:
            name = "target verify" if self.profile.verify_captured else "draft decode"
        per = self.mode.draft_tokens if name == "target verify" else 1
        width = "num_tokens_per_bs" if self.args.old_logs else "num_tokens_per_req"
        before, after = division.after_pool, division.after_pool - division.graph
        elapsed = self.config.load_seconds * _GRAPHS
        self._each(
            f"Capture {name} CUDA graph begin. backend=full, {width}={per}, bs={batches}, avail mem={before:.2f} GB"
        )
        labels = [f"(bs={size} avail_mem={before - division.graph * n / len(batches):.2f} GB)"
                  for n, size in enumerate(reversed(batches))]  # fmt: skip
        self._progress("Capturing batches", labels, elapsed, _GRAPHS)
        listed = "" if self.args.old_logs or name == "draft decode" else f"bs={batches}, "
        self._each(
            f"Capture {name} CUDA graph end. {listed}elapsed={elapsed:.2f} s, mem usage={division.graph:.2f} GB, "
            f"avail mem={after:.2f} GB."
        )

    def _ready_line(self, division: Plan) -> None:
        args = self.args
        log.rank(0)(
            f"max_total_num_tokens={division.tokens}, chunked_prefill_size={args.chunked_prefill_size}, "
            f"max_prefill_tokens={args.max_prefill_tokens or 16384}, max_running_requests={max_running(args)}, "
            f"context_len={context_length(args, self.profile)}, "
            f"available_gpu_mem={division.after_pool - division.graph:.2f} GB"
        )
        kind = "hierarchical=False streaming_wrapped=False" if args.old_logs else "hicache_attached=False"
        self._each(f"Tree cache initialized: source=default impl=RadixCache hybrid_swa=False hybrid_ssm=False {kind}")

    def _progress(
        self, what: str, labels: list[str], elapsed: float, part: float, step: Callable[[int], None] | None = None
    ) -> None:
        """Draw a progress bar as tqdm does when piped: one line, redrawn after carriage returns."""
        total = len(labels)
        for done in range(total + 1):
            sys.stderr.write(
                "\r" + progress_bar(what, labels[min(done, total - 1)], done, total, elapsed * done / total)
            )
            sys.stderr.flush()
            if done < total:
                if step is not None:
                    step(done + 1)
                self._pause(part / total)
        log.plain("")

    def _fail(self, failure: StartFailure) -> NoReturn:
        """End as SGLang ends when a scheduler raises."""
        package = self.config.package()
        for rank in failure.ranks:
            log.rank(rank)(
                "Scheduler hit an exception: Traceback (most recent call last):\n"
                f'  File "{package}/srt/managers/scheduler.py", line 4313, in run_scheduler_process\n'
                "    scheduler = Scheduler(\n                ^^^^^^^^^^\n"
                f"{failure.kind}: {failure.text}\n"
            )
        self._end()

    def _end(self) -> NoReturn:
        assert self.started is not None
        end(self.started, "Received sigquit from a child process. It usually means the child failed.")


def greet(config: Config, profile: Profile) -> None:
    """Say first of all that this is a simulation, then what SGLang says before it reads its flags."""
    log.launcher(
        f"simulated: profile={profile.name}, time_scale={config.time_scale:g}. No model is loaded and no GPU "
        f"computes; a simulated second lasts {1 / config.time_scale:g} s. {profile.description}"
    )
    log.plain(
        f"{config.package()}/launch_server.py:55: UserWarning: 'python -m sglang.launch_server' is still "
        "supported, but 'sglang serve' is the recommended entrypoint.\n"
        "  Example: sglang serve --model-path <model> [options]\n  warnings.warn("
    )


def end(started: Started, why: str | None = None) -> NoReturn:
    """Kill the process tree, this process included: the exit status is that of SIGKILL."""
    if why is not None:
        log.launcher(why)
    log.launcher(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=True, pid={os.getpid()}")
    kill(started.mortal())
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("SIGKILL returned")


def context_length(args: ServerArgs, profile: Profile) -> int:
    """Return the longest prompt and answer together, in tokens."""
    return int(args.context_length or profile.context_length)


def progress_bar(what: str, label: str, done: int, total: int, elapsed: float) -> str:
    """Return tqdm's line. SGLang puts the label before the figures for weights and after the name for graphs."""
    share = done / total
    eighths = round(share * 80)
    bar = ("█" * (eighths // 8) + ("▏▎▍▌▋▊▉"[eighths % 8 - 1] if eighths % 8 else "")).ljust(10)
    rate = done / elapsed if done and elapsed else 0.0
    speed = "?it/s" if not rate else f"{rate:.2f}it/s" if rate >= 1 else f"{1 / rate:.2f}s/it"
    left = _clock((total - done) / rate) if rate else "?"
    figures = f"{done}/{total} [{_clock(elapsed)}<{left}, {speed}]"
    if label == "Completed":
        return f"{what}: {share:4.0%} Completed | {figures}"
    return f"{what} {label}: {share:4.0%}|{bar}| {figures}"


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60:02d}:{int(seconds) % 60:02d}"
