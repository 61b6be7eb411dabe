#!/usr/bin/env python3
"""Our load client and SGLang's own bench_serving on one running server, in turns, with the same load.

    peer.py --levels 10,70 --seconds 8 --tokenizer DIR --out DIR [--turns 2]

Both put 512 random tokens on /v1/completions and take exactly 128. Ours counts a steady window; theirs everything, so
it gets twenty waves at least, that its beginning and end weigh little. Theirs sends its first requests at once, ours
one after the other, as independent users come, and once more at once: what is left then is the clients' own.
DIR/peer.json: a row a run, ms and tokens per second; DIR/wire: the server's answers, as they came. Exit 1 when a client
failed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

URL = "http://127.0.0.1:30000"
INPUT, OUTPUT = 512, 128


def ours(level: int, seconds: float, turn: int, out: Path, arrivals: str) -> dict[str, float]:
    run = out / f"{arrivals}-{level}-{turn}"
    words = [sys.executable, "-m", "servelab", "load", "--url", URL, "--out", str(run), "--levels", str(level)]
    words += [
        "--arrivals",
        arrivals,
        "--min-seconds",
        str(seconds),
        "--input-tokens",
        str(INPUT),
        "--output-tokens",
        str(OUTPUT),
    ]
    words += ["--prompt-form", "ids", "--token-range", "4:32000"]
    subprocess.run([*words, "--seed", str(100 + turn)], check=True, stdout=subprocess.DEVNULL)
    row = json.loads((run / "summary.json").read_text())["levels"][0]
    return {"requests": row["requests"]["completed"], "output_tok_s": row["output_tok_s"], **latencies(row)}


def latencies(row: dict) -> dict[str, float]:
    return {f"{name}_{part}": row[name][part] for name in ("ttft_ms", "itl_ms", "tpot_ms") for part in ("p50", "mean")}


def theirs(level: int, seconds: float, turn: int, out: Path, tokenizer: Path, known: dict) -> dict[str, float]:
    file = out / f"theirs-{level}-{turn}.jsonl"
    count = max(20 * level, round(known["output_tok_s"] * seconds / OUTPUT))
    words = [sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai", "--base-url", URL]
    words += ["--dataset-name", "random-ids", "--random-input-len", str(INPUT), "--random-output-len", str(OUTPUT)]
    words += ["--random-range-ratio", "1", "--max-concurrency", str(level), "--num-prompts", str(count)]
    words += ["--tokenizer", str(tokenizer), "--seed", str(200 + turn), "--disable-tqdm", "--output-file", str(file)]
    # It asks the internet for the model's configuration otherwise, five times.
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL, env=os.environ | {"HF_HUB_OFFLINE": "1"})
    row = json.loads(file.read_text().splitlines()[-1])
    figures = {"requests": row["completed"], "output_tok_s": row["output_throughput"]}
    for name in ("ttft_ms", "itl_ms", "tpot_ms"):
        figures |= {f"{name}_p50": row[f"median_{name}"], f"{name}_mean": row[f"mean_{name}"]}
    return figures


def keep(out: Path) -> None:
    """The answers of the server whose shape others rely on."""
    wire = out / "wire"
    wire.mkdir(parents=True)
    body = {"model": "known-chains", "prompt": "w11 w12 w13", "max_tokens": 8, "temperature": 0, "stream": True}
    body["stream_options"] = {"include_usage": True}
    posted = urllib.request.Request(
        f"{URL}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    asked = {"completions.sse": posted}
    asked |= {
        name: urllib.request.Request(f"{URL}/{name}") for name in ("get_server_info", "get_model_info", "metrics")
    }
    for name, request in asked.items():
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                (wire / name).write_bytes(answer.read())
        except OSError as problem:
            (wire / name).write_text(f"{problem}\n")


def main() -> int:
    parser = argparse.ArgumentParser(description="Two load clients on one server, in turns.")
    parser.add_argument("--levels", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--tokenizer", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    keep(options.out)
    rows = []
    for turn in range(options.turns):
        for level in map(int, options.levels.split(",")):
            cell = {"level": level, "turn": turn}
            found = ours(level, options.seconds, turn, options.out, "closed")
            rows.append({"client": "ours", **cell, **found})
            step = ours(level, options.seconds, turn, options.out, "together")
            rows.append({"client": "ours, beginning together", **cell, **step})
            other = theirs(level, options.seconds, turn, options.out, options.tokenizer, found)
            rows.append({"client": "sglang.bench_serving", **cell, **other})
            print(*rows[-3:], sep="\n", flush=True)
            (options.out / "peer.json").write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
