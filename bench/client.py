#!/usr/bin/env python3
"""How wrong and how dear the load client is: against a server whose true timing is known, each on a core of its own.

    python3 bench/client.py [C …] [--peers DIR]

Needs a C compiler and two cores that have nothing else to do. The server (known_truth.c) notes when each request had
arrived and when each chunk went out; a client's own figures are held against that. Other clients are measured between
ours where they are installed: DIR/sglang, DIR/guidellm and DIR/aiperf are virtual environments (docs/performance.md).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import multiprocessing
import os
import platform
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from functools import partial
from pathlib import Path
from statistics import fmean, median

HERE = Path(__file__).resolve().parent
TTFT_US, TOKENS = 100_000, 128
SERVER_CORE, CLIENT_CORE = 0, 1
PATIENCE_S = 100  # for one run of one client
QUIET = 0.97  # share of all cores that must be idle before, or figures are none
MARKS = ("<!-- bench-client: figures -->", "<!-- bench-client: end -->")

HEADER = (
    "| client | load | TTFT mean error ms | TTFT p99 error ms | TPOT error % | tok/s error % | load arrived "
    "| server late ms | CPU ms / 1000 tokens | peak RSS MiB | start + stop s | valid |\n"
    "|---|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|---|"
)


@dataclass(frozen=True)
class Said:
    """A client's own figures: ms, tokens per second. `window`: of its throughput, ns since 1970; None: all of it.
    `first`: it asked for nothing before the requests that it counts (others ask before, and for nothing afterwards)."""

    requests: int
    ttft_ms: float
    ttft_p99_ms: float
    tpot_ms: float
    tok_s: float
    window: tuple[int, int] | None
    verdict: str
    first: bool = False


@dataclass(frozen=True)
class Client:
    """`command(load, seconds, out)`: the words to run; `read(out)`: what it said. `load`: "70", or "poisson-50"."""

    name: str
    command: Callable[[str, float, Path], list[str]]
    read: Callable[[Path], Said]


class Truth:
    """What the server did since it was last asked. Times in ns."""

    def __init__(self, port: int, notes: Path) -> None:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth", timeout=30) as response:
            response.read()
        with notes.open("rb") as file:
            head = array("q")
            head.fromfile(file, 2)
            flat = array("q")
            flat.fromfile(file, 3 * head[0])
            self.chunks = array("q")
            self.chunks.fromfile(file, head[1])
        self.requests = sorted(zip(flat[::3], flat[1::3], flat[2::3], strict=True))

    def counted(self, said: Said) -> list[tuple[int, int, int]]:
        """The requests that a client counts."""
        return self.requests[: said.requests] if said.first else self.requests[-said.requests :]

    def tok_s(self, start: int, end: int) -> float:
        return sum(start < at <= end for at in self.chunks) / (end - start) * 1e9

    def in_flight(self, start: int, end: int) -> float:
        busy = sum(max(0, min(last, end) - max(arrived, start)) for arrived, _, last in self.requests)
        return busy / (end - start)


def p99(values: list[float]) -> float:
    return sorted(values)[math.ceil(0.99 * len(values)) - 1]


# Ours.


def ours(python: str) -> Client:
    """Our client, run by that Python: how it was built makes a third of the cost."""
    told = subprocess.run([python, "-c", "import platform; print(platform.python_version())"], capture_output=True)
    version = told.stdout.decode().strip()
    name = "servelab load" if version == platform.python_version() else f"servelab load, {python} {version}"

    def command(load: str, seconds: float, out: Path) -> list[str]:
        return [python, *our_command(load, seconds, out)]

    return Client(name, command, our_figures)


def our_command(load: str, seconds: float, out: Path) -> list[str]:
    shape, _, rate = load.rpartition("-")
    asked = ["--arrivals", shape, "--rates", rate] if shape else ["--levels", load]
    words = ["-m", "servelab", "load", "--url", url(), "--out", str(out), "--api", "chat", *asked]
    words += ["--min-seconds", str(seconds), "--min-waves", "1", "--warmup-requests", "0"]
    return [*words, "--output-tokens", str(TOKENS), "--input-tokens", "16"]


def our_figures(out: Path) -> Said:
    rows = [json.loads(line) for line in next((out / "levels").iterdir()).read_text().splitlines()]
    level = json.loads((out / "summary.json").read_text())["levels"][0]
    failed = [row["error"]["kind"] for row in rows if row["error"] and row["error"]["kind"] != "cancelled"]
    rows = [row for row in rows if not row["error"]]
    # An open loop counts from the intended time. The relative times have 0.1 µs, the absolute ones 1 µs.
    late = [row["t_send"] - row["t_due"] if level["concurrency"] is None else 0 for row in rows]
    ttft = [(row["chunks"][0][0] + wait) * 1e3 for row, wait in zip(rows, late, strict=True)]
    window = level["window"]
    reasons = level["invalid_reasons"] + ([f"failed: {sorted(set(failed))}"] if failed else [])
    return Said(
        requests=len(rows),
        ttft_ms=fmean(ttft),
        ttft_p99_ms=p99(ttft),
        tpot_ms=fmean((row["chunks"][-1][0] - row["chunks"][0][0]) / (TOKENS - 1) for row in rows) * 1e3,
        tok_s=level["output_tok_s"] or math.nan,
        window=(round(window["start"] * 1e9), round(window["end"] * 1e9)) if window else None,
        verdict="yes" if level["valid"] else "no: " + "; ".join(reasons),
        first=True,
    )


# Theirs: each with the options that make it do the same.

TOKENIZER = "servelab/words"


def requests_of(load: str, seconds: float) -> int:
    return max(2 * int(load), math.ceil(int(load) * seconds / request_s())) if seconds else 1


def sglang(home: Path, tokenizer: Path) -> Client:
    def command(load: str, seconds: float, out: Path) -> list[str]:
        words = [str(home / "bin/python"), "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"]
        words += ["--host", "127.0.0.1", "--port", url().rpartition(":")[2], "--model", "known-truth"]
        words += ["--tokenizer", str(tokenizer), "--dataset-name", "random-ids", "--random-input-len", "16"]
        words += ["--random-output-len", str(TOKENS), "--random-range-ratio", "1", "--max-concurrency", load]
        words += ["--num-prompts", str(requests_of(load, seconds)), "--disable-tqdm", "--warmup-requests", "0"]
        return [*words, "--output-file", str(out)]

    def read(out: Path) -> Said:
        (line,) = out.read_text().splitlines()
        row = json.loads(line)
        return Said(
            requests=row["completed"],
            ttft_ms=row["mean_ttft_ms"],
            ttft_p99_ms=row["p99_ttft_ms"],
            tpot_ms=row["mean_tpot_ms"],
            tok_s=row["output_throughput"],
            window=None,
            verdict="says nothing",
        )

    return Client("sglang.bench_serving", command, read)


def guidellm(home: Path, tokenizer: Path) -> Client:
    def command(load: str, seconds: float, out: Path) -> list[str]:
        words = [str(home / "bin/guidellm"), "run", "--backend", f"kind=openai_http,target={url()},model=known-truth"]
        words += ["--profile", f"kind=concurrent,streams={load}", "--disable-console"]
        words += ["--constraint", f"kind=max_requests,count={requests_of(load, seconds)}"]
        words += ["--tokenizer", f"kind=huggingface_auto,model={tokenizer}"]
        words += ["--data", f"kind=synthetic_text,prompt_tokens=16,output_tokens={TOKENS}"]
        return [*words, "--output", f"kind=json,path={out.with_suffix('.json')}"]

    def read(out: Path) -> Said:
        found = json.loads(out.with_suffix(".json").read_text())["benchmarks"][0]["metrics"]

        def figure(name: str, *keys: str) -> float:
            value = found[name]["successful"]
            for key in keys:
                value = value[key]
            return float(value)

        return Said(
            requests=int(found["request_totals"]["successful"]),
            ttft_ms=figure("time_to_first_token_ms", "mean"),
            ttft_p99_ms=figure("time_to_first_token_ms", "percentiles", "p99"),
            tpot_ms=figure("inter_token_latency_ms", "mean"),
            tok_s=figure("output_tokens_per_second", "mean"),
            window=None,
            verdict="says nothing",
        )

    return Client("guidellm", command, read)


def aiperf(home: Path, tokenizer: Path) -> Client:
    def command(load: str, seconds: float, out: Path) -> list[str]:
        # Without a network it takes a tokenizer's name only, which it looks up where such are kept.
        words = ["env", f"HF_HUB_CACHE={tokenizer.parents[2]}", str(home / "bin/aiperf"), "profile"]
        words += ["--model", "known-truth", "--url", url(), "--tokenizer", TOKENIZER]
        words += ["--endpoint-type", "chat", "--streaming", "--ui", "none"]
        words += ["--concurrency", load, "--request-count", str(requests_of(load, seconds))]
        words += ["--isl", "16", "--osl", str(TOKENS), "--extra-inputs", "ignore_eos:true", "--use-server-token-count"]
        return [*words, "--no-server-metrics", "--no-gpu-telemetry", "--artifact-dir", str(out)]

    def read(out: Path) -> Said:
        found = json.loads((out / "profile_export_aiperf.json").read_text())
        return Said(
            requests=int(found["request_count"]["avg"]),
            ttft_ms=found["time_to_first_token"]["avg"],
            ttft_p99_ms=found["time_to_first_token"]["p99"],
            tpot_ms=found["inter_token_latency"]["avg"],
            tok_s=found["output_token_throughput"]["avg"],
            window=None,
            verdict="says nothing",
        )

    return Client("aiperf", command, read)


def peers(directory: Path | None, scratch: Path) -> list[Client]:
    if directory is None:
        return []
    # As a cache of such has it, for clients that know it by its name.
    kept = scratch / f"models--{TOKENIZER.replace('/', '--')}"
    tokenizer = kept / "snapshots" / "1"
    write_tokenizer(tokenizer)
    (kept / "refs").mkdir()
    (kept / "refs/main").write_text(tokenizer.name)
    known = {"sglang": sglang, "guidellm": guidellm, "aiperf": aiperf}
    return [make(directory / name, tokenizer) for name, make in known.items() if (directory / name / "bin").is_dir()]


def write_tokenizer(directory: Path) -> None:
    """The smallest that their libraries load: a word is a token."""
    words = ["<unk>", "word", *(f"w{number}" for number in range(2000))]
    model = {"type": "WordLevel", "vocab": {word: number for number, word in enumerate(words)}, "unk_token": "<unk>"}
    made = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None}
    made |= {"pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None, "model": model}
    directory.mkdir(parents=True)
    (directory / "tokenizer.json").write_text(json.dumps(made))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "model_max_length": 4096}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))


# Measuring.

PORT = 0
GAP_US = 10_000


def request_s() -> float:
    return (TTFT_US + (TOKENS - 1) * GAP_US) / 1e6


def url() -> str:
    return f"http://127.0.0.1:{PORT}"


@dataclass(frozen=True)
class Cost:
    status: int
    cpu_s: float
    rss_mib: float
    wall_s: float


def run(command: list[str], log: Path) -> Cost:
    """Run it on its core. CPU and memory of it and of all that it waited for."""
    # A child's peak begins with that of the process which starts it; see `aside`.
    began = time.monotonic()
    environment = os.environ | {"PYTHONPATH": str(HERE.parent / "src"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "none"}
    with log.open("ab") as file:
        process = subprocess.Popen(
            ["taskset", "-c", str(CLIENT_CORE), *command],
            env=environment,
            stdout=file,
            stderr=file,
            cwd=log.parent,
            start_new_session=True,
        )
        # With its children: a client that hangs must not take the next one's core.
        watch = threading.Timer(PATIENCE_S, os.killpg, (process.pid, signal.SIGKILL))
        watch.start()
        _, status, used = os.wait4(process.pid, 0)
        watch.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    process.returncode = os.waitstatus_to_exitcode(status)
    return Cost(process.returncode, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024, time.monotonic() - began)


def aside(work: Callable[[], str]) -> str:
    """What it says, from a process of its own: what it reads there does not count as memory of the next client."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=lambda: there.send(work()))
    child.start()
    there.close()
    said = here.recv()
    child.join()
    return str(said)


