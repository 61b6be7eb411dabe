"""From the command line to a server that can answer: SGLang's phases, their log lines, order and failures."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from . import log
from .adaptive import Adaptive
from .cards import Seat, seats, simulated
from .config import Config
from .cost import Mode, Profile
from .dialect import Dialect
from .group import Group
from .memory import Plan, StartFailure, out_of_memory, plan
from .paths import Way
from .schedulers import ClaimFailed, Scheduler, kill, spawn, spawn_detokenizer
from .serverargs import ServerArgs, graph_batches, local_ranks, max_running

# Parts of a start's time, as a real one divides it: imports, distributed set-up, weights, graphs.
_IMPORTS, _DISTRIBUTED, _WEIGHTS, _GRAPHS = 0.45, 0.05, 0.35, 0.15
_SHARDS = 64
# Simulated seconds of the peers' data test; 31 to 49 were watched.
_P2P_CHECK = 31.0
_NCCL_VERSIONS = (("0.5.22", "2.30.7"), ("0.5.20", "2.29.7"), ("0.5.11", "2.28.9"), ("0", "2.27.5"))


@dataclass
class Started:
    """What a successful start leaves behind."""

    plan: Plan
    schedulers: list[Scheduler]
    detokenizer: int | None
    """Only the head has one."""
    survivors: bool

    @property
    def pids(self) -> list[int]:
        return [scheduler.pid for scheduler in self.schedulers] + self._detokenizers()

    def mortal(self) -> list[int]:
        """The children that die with the launcher."""
        return self._detokenizers() if self.survivors else self.pids

    def _detokenizers(self) -> list[int]:
        return [] if self.detokenizer is None else [self.detokenizer]


class Start:
    """One start. `run()` returns once everything is loaded, or ends the process as SGLang ends it."""

    def __init__(
        self, config: Config, args: ServerArgs, profile: Profile, mode: Mode, way: Way, adaptive: Adaptive | None
    ) -> None:
        self.config, self.args, self.profile, self.mode, self.way = config, args, profile, mode, way
        self.adaptive, self.dialect = adaptive, args.dialect
        self.started: Started | None = None
        self._ranks = local_ranks(args)
        self.group: Group | None = None
        """The other nodes, once they were met."""

    def run(self) -> Started:
        """Go through the phases."""
        self._announce()
        try:
            places = seats(len(self._ranks), int(self.args.base_gpu_id or 0), int(self.args.gpu_id_step or 1))
        except StartFailure as failure:
            if failure.ranks:
                self._fork([Seat(0, 0)] * len(self._ranks), hold=False)
                self.fall(failure)
            raise_in_launcher(self.config, failure.kind, failure.text)
        self._fork(places, hold=simulated())
        self._pause(_IMPORTS)
        try:
            self._distributed(places)
            division = plan(
                self.profile,
                self.mode,
                float(self.args.mem_fraction_static),
                [place.used_mib for place in places],
                self.dialect,
            )
            self._load(division)
            self._pool(division)
            self._capture(division)
            if self.group is not None:
                self.group.meet()
        except StartFailure as failure:
            self.fall(failure)
        assert self.started is not None
        self.started.plan = division
        self._ready_line(division)
        return self.started

    def _announce(self) -> None:
        for notice in self.args.notices:
            log.launcher(notice)
        shown = dict(self.args.values) if self.dialect.since("0.5.20") else self.args
        log.launcher(f"server_args={shown}")
        log.launcher("Using default HuggingFace chat template with detected content format: string")

    def _pause(self, part: float) -> None:
        """Let a part of the simulated loading time pass, and end if a scheduler died meanwhile."""
        time.sleep(self.config.load_seconds * part / self.config.time_scale)
        self._look()
        if self.group is not None:
            self.group.watch()

    def _look(self) -> None:
        """End if a scheduler died."""
        if self.started is not None:
            for pid in self.started.pids:
                if os.waitpid(pid, os.WNOHANG)[0]:
                    self._end()

    def _fork(self, places: list[Seat], hold: bool) -> None:
        children = [
            spawn(rank, place.minor, survivor=self.config.survivors, holds_card=hold)
            for rank, place in zip(self._ranks, places, strict=True)
        ]
        nothing = Plan(0, 0, 0, 0, 0, 0, 0, 0)
        detokenizer = spawn_detokenizer() if self._is_head else None
        self.started = Started(nothing, children, detokenizer, self.config.survivors)

    def _hold(self, mib: int) -> None:
        assert self.started is not None
        for scheduler in self.started.schedulers:
            try:
                scheduler.hold(mib)
            except ClaimFailed as error:
                text = f"CUDA error: {error}"
                raise StartFailure("torch.AcceleratorError", text, [scheduler.rank]) from error

    @property
    def _is_head(self) -> bool:
        return 0 in self._ranks

    def _first(self, text: str) -> None:
        """Write what only rank 0 of the whole server says."""
        if self._is_head:
            log.rank(0)(text)

    def _each(self, text: str) -> None:
        for rank in self._ranks:
            log.rank(rank)(text)

    def _distributed(self, places: list[Seat]) -> None:
        elapsed = self.config.load_seconds * _DISTRIBUTED
        context = self.profile.memory["context_gib"]
        self._each(self.dialect.init_begin)
        if int(self.args.nnodes or 1) > 1:
            group = Group(self.args, self.config.time_scale, self._look)
            group.join()
            self.group = group
        nccl = next(nccl for release, nccl in _NCCL_VERSIONS if self.dialect.since(release))
        self._first(f"sglang is using nccl=={nccl}")
        if all(place.used_mib / 1024 + context < self.profile.memory["card_mib"] / 1024 for place in places):
            self._hold(round(context * 1024))
        if "hang_nccl_init" in self.config.faults:
            self._hang()
        self._pause(_DISTRIBUTED)
        self._join()
        self._each(self.dialect.init_end(elapsed, context))

    def _hang(self) -> NoReturn:
        """Wait for peers that never come: nothing is logged, nothing ends, the cards stay held."""
        while True:
            self._pause(0.1)
            time.sleep(0.05)

    def _join(self) -> None:
        """Make the communicators."""
        if self.way.checks_p2p:
            cards = ",".join(map(str, self._ranks))
            cache = f"/root/.cache/sglang/gpu_p2p_access_cache_for_{cards}.json"
            self._first(f"generating GPU P2P access cache in {cache}")
            time.sleep(_P2P_CHECK / self.config.time_scale)
            self._each(f"reading GPU P2P access cache from {cache}")
        for line in self.way.joining:
            self._each(line)
        for line in self.way.first:
            self._first(line)

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
        if self.mode.draft_steps:
            # The draft is a model of its own and joins the ranks once more.
            self._each("SPECULATIVE_MOE_RUNNER_BACKEND is not initialized, using auto backend")
            self._each("SPECULATIVE_MOE_A2A_BACKEND is not initialized, using none backend")
            self._each(self.dialect.init_begin)
            self._each(self.dialect.init_end(0.0, 0.0))
            self._each(f"Load weight begin. avail mem={division.after_weights:.2f} GB")
            self._hold(round((context + division.weights + division.draft) * 1024))
            self._each(
                "Load weight end. elapsed=0.80 s, type=LlamaForCausalLMEagle3, "
                f"avail mem={division.after_draft:.2f} GB, mem usage={division.draft:.2f} GB."
            )

        if self.adaptive is not None:
            self._first(self.adaptive.greeting())

    def _pool(self, division: Plan) -> None:
        if self._pool_overflows():
            raise out_of_memory(self.profile, division.kv / 61, division.kv / 122, list(self._ranks))
        self._hold(division.claim_mib)
        self._each(self.dialect.pool(division.tokens, f"KV size: {division.kv:.2f} GB"))
        self._each(f"Memory pool end. avail mem={division.after_pool + division.draft_kv:.2f} GB")
        if self.mode.draft_steps:
            half = division.draft_kv / 2
            self._each(self.dialect.pool(division.tokens, f"K size: {half:.2f} GB, V size: {half:.2f} GB"))
            self._each(f"Memory pool end. avail mem={division.after_pool:.2f} GB")

    def _pool_overflows(self) -> bool:
        """Say whether the cache is to fail: on demand, or where the story saw it fail without learning why."""
        seen = self.profile.memory.get("one_channel_overflows") and os.environ.get("NCCL_MAX_NCHANNELS") == "1"
        return bool(seen or self.args.moe_a2a_backend == "flashinfer" or "oom_kv_pool" in self.config.faults)

    def _capture(self, division: Plan) -> None:
        self._refuse_architecture()
        if self.dialect.many_graphs:
            self._each(
                "Disable prefill CUDA graph because cuda_graph_config resolved prefill.backend='disabled' "
                "(e.g. via --cuda-graph-backend-prefill=disabled or auto-disable rules)."
            )
        for line in self.way.built:
            self._each(line)
        batches, roles = graph_batches(self.args), self._roles()
        if not batches or not roles:
            self._pause(_GRAPHS)
            return
        if division.after_pool < division.graph or "oom_graph_capture" in self.config.faults:
            self._capture_fails(division, roles[0], batches)
        free = division.after_pool
        for role in roles:
            self._capture_one(role, batches, free, division.graph / len(roles), _GRAPHS / len(roles))
            free -= division.graph / len(roles)
        if self.way.backend == "custom_ar":
            addresses = self.profile.allreduces_per_forward * len(batches)
            self._first(f"Registering {addresses} cuda graph addresses")

    def _refuse_architecture(self) -> None:
        """Fail on what a card of compute capability 12.0 cannot do."""
        every = list(self._ranks)
        asked = self.args.flashinfer_allreduce_fusion_backend and self.dialect.since("0.5.14")
        if asked or ("unsupported_architecture" in self.config.faults and self.dialect.since("0.5.14")):
            text = "FlashInfer allreduce fusion requires SM90 or SM10X NVIDIA GPUs."
            raise StartFailure("ValueError", text, every)
        if "unsupported_architecture" in self.config.faults:
            text = (
                "CUDA error: no kernel image is available for execution on the device\n"
                "CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below "
                "might be incorrect."
            )
            raise StartFailure("torch.AcceleratorError", text, every)

    def _roles(self) -> list[str]:
        """Return what has graphs. A verify that runs outside them has none to capture; the draft's steps have."""
        verify = ["target verify"] if self.profile.verify_captured else []
        if not self.mode.speculative:
            return ["target decode"]
        return verify if self.mode.ngram else [*verify, "draft decode", "draft extend"]

    def _capture_one(self, role: str, batches: list[int], free: float, gib: float, part: float) -> None:
        per = 1 if role.endswith("decode") else self.mode.draft_tokens
        self._each(self.dialect.capture_begin(role, per, batches, free))
        if not self.dialect.many_graphs:
            self._first(f"Capture cuda graph bs {batches}")
        labels = [f"(bs={size} avail_mem={free - gib * n / len(batches):.2f} GB)"
                  for n, size in enumerate(reversed(batches))]  # fmt: skip
        elapsed = self.config.load_seconds * part
        self._progress("Capturing batches", labels, elapsed, part)
        self._each(self.dialect.capture_end(role, batches, elapsed, gib, free - gib))

    def _capture_fails(self, division: Plan, role: str, batches: list[int]) -> NoReturn:
        self._each(self.dialect.capture_begin(role, 1, batches, division.after_pool))
        cause = out_of_memory(self.profile, 0.041, min(division.after_pool, 0.012), list(self._ranks))
        raise StartFailure("Exception", self.dialect.capture_failed(cause.text), cause.ranks, cause)

    def _ready_line(self, division: Plan) -> None:
        args = self.args
        self._first(
            f"max_total_num_tokens={division.tokens}, chunked_prefill_size={args.chunked_prefill_size}, "
            f"max_prefill_tokens={args.max_prefill_tokens or 16384}, max_running_requests={max_running(args)}, "
            f"context_len={context_length(args, self.profile)}, "
            f"available_gpu_mem={division.after_pool - division.graph:.2f} GB"
        )
        if self.dialect.tree_cache:
            self._each(self.dialect.tree_cache)

    def _progress(
        self, what: str, labels: list[str], elapsed: float, part: float, step: Callable[[int], None] | None = None
    ) -> None:
        """Draw a progress bar as tqdm does when piped: one line, redrawn after carriage returns."""
        total = len(labels)
        for done in range(total + 1):
            if self._is_head:
                sys.stderr.write(
                    "\r" + progress_bar(what, labels[min(done, total - 1)], done, total, elapsed * done / total)
                )
                sys.stderr.flush()
            if done < total:
                if step is not None:
                    step(done + 1)
                self._pause(part / total)
        if self._is_head:
            log.plain("")

    def fall(self, failure: StartFailure, among: Sequence[Scheduler] | None = None) -> NoReturn:
        """End as SGLang ends when a scheduler raises: the ranks of the failure, or those of `among`."""
        for rank in failure.ranks if among is None else [scheduler.rank for scheduler in among]:
            log.rank(rank)(f"Scheduler hit an exception: {self._traceback(failure)}")
        self._end()

    def _traceback(self, failure: StartFailure) -> str:
        before = ""
        if failure.cause is not None:
            before = self._traceback(failure.cause)
            before += "\nDuring handling of the above exception, another exception occurred:\n\n"
        frame = self.dialect.scheduler_frame(str(self.config.package()))
        return f"{before}Traceback (most recent call last):\n{frame}{failure.kind}: {failure.text}\n"

    def _end(self) -> NoReturn:
        assert self.started is not None
        why = "Received sigquit from a child process. It usually means the child failed."
        end(self.started, self.dialect, why)


def raise_in_launcher(config: Config, kind: str, text: str) -> NoReturn:
    """End as Python ends when the launcher raises: traceback, exit status 1."""
    log.plain(
        f'Traceback (most recent call last):\n  File "<frozen runpy>", line 198, in _run_module_as_main\n'
        f'  File "<frozen runpy>", line 88, in _run_code\n  File "{config.package()}/launch_server.py", line 60, in '
        f"<module>\n    run_server(server_args)\n{kind}: {text}"
    )
    sys.exit(1)


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


def end(started: Started, dialect: Dialect, why: str | None = None) -> NoReturn:
    """Kill the process tree, this process included: the exit status is that of SIGKILL."""
    if why is not None:
        log.launcher(why)
    if dialect.logs_kills:
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
