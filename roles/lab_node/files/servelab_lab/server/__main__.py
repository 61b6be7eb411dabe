"""python3 -m servelab_lab.server [SGLang's flags]: start, serve, and end as SGLang does."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from contextlib import suppress

from . import log
from .adaptive import Adaptive
from .api import Api
from .config import Config, ConfigError, load_config
from .cost import Mode, Profile, load_profile
from .drive import Driver
from .engine import DecodeReport, Engine, PrefillReport, Request
from .follower import Follower
from .group import Group, lost_text
from .http import Connection
from .info import Info
from .paths import choose
from .prefix import PrefixCache
from .schedulers import kill
from .serverargs import (
    A2A_ASSERTION,
    Refused,
    ServerArgs,
    Unsupported,
    adaptive_of,
    max_running,
    mode_of,
    parse,
)
from .startup import Start, Started, end, greet, raise_in_launcher

# Simulated seconds.
_WARM_UP = 2.0
_SHUTDOWN_POLL = 5.0
# What a real server's last seconds were seen to be after a scheduler was killed.
_LOSS_NOTICED, _CRASH_SETTLES, _PEERS_FALL = 0.1, 5.0, 3.6
_PORT_IN_USE_STATUS = 3
_BACKLOG = 2048


class Server:
    """The running server: the engine with its log, the HTTP side, and how it ends."""

    def __init__(
        self,
        config: Config,
        args: ServerArgs,
        profile: Profile,
        mode: Mode,
        started: Started,
        adaptive: Adaptive | None,
        group: Group | None,
    ) -> None:
        self._group = group
        self.config, self.args, self.started, self.dialect = config, args, started, args.dialect
        self._last_prefill = self._last_decode = time.monotonic()
        self._falling = False
        self._say = log.rank(0)
        self.engine = Engine(
            profile,
            mode,
            max_running=max_running(args),
            chunked_prefill=int(args.chunked_prefill_size) if args.chunked_prefill_size > 0 else sys.maxsize,
            kv_tokens=started.plan.tokens,
            report_every=int(args.decode_log_interval or 40),
            on_prefill=self._prefilled,
            on_decode=self._decoded,
            cache=None if args.disable_radix_cache else PrefixCache(started.plan.tokens),
            adaptive=adaptive,
            on_switch=self._switched,
        )
        self.info = Info(config, args, profile, started.plan, self.engine)
        self._connections: set[Connection] = set()

    def _since(self, then: float) -> tuple[float, float]:
        """Return the simulated seconds since `then`, and now."""
        now = time.monotonic()
        return max(now - then, 1e-6) * self.config.time_scale, now

    def _usage(self, tokens: int) -> str:
        return f"{tokens / self.started.plan.tokens:.2f}"

    def _prefilled(self, report: PrefillReport) -> None:
        gap, self._last_prefill = self._since(self._last_prefill)
        self.info.input_throughput = report.new_tokens / gap
        pending = f"#pending-token: {report.pending_tokens}, " if self.dialect.tells_pending else ""
        self._say(
            f"Prefill batch, #new-seq: {report.new_requests}, #new-token: {report.new_tokens}, "
            f"#cached-token: {report.cached_tokens}, "
            f"token usage: {self._usage(self.engine.tokens_held)}, #running-req: {report.running}, "
            f"#queue-req: {report.waiting}, {pending}cuda graph: False, "
            f"input throughput (token/s): {self.info.input_throughput:.2f}"
        )

    def _decoded(self, report: DecodeReport) -> None:
        gap, self._last_decode = self._since(self._last_decode)
        self.info.decoded(report, report.tokens / gap)
        accepted = ""
        if self.engine.speculates:
            rate = self.dialect.accept_rate(report.accept_length, self.engine.mode.draft_tokens)
            accepted = f"accept len: {report.accept_length:.2f}, accept rate: {rate:.2f}, "
        self._say(
            f"Decode batch, #running-req: {report.running}, #token: {report.tokens_held}, "
            f"token usage: {self._usage(report.tokens_held)}, {accepted}cuda graph: {report.captured}, "
            f"gen throughput (token/s): {self.info.gen_throughput:.2f}, #queue-req: {report.waiting}"
        )

    def _switched(self, old: Mode, new: Mode) -> None:
        self._say(
            f"Switch adaptive runtime state: steps {old.draft_steps} -> {new.draft_steps}, "
            f"draft_tokens {old.draft_tokens} -> {new.draft_tokens}"
        )

    def _late(self, seconds: float) -> None:
        log.launcher(
            f"simulated: {seconds * 1000:.0f} ms were lost to steps that ended late: this machine is too slow for "
            f"time_scale {self.config.time_scale:g}, and what is measured now is slower than the model."
        )

    async def _simulated_sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds / self.config.time_scale)

    async def serve(self) -> None:
        """Listen, warm up, and serve until a signal or a dead scheduler ends the process."""
        loop = asyncio.get_running_loop()
        self.driver = Driver(self.engine, self.config.time_scale, self._late)
        self.api = Api(self.info, self.driver)
        if "death_on_first_request" in self.config.faults:
            self.api.on_first_request = self._die_of_request
        stopped = asyncio.Event()
        loop.add_signal_handler(signal.SIGTERM, self._terminate)
        loop.add_signal_handler(signal.SIGINT, stopped.set)
        loop.add_signal_handler(signal.SIGCHLD, self._child_changed)
        for peer in self._group.peers if self._group else []:
            loop.add_reader(peer, self._node_changed, peer)
        log.uvicorn(f"Started server process [{os.getpid()}]")
        log.uvicorn("Waiting for application startup.")
        log.uvicorn("Application startup complete.")
        host, port = str(self.args.host), int(self.args.port)
        try:
            listener = await loop.create_server(
                lambda: Connection(self.api.handle, self._connections), host, port, backlog=_BACKLOG
            )
        except OSError as error:
            await self._port_taken(error, host, port)
            return
        log.uvicorn(f"Uvicorn running on http://{host}:{port} (Press CTRL+C to quit)")
        self._background = loop.create_task(self._warm_up())
        await stopped.wait()
        log.uvicorn("Shutting down")
        listener.close()
        for connection in list(self._connections):
            connection.transport.close()
        await self._simulated_sleep(3.0)
        log.uvicorn("Application shutdown complete.")
        log.uvicorn(f"Finished server process [{os.getpid()}]")
        kill(self.started.mortal())

    async def _warm_up(self) -> None:
        """Generate once; until then /health says 503."""
        done = asyncio.Event()
        await self._simulated_sleep(_WARM_UP)
        self.driver.submit(Request(6, 8, iter([" warm"] * 8), lambda _t, _n, reason: done.set() if reason else None))
        await done.wait()
        self.api.ready = True
        log.launcher("The server is fired up and ready to roll!")
        # Nothing made so far is garbage, and looking for it again would delay a step.
        gc.collect()
        gc.freeze()

    async def _port_taken(self, error: OSError, host: str, port: int) -> None:
        """End with status 3, but first greet as a real server does: its warm-up reaches whoever has the port."""
        where = f"error while attempting to bind on address ('{host}', {port})"
        log.uvicorn(f"[Errno {error.errno}] {where}: {os.strerror(error.errno or 0).lower()}", "ERROR")
        log.uvicorn("Waiting for application shutdown.")
        await self._simulated_sleep(1.0)
        if await asyncio.get_running_loop().run_in_executor(None, _answers, f"http://{host}:{port}/model_info"):
            log.launcher("The server is fired up and ready to roll!")
        log.uvicorn("Application shutdown complete.")
        if self.dialect.logs_kills:
            log.launcher(f"kill_process_tree called: parent_pid={os.getpid()}, include_parent=False, pid={os.getpid()}")
        kill(self.started.mortal())
        sys.exit(_PORT_IN_USE_STATUS)

    def _terminate(self) -> None:
        if not self.api.draining:
            log.launcher("SIGTERM received. signum=None frame=None. Draining requests and shutting down...")
            self.api.draining = True
            self._background = asyncio.get_running_loop().create_task(self._drain())

    async def _drain(self) -> None:
        """Let requests finish, then end by SIGKILL as SGLang 0.5.15 was seen to."""
        while True:
            await self._simulated_sleep(_SHUTDOWN_POLL)
            left = self.engine.requests
            log.launcher(
                f"Gracefully exiting... Remaining number of requests {left}. Remaining requests remaining_rids=[]."
            )
            if left == 0:
                break
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        if self._group is not None:
            self._forget_nodes()
            if self.dialect.since("0.5.15"):
                self._group.part()
        for scheduler in self.started.schedulers:
            scheduler.let_go()
        await self._simulated_sleep(1.0)
        end(self.started, self.dialect)

    def _child_changed(self) -> None:
        with suppress(ChildProcessError):
            while gone := os.waitpid(-1, os.WNOHANG)[0]:
                if gone in self.started.pids and not self.api.draining:
                    self._simulated_later(_LOSS_NOTICED, self._peer_lost, gone)

    def _node_changed(self, peer: socket.socket) -> None:
        """Another node is gone; while the server works it says nothing."""
        self._forget_nodes()
        if not self.api.draining:
            host, port = peer.getpeername()[:2]
            self._simulated_later(_LOSS_NOTICED, self._peer_lost, None, host, port)

    def _forget_nodes(self) -> None:
        for peer in self._group.peers if self._group else []:
            asyncio.get_running_loop().remove_reader(peer)

    def _simulated_later(self, seconds: float, call: Callable[..., None], *arguments: object) -> None:
        asyncio.get_running_loop().call_later(seconds / self.config.time_scale, call, *arguments)

    def _exception(self, rank: int, text: str) -> None:
        frame = self.dialect.scheduler_frame(str(self.config.package()))
        log.rank(rank)(f"Scheduler hit an exception: Traceback (most recent call last):\n{frame}{text}\n")

    def _peer_lost(self, gone: int | None, host: str = "127.0.0.1", port: int = 63710) -> None:
        """The ranks that wait for a killed one fail, and the server with them."""
        if not self._falling:
            for scheduler in self.started.schedulers:
                if scheduler.pid != gone:
                    self._exception(scheduler.rank, f"RuntimeError: {lost_text(host, port)}")
            self._fall()

    def _die_of_request(self) -> None:
        """Play a kernel that does not fit the card: found by the first request that needs it."""
        for scheduler in self.started.schedulers:
            self._exception(
                scheduler.rank,
                "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 106000, "
                "Hardware limit: 101376. Reducing block sizes or `num_stages` may help.",
            )
        self._fall()

    def _fall(self) -> None:
        """Stop working, and end as a server does whose child failed."""
        self._falling = True
        self.driver.stop()
        why = "SIGQUIT received. signum=None, frame=None. It usually means one child failed."
        if not self.dialect.logs_kills:
            end(self.started, self.dialect, why)
        log.launcher(why)
        log.launcher("Sleeping 5 seconds before crash diagnostics to let GPU activity settle.")
        self._simulated_later(_PEERS_FALL, kill, self.started.mortal())
        self._simulated_later(_CRASH_SETTLES, self._fallen)

    def _fallen(self) -> None:
        log.launcher("No live scheduler processes found; skipping py-spy and CUDA coredump.")
        end(self.started, self.dialect)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def main() -> int:
    """Run the double; return its exit status."""
    try:
        config = load_config()
        profile = load_profile(config.profile)
        greet(config, profile)
        args = parse(config.package(), sys.argv[1:], profile)
        if "assertion" in config.faults:
            raise_in_launcher(config, "AssertionError", A2A_ASSERTION)
        mode = mode_of(args)
        rows = mode.graph_max_batch * mode.draft_tokens
        way = choose(
            args,
            os.environ,
            config.package(),
            args.dialect,
            profile,
            rows,
            custom_fails="fell_back_to_nccl" in config.faults,
        )
        mode = mode_of(args, way)
        adaptive = adaptive_of(args)
    except Refused as refused:
        raise_in_launcher(config, refused.kind, str(refused))
    except (ConfigError, Unsupported) as error:
        print(error, file=sys.stderr)
        return 1
    start = Start(config, args, profile, mode, way, adaptive)
    started = start.run()
    if start.group is not None and start.group.rank:
        asyncio.run(Follower(start, started, start.group, args).serve())
    else:
        asyncio.run(Server(config, args, profile, mode, started, adaptive, start.group).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
