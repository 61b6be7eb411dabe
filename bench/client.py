#!/usr/bin/env python3
"""How wrong and how dear the load client is: against a server whose true timing is known, each on a core of its own.

    python3 bench/client.py [C …]

Needs a C compiler and two cores that have nothing else to do. Compares the means over all requests of a level as the
client has them in its raw rows with those that the server noted for the same requests.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from statistics import fmean

HERE = Path(__file__).resolve().parent
TTFT_US, GAP_US, TOKENS = 100_000, 10_000, 128


def truth(port: int) -> dict[str, float]:
    """What the server did since it was last asked."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/truth", timeout=10) as response:
        return dict(json.load(response))


def measure(port: int, concurrency: int, seconds: float, out: Path) -> str:
    """One level; a line of the table."""
    truth(port)
    command = ["taskset", "-c", "1", sys.executable, "-m", "servelab", "load", "--url", f"http://127.0.0.1:{port}"]
    command += ["--out", str(out), "--levels", str(concurrency), "--min-seconds", str(seconds), "--min-waves", "2"]
    command += ["--warmup-requests", "0", "--output-tokens", str(TOKENS)]
    before, begun = resource.getrusage(resource.RUSAGE_CHILDREN), time.monotonic()
    client = subprocess.run(
        command, env=os.environ | {"PYTHONPATH": str(HERE.parent / "src")}, stdout=subprocess.DEVNULL, check=False
    )
    wall, after = time.monotonic() - begun, resource.getrusage(resource.RUSAGE_CHILDREN)
    true = truth(port)
    rows = [json.loads(line) for line in next((out / "levels").iterdir()).read_text().splitlines()]
    if client.returncode == 4 or len(rows) != true["requests"] or any(row["error"] for row in rows):
        return f"{concurrency:>5}  failed: status {client.returncode}, {len(rows)} of {true['requests']:.0f} requests"
    # The relative times have 0.1 µs; the absolute ones only 1 µs.
    ttft = fmean(row["chunks"][0][0] for row in rows) * 1e3
    tpot = fmean((row["chunks"][-1][0] - row["chunks"][0][0]) / (TOKENS - 1) for row in rows) * 1e3
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    level = json.loads((out / "summary.json").read_text())["levels"][0]
    return (
        f"{concurrency:>5} {ttft - true['ttft_ms']:>13.3f} {(tpot / true['tpot_ms'] - 1) * 100:>12.3f} "
        f"{true['late_ms']:>14.3f} {cpu / len(rows) / TOKENS * 1e6:>18.1f} {after.ru_maxrss / 1024:>7.0f} {wall:>7.1f}"
        f"  {'valid' if level['valid'] else '; '.join(level['invalid_reasons'])}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("levels", type=int, nargs="*", default=[1, 70, 250, 1000], metavar="C")
    parser.add_argument("--seconds", type=float, default=10.0, help="of the steady window (default %(default)s)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        server = directory / "known_truth"
        subprocess.run(["cc", "-O2", "-Wall", "-o", str(server), str(HERE / "known_truth.c")], check=True)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        command = ["taskset", "-c", "0", str(server), *map(str, (port, TTFT_US, GAP_US, TOKENS, 1))]
        process = subprocess.Popen(command)
        try:
            time.sleep(0.2)
            print("    C  TTFT error ms TPOT error %  server late ms  CPU ms/1000 tokens  RSS MiB  wall s  verdict")
            for concurrency in args.levels:
                print(measure(port, concurrency, args.seconds, directory / str(concurrency)), flush=True)
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
