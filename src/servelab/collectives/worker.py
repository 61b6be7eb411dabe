#!/usr/bin/env python3
"""One rank of an all-reduce measurement: latency per size, eager and under a CUDA graph; and are the sums right?

Stands alone: nothing but torch is needed, and SGLang for its own communicators. One process per GPU, started by
`servelab.collectives` or by hand:

    torchrun --nproc-per-node=2 worker.py --backend nccl --out nccl.jsonl
    SGLANG_FORCE_CUSTOM_AR_PCIE=1 torchrun --nproc-per-node=8 worker.py --backend custom_ar --out custom_ar.jsonl

Rank 0 writes one JSON object per line, as soon as it is known, so that what hangs leaves what came before it:

    {"event": "ready", "world_size", "device", "torch", "nccl", "facts": {…}}
    {"event": "begin", "bytes", "what": "eager, graph or check"}              what was begun before a hang
    {"event": "row", "bytes", "mode": "eager or graph", "median_us", "min_us", "p90_us", "samples"}
    {"event": "check", "bytes", "mode", "elements", "wrong": elements of any rank that are not the exact sum}
    {"event": "not_taken", "bytes"}                                           SGLang leaves this size to NCCL
    {"event": "refused", "reason"}                                            the backend did not come up
    {"event": "end"}
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

# The first two SGLang's server sets where nobody else did; without them these would be figures of another NCCL. The
# third keeps NVLink multicast out of it, which PCIe cards do not have and which can take a shared host's cards down.
# The ranks are on one host, whose name need not resolve.
DEFAULTS = {
    "NCCL_CUMEM_ENABLE": "0",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "GLOO_SOCKET_IFNAME": "lo",
}
COMMUNICATORS = "sglang.srt.distributed.device_communicators"
# Operations between two events: enough that the events' own cost and their resolution vanish.
PER_SAMPLE = 20
LARGEST_SUMMAND = 15


class Refused(Exception):
    """The backend did not come up; the text says why, in its own words where there are any."""


class Backend:
    """torch.distributed's own all-reduce, in place: what carries a server's sums when nothing else engages."""

    def __init__(self, device: torch.device, cpu_group: Any) -> None:
        self.device, self.cpu_group = device, cpu_group
        self.facts: dict[str, Any] = {}

    def takes(self, tensor: torch.Tensor) -> bool:
        """Whether SGLang would give this tensor to the backend."""
        return True

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """The sum over all ranks; may be in place."""
        dist.all_reduce(tensor)
        return tensor

    def capture(self) -> contextlib.AbstractContextManager[Any]:
        """What must surround the capture of a CUDA graph."""
        return contextlib.nullcontext()


class CustomAllreduce(Backend):
    """SGLang's legacy kernel, the one that the patch opens for PCIe cards."""

    name = "CustomAllreduce"

    def __init__(self, device: torch.device, cpu_group: Any) -> None:
        super().__init__(device, cpu_group)
        # Its test of peer access is made by one rank of SGLang's own world, which a server sets up before.
        state = __import__("sglang.srt.distributed.parallel_state", fromlist=["_"])
        state.init_distributed_environment(
            dist.get_world_size(), dist.get_rank(), local_rank=device.index, backend=dist.get_backend()
        )
        with heard() as words:
            self.communicator = self.make()
        if self.communicator.disabled:
            raise Refused(" ".join(dict.fromkeys(words)) or f"{self.name} came up disabled and does not say why.")
        for fact in ("full_nvlink", "_pcie_forced", "_pcie_max_bytes", "max_size"):
            if hasattr(self.communicator, fact):
                self.facts[fact.lstrip("_")] = getattr(self.communicator, fact)
        self.facts["said"] = words

    def make(self) -> Any:
        module = __import__(f"{COMMUNICATORS}.custom_all_reduce", fromlist=["_"])
        return module.CustomAllreduce(group=self.cpu_group, device=self.device)

    def takes(self, tensor: torch.Tensor) -> bool:
        return bool(self.communicator.should_custom_ar(tensor))

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.communicator.custom_all_reduce(tensor)
        return result

    def capture(self) -> contextlib.AbstractContextManager[Any]:
        manager: contextlib.AbstractContextManager[Any] = self.communicator.capture()
        return manager


class CustomAllReduceV2(CustomAllreduce):
    """SGLang's newer kernels (default from 0.5.12; this constructor from 0.5.13)."""

    name = "CustomAllReduceV2"

    def make(self) -> Any:
        module = __import__(f"{COMMUNICATORS}.custom_all_reduce_v2", fromlist=["_"])
        return module.CustomAllReduceV2(group=self.cpu_group, device=self.device)


