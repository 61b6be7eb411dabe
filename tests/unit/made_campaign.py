"""A campaign as the driver leaves it, made from a curve that is known: what the report's tests look at.

The servers are those of the lab's crossing profile: a baseline step takes 20 + 0.5 C ms for one token each, one of
eagle3 30 + 1.75 C ms for 2.5 tokens each; they serve the same at C = 40.
"""

from __future__ import annotations

import json
import random
from pathlib import Path

from servelab import bundle

LEVELS = [1, 2, 5, 10, 30, 70, 100]
TIME_SCALE = 5
START = 1_795_971_000.0


def make(campaign: Path, repetitions: int = 5, noise: float = 0.006) -> Path:
    """Write sealed bundles of both modes and the plan into *campaign*; return it."""
    rng = random.Random(1)
    plan = []
    for i in range(repetitions):
        order = ("baseline", "eagle3") if i % 2 == 0 else ("eagle3", "baseline")
        for j, mode in enumerate(order):
            run_id = f"20261129T{10 + i:02d}{20 * j:02d}00Z-{mode}"
            started = f"2026-11-29T{10 + i:02d}:{20 * j:02d}:00Z"
            _run(campaign / run_id, mode, i, started, rng, noise)
            plan.append({"arm": mode, "mode": mode, "repetition": i, "run_id": run_id, "status": "ok"})
    (campaign / "campaign.json").write_text(json.dumps({"schema": "servelab.campaign/1", "runs": plan}))
    return campaign


def _run(path: Path, mode: str, repetition: int, started: str, rng: random.Random, noise: float) -> None:
    (path / "levels").mkdir(parents=True)
    simulated = {"profile": "crossing", "time_scale": TIME_SCALE}
    start = rng.gauss(0, noise)
    levels = [_level(path, mode, c, start + rng.gauss(0, noise), rng) for c in LEVELS]
    speculative = {"speculative_algorithm": "EAGLE3", "speculative_num_steps": 2} if mode == "eagle3" else {}
    files = {
        "run.json": {
            "schema": "servelab.run/1",
            "run_id": path.name,
            "campaign": path.parent.name,
            "mode": mode,
            "status": "ok",
            "started": started,
            "simulated": simulated,
            "correctness": {"status": "verified"},
        },
        "summary.json": {
            "client": {"version": "0.1.0"},
            "server": {"model": "<script>alert(1)</script>", "sglang_version": "0.5.23", "simulated": simulated},
            "workload": {"api": "completions", "input_tokens": 512, "output_tokens": 128, "seed": repetition + 1},
            "levels": levels,
        },
        "provenance.json": {
            "node": {"boot_id": "588ec39a"},
            "guest": {"kernel": "6.8.12", "os": "Debian GNU/Linux 13 (trixie)", "packages": {"sglang": "0.5.23"}},
            "gpus": [
                {"uuid": f"GPU-{i}", "name": "RTX PRO 6000", "driver_version": "580.95.05", "pcie_link_width": 16}
                for i in range(8)
            ],
            "mode": {
                "args": {"tp_size": 8, **speculative},
                "env": {},
                "patches": [],
                "treatment": ["speculative_*", "kv_pool"] if speculative else [],
            },
        },
        "server_info.json": {
            "after": {
                "max_total_num_tokens": 620_000 if speculative else 638_274,
                "cuda_graph_config": {"decode": {"bs": [1, 2, 4, 8, 16, 24, 32, 40, 48, 56, 64, 96, 128]}},
            }
        },
    }
    _cards(path)
    for name, content in files.items():
        (path / name).write_text(json.dumps(content))
    bundle.seal(path)


def _cards(path: Path) -> None:
    """Eight cards that warm up and then hold their clocks; one reading every five seconds."""
    readings = [
        {
            "t": START + 5 * i,
            "gpus": [
                {
                    "power_w": 300.0 + card,
                    "clock_sm_mhz": 2400 - 10 * card,
                    "temperature_c": min(70, 40 + i) + card,
                    "memory_used_mib": 84_000,
                    "pcie_link_gen": 5,
                    "throttle_reasons": [],
                }
                for card in range(8)
            ],
        }
        for i in range(60)
    ]
    (path / "cards.jsonl").write_text("".join(json.dumps(reading) + "\n" for reading in readings))


def _level(path: Path, mode: str, c: int, slower: float, rng: random.Random) -> dict[str, object]:
    """One level: its raw rows on disk, of which only the latencies look real, and its entry of the summary."""
    tokens = 2.5 if mode == "eagle3" else 1.0
    step = (30 + 1.75 * c if mode == "eagle3" else 20 + 0.5 * c) * (1 + slower)
    rows = []
    for i in range(24):
        first = (40 + 3 * c) * rng.uniform(0.8, 1.3) / 1000 / TIME_SCALE
        last = first + step / tokens * 127 * rng.gauss(1, 0.02) / 1000 / TIME_SCALE
        sent = START + i * 0.001
        rows.append(
            {
                "t_send": sent,
                "t_end": sent + last,
                "chunks": [[first, 1], [last, 127]],
                "completion_tokens": 128,
                "error": None,
            }
        )
    (path / "levels" / f"level-{c:04d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {
        "concurrency": c,
        "valid": True,
        "invalid_reasons": [],
        "output_tok_s": c * tokens / step * 1000,
        "tpot_ms": {"mean": step / tokens},
        "accept_length": 2.5 if mode == "eagle3" else None,
        "tokens_per_chunk": tokens,
        "window": {"start": START - 1, "end": START + 1000},
        "requests": {"in_window": 24},
        "prompt_tokens_mean": 512,
        "cached_tokens_mean": 0,
    }