@dataclass(frozen=True)
class Start:
    wall_s: float
    cpu_s: float


def start_up(client: Client, out: Path, notes: Path) -> Start | None:
    """A whole command with as good as nothing to do, less the time of what it asked for."""
    Truth(PORT, notes)
    out = out.with_name(f"{client.name.replace('/', '_')}-{out.name}")
    cost = run(client.command("1", 0, out), out.with_name("start-0.log"))
    truth = Truth(PORT, notes)
    if not truth.requests:
        return None
    busy = sum(last - arrived for arrived, _, last in truth.requests) / 1e9
    return Start(cost.wall_s - busy, cost.cpu_s)


def measure(client: Client, load: str, seconds: float, start: Start, out: Path, notes: Path) -> str:
    """One line of the table."""
    Truth(PORT, notes)
    log = out.parent / f"{client.name.replace('/', '_')}.log"
    cost = run(client.command(load, seconds, out), log)
    truth = Truth(PORT, notes)
    shape = load if "-" in load else f"C={load}"
    try:
        said = client.read(out)
    except (OSError, LookupError, ValueError) as problem:
        tail = log.read_text(errors="replace").splitlines()[-1:]
        return f"| {client.name} | {shape} | failed with status {cost.status}: {problem or type(problem)}: {tail} |"
    counted = truth.counted(said)
    ttft = [(first - arrived) / 1e6 for arrived, first, _ in counted]
    tpot = fmean(last - first for _, first, last in counted) / (TOKENS - 1) / 1e6
    # By its own schedule. A server that cannot keep up has the truth noted all the same, but is another load.
    behind = p99([(last - arrived) / 1e6 - request_s() * 1e3 for arrived, _, last in counted])
    start_ns, end_ns = said.window or (counted[0][0], counted[-1][2])
    tok_s = truth.tok_s(start_ns, end_ns)
    meant = float(load) if "-" not in load else float(load.rpartition("-")[2]) * request_s()
    # A client without a window has a beginning and an end with less load; what arrived in between is what it could do.
    first, last = said.window or (counted[0][0], counted[-1][0])
    arrived = truth.in_flight(first, last) / meant if last > first else math.nan
    cpu = (cost.cpu_s - start.cpu_s) / (len(truth.chunks) / 1000) * 1000
    return (
        f"| {client.name} | {shape} | {said.ttft_ms - fmean(ttft):.3f} | {said.ttft_p99_ms - p99(ttft):.3f} "
        f"| {(said.tpot_ms / tpot - 1) * 100:.3f} | {(said.tok_s / tok_s - 1) * 100:.3f} | {arrived:.3f} "
        f"| {behind:.1f} | {cpu:.1f} | {cost.rss_mib:.0f} | {start.wall_s:.2f} | {said.verdict} |"
    )