class PcieIpc(Backend):
    """FlashInfer's kernels for PCIe, as SGLang calls them from 0.5.22 on."""

    def __init__(self, device: torch.device, cpu_group: Any) -> None:
        super().__init__(device, cpu_group)
        module = __import__(f"{COMMUNICATORS}.pcie_ipc_ar", fromlist=["_"])
        with heard() as words:
            self.communicator = module.PcieIpcCommunicator(
                group=dist.group.WORLD, device=self.device, cpu_group=self.cpu_group
            )
            if not self.communicator.disabled:
                self.communicator.prepare(hidden=OPTIONS.hidden, max_rows=max(OPTIONS.sizes) // (2 * OPTIONS.hidden))
        if self.communicator.disabled:
            raise Refused(" ".join(dict.fromkeys(words)) or "PcieIpcCommunicator came up disabled and says nothing.")
        self.facts["said"] = words

    def takes(self, tensor: torch.Tensor) -> bool:
        return bool(self.communicator.should_pcie_ipc_ar(tensor))

    def reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.communicator.pcie_ipc_all_reduce(tensor)
        return result


BACKENDS: dict[str, type[Backend]] = {
    "nccl": Backend,
    "custom_ar": CustomAllreduce,
    "custom_ar_v2": CustomAllReduceV2,
    "pcie_ipc": PcieIpc,
}
OPTIONS = argparse.Namespace(hidden=7168, sizes=[43008])


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """What is logged inside, as a list of texts: SGLang says only there why a communicator is not used."""
    words: list[str] = []

    class Ear(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            words.append(record.getMessage())

    ear, logger = Ear(level=logging.INFO), logging.getLogger("sglang")
    level = logger.level
    logger.addHandler(ear)
    logger.setLevel(logging.INFO)
    try:
        yield words
    finally:
        logger.removeHandler(ear)
        logger.setLevel(level)


class Bench:
    """The measurements of one rank; every method is called by all ranks in the same order."""

    def __init__(self, backend: Backend, options: argparse.Namespace, write: Callable[..., None]) -> None:
        self.backend, self.options, self.write = backend, options, write
        self.device, self.group = backend.device, backend.cpu_group
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.on_gpu = self.device.type == "cuda"
        # Not every gloo can add bf16; both have two bytes and hold the check's whole numbers.
        self.dtype = torch.bfloat16 if self.on_gpu else torch.float16

    def measure(self, size: int) -> None:
        """All of one size in bytes."""
        tensor = self.tensor(size)
        if not self.agreed(self.backend.takes(tensor)):
            self.write("not_taken", bytes=size)
            return
        for _ in range(self.options.warm_up):
            self.backend.reduce(tensor.zero_())
        self.wait()
        self.write("begin", bytes=size, what="check")
        self.check(size, "eager", self.backend.reduce, tensor)
        self.write("begin", bytes=size, what="eager")

        def several() -> None:
            for _ in range(PER_SAMPLE):
                self.backend.reduce(tensor)

        self.report(size, "eager", self.timed(several, lambda: self.backend.reduce(tensor), tensor))
        if self.on_gpu and not self.options.no_graph:
            self.write("begin", bytes=size, what="graph")
            one, many = self.graph(tensor, 1), self.graph(tensor, PER_SAMPLE)
            self.check(size, "graph", lambda _: (one[0].replay(), one[1])[1], tensor)
            # They meet in as long a graph, so that the next one is launched before it ends.
            self.report(size, "graph", self.timed(many[0].replay, many[0].replay, tensor))

    def tensor(self, size: int) -> torch.Tensor:
        """Rows of the model's width where the size allows: PCIe-IPC asks for them, and the others do not care."""
        elements = size // 2
        shape = (elements // self.options.hidden, self.options.hidden) if elements % self.options.hidden == 0 else None
        return torch.zeros(shape or (1, elements), dtype=self.dtype, device=self.device)

    def graph(self, tensor: torch.Tensor, times: int) -> tuple[Any, torch.Tensor]:
        """A CUDA graph of `times` all-reduces of `tensor`, and where the last one leaves its sum."""
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog thread asks CUDA meanwhile, which a capture of all threads would take for an error.
        with self.backend.capture(), torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(times):
                result = self.backend.reduce(tensor)
        self.wait()
        return graph, result

    def timed(self, run: Callable[[], None], meet: Callable[[], Any], tensor: torch.Tensor) -> list[float]:
        """µs per operation, a value per sample, each the slowest rank's. `meet` is an operation before the clock
        starts, in which the ranks wait for each other on the GPU."""
        mine = []
        for _ in range(self.options.samples + 2):
            tensor.zero_()
            self.wait()
            if self.on_gpu:
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                meet()
                start.record()
                run()
                end.record()
                end.synchronize()
                mine.append(start.elapsed_time(end) * 1000 / PER_SAMPLE)
            else:
                meet()
                begin = time.perf_counter()
                run()
                mine.append((time.perf_counter() - begin) * 1e6 / PER_SAMPLE)
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, mine[2:], group=self.group)
        return [max(values) for values in zip(*everyone, strict=True)]

    def report(self, size: int, mode: str, values: list[float]) -> None:
        ordered = sorted(values)
        self.write(
            "row",
            bytes=size,
            mode=mode,
            median_us=round(statistics.median(ordered), 3),
            min_us=round(ordered[0], 3),
            p90_us=round(ordered[min(len(ordered) - 1, int(len(ordered) * 0.9))], 3),
            samples=len(ordered),
        )

    def check(self, size: int, mode: str, reduce: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> None:
        """Sums of whole numbers, which bf16 holds exactly, other ones in every round: what was left over from an
        earlier round, or never written, is wrong too."""
        wrong = 0
        for round_number in range(self.options.rounds):
            parts = [self.summand(tensor.numel(), rank, round_number) for rank in range(self.world)]
            expected = torch.stack(parts).sum(dim=0).to(self.dtype)
            tensor.copy_(parts[self.rank].to(self.dtype).view(tensor.shape))
            result = reduce(tensor)
            if self.on_gpu:
                torch.cuda.synchronize()
            wrong += int((result.reshape(-1) != expected).sum())
            self.wait()
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, wrong, group=self.group)
        elements = self.options.rounds * self.world * tensor.numel()
        self.write("check", bytes=size, mode=mode, elements=elements, wrong=sum(everyone))

    def summand(self, elements: int, rank: int, round_number: int) -> torch.Tensor:
        """What `rank` adds: whole numbers between ±15, so that eight of them stay below bf16's 256."""
        places = torch.arange(elements, device=self.device, dtype=torch.int32)
        span = 2 * LARGEST_SUMMAND + 1
        return (places * (rank + 3) + places // span + 7 * rank + 5 * round_number) % span - LARGEST_SUMMAND

    def agreed(self, answer: bool) -> bool:
        """The same answer on every rank, or an error: ranks that disagree would wait for each other for ever."""
        everyone: list[Any] = [None] * self.world
        dist.all_gather_object(everyone, answer, group=self.group)
        if len(set(everyone)) > 1:
            raise RuntimeError(f"The ranks do not agree on who takes this size: {everyone}.")
        return answer

    def wait(self) -> None:
        """All ranks, all GPUs idle."""
        if self.on_gpu:
            torch.cuda.synchronize()
        dist.barrier(group=self.group)


def built(name: str, device: torch.device, cpu_group: Any) -> tuple[Backend | None, str]:
    """The backend, or None and the reason; the same on all ranks, so that none waits for one that was refused."""
    backend, reason = None, ""
    try:
        backend = BACKENDS[name](device, cpu_group)
    except Refused as refusal:
        reason = str(refusal)
    except ImportError as error:
        reason = f"SGLang's communicator cannot be imported: {error}."
    reasons: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(reasons, reason, group=cpu_group)
    reason = next(filter(None, reasons), "")
    return (None if reason else backend), reason


def main() -> None:
    """Entry point of one rank."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--backend", choices=BACKENDS, required=True)
    parser.add_argument("--out", required=True, help="file that rank 0 writes, one JSON object per line")
    parser.add_argument(
        "--sizes",
        type=lambda text: [int(size) for size in text.split(",")],
        default=[1 << bit for bit in range(10, 24)] + [14336, 43008],
        help="bytes, comma-separated; multiples of 16 (default: 1 KiB to 8 MiB, 14336 and 43008)",
    )
    parser.add_argument("--hidden", type=int, default=7168, help="the model's width in elements")
    parser.add_argument("--samples", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the check of the sums")
    parser.add_argument("--warm-up", type=int, default=5)
    parser.add_argument("--no-graph", action="store_true")
    parser.add_argument("--cpu", action="store_true", help="over gloo, to try the program where there is no GPU")
    options = parser.parse_args(namespace=OPTIONS)
    options.sizes = sorted(options.sizes)
    for name, value in DEFAULTS.items():
        os.environ.setdefault(name, value)
    rank = int(os.environ["RANK"])
    with open(options.out, "w", encoding="utf-8") if rank == 0 else contextlib.nullcontext() as file:  # noqa: PTH123

        def write(event: str, **values: Any) -> None:
            if file is not None:
                file.write(json.dumps({"event": event, **values}) + "\n")
                file.flush()

        if options.cpu:
            device = torch.device("cpu")
            dist.init_process_group("gloo", timeout=timedelta(minutes=10))
            cpu_group: Any = dist.group.WORLD
        else:
            device = torch.device(f"cuda:{int(os.environ['LOCAL_RANK'])}")
            torch.cuda.set_device(device)
            dist.init_process_group("nccl", timeout=timedelta(minutes=10))
            # SGLang's communicators exchange their handles over a group of the CPU's.
            cpu_group = dist.new_group(backend="gloo")
        backend, reason = built(options.backend, device, cpu_group)
        if backend is None:
            write("refused", reason=reason)
            return
        write(
            "ready",
            world_size=dist.get_world_size(),
            device="cpu" if options.cpu else torch.cuda.get_device_name(device),
            torch=torch.__version__,
            nccl=None if options.cpu else ".".join(map(str, torch.cuda.nccl.version())),
            facts=backend.facts,
        )
        bench = Bench(backend, options, write)
        for size in options.sizes:
            bench.measure(size)
        bench.wait()
        write("end")
    # The communicators' destructors ask for a rendezvous, in an order that differs between releases, and a rank that
    # has gone would keep the others waiting. The driver takes back what a process held when the process ends.
    os._exit(0)


if __name__ == "__main__":
    main()