def idle_share(seconds: float) -> float:
    def read() -> tuple[int, int]:
        ticks = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]]
        return ticks[3] + ticks[4], sum(ticks)

    idle, total = read()
    time.sleep(seconds)
    later_idle, later_total = read()
    return (later_idle - idle) / (later_total - total)


def machine() -> str:
    model = next(
        (x.split(":")[1].strip() for x in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in x), "?"
    )
    return f"{date.today()}, {os.cpu_count()} × {model}, Linux {platform.release()}, Python {platform.python_version()}"


def main() -> None:
    global PORT, GAP_US, SERVER_CORE, CLIENT_CORE
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("loads", nargs="*", default=["1", "70", "250", "1000", "poisson-50"], metavar="C")
    parser.add_argument("--gap-ms", type=float, default=10.0, help="between two tokens (default %(default)s)")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the steady window (default %(default)s)")
    parser.add_argument("--repeat", type=int, default=1, help="interleaved repetitions (default %(default)s)")
    parser.add_argument("--python", action="append", default=[], help="ours by another Python too, as guests have it")
    parser.add_argument(
        "--cores", type=int, nargs=2, default=[0, 1], metavar=("SERVER", "CLIENT"), help="no two threads of one core"
    )
    parser.add_argument("--into", type=Path, metavar="FILE", help="put the table between its marks there, if it is one")
    parser.add_argument("--peers", type=Path, help="directory with other clients' virtual environments")
    parser.add_argument("--peer-loads", nargs="*", default=["70", "250"], help="loads for them (default 70 250)")
    args = parser.parse_args()
    GAP_US = round(args.gap_ms * 1000)
    SERVER_CORE, CLIENT_CORE = args.cores
    with contextlib.ExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-client-")))
        server, notes = scratch / "known_truth", scratch / "notes"
        subprocess.run(["cc", "-O2", "-Wall", "-o", str(server), str(HERE / "known_truth.c")], check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            PORT = free.getsockname()[1]
        shape = map(str, (PORT, TTFT_US, GAP_US, TOKENS, 1))
        process = subprocess.Popen(["taskset", "-c", str(SERVER_CORE), str(server), *shape, str(notes)])
        stack.callback(process.wait)
        stack.callback(process.terminate)
        time.sleep(0.2)
        idle = idle_share(3)
        lines: list[str] = []

        def say(line: str) -> None:
            lines.append(line)
            print(line, flush=True)

        say(f"{machine()}; {idle:.0%} of it idle before.")
        if idle < QUIET:
            say("NOT A FIGURE: something else works on this machine")
        say(f"TTFT {TTFT_US / 1000:g} ms, then a token every {GAP_US / 1000:g} ms, {TOKENS} tokens; chat, streamed\n")
        say(HEADER)
        own = list({client.name: client for client in map(ours, (sys.executable, *args.python))}.values())
        clients = [*own, *peers(args.peers, scratch)]
        starts: dict[str, Start] = {}
        for client in clients:
            tries = [start_up(client, scratch / f"start-{n}", notes) for n in range(3 if client in own else 1)]
            good = [start for start in tries if start is not None]
            if not good:
                said = (scratch / "start-0.log").read_text(errors="replace").splitlines()[-1:]
                say(f"| {client.name} | | does not work here: {said} |")
                continue
            starts[client.name] = Start(median(start.wall_s for start in good), median(start.cpu_s for start in good))
        for turn in range(args.repeat):
            for load in dict.fromkeys([*args.loads, *(args.peer_loads if len(starts) > len(own) else [])]):
                for client in clients:
                    wanted = args.loads if client in own else args.peer_loads
                    if load in wanted and client.name in starts:
                        out = scratch / f"{client.name.replace('/', '_')}-{load}-{turn}"
                        say(aside(partial(measure, client, load, args.seconds, starts[client.name], out, notes)))
                        if out.is_dir():
                            shutil.rmtree(out)
    if args.into is not None and idle >= QUIET:
        write(args.into, lines)


def write(path: Path, lines: list[str]) -> None:
    """Replace what stands between the marks."""
    before, _, rest = path.read_text().partition(MARKS[0])
    _, _, after = rest.partition(MARKS[1])
    path.write_text("\n".join([before + MARKS[0], "", *lines, "", MARKS[1] + after]))


if __name__ == "__main__":
    main()
