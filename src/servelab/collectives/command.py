"""`servelab collectives`: measure every way to all-reduce on this machine, and say what a model's step would cost."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from servelab.collectives import words
from servelab.collectives.arms import ARMS, DEFAULT
from servelab.collectives.drive import run_arm
from servelab.collectives.predict import Model, model_of, predict
from servelab.shared.redact import redact_value

SCHEMA = "servelab.collectives/1"
# What the story's model has: Kimi-K2.5, 61 layers of 7168.
STORY = Model(61, 7168, "assumed: Kimi-K2.5's")


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("collectives", help="measure all-reduce latency per backend, size and NCCL setting")
    parser.add_argument("--out", type=Path, required=True, help="directory of the results; made if it is not there")
    parser.add_argument("--gpus", help="indices, comma-separated (default: CUDA_VISIBLE_DEVICES, else all)")
    parser.add_argument("--world", type=int, help="number of GPUs (default: as many as --gpus names)")
    parser.add_argument(
        "--arms", default=",".join(ARMS), help=f"comma-separated, of {', '.join(ARMS)} (default: all of them)"
    )
    parser.add_argument("--sizes", help="bytes, comma-separated, instead of 1 KiB to 8 MiB")
    parser.add_argument("--model", type=Path, help="the model's directory: layers and width from its config.json")
    parser.add_argument("--layers", type=int)
    parser.add_argument("--hidden", type=int)
    parser.add_argument("--draft-tokens", type=int, default=3, help="tokens that a verify step checks per request")
    parser.add_argument("--samples", type=int, default=30, help="timed samples per size and mode")
    parser.add_argument("--limit", type=float, default=300, help="seconds that one arm may take")
    parser.add_argument("--python", default=sys.executable, help="the Python that has torch (and SGLang)")
    parser.add_argument("--worker", help="the command of one rank, instead of PYTHON and ours (the lab's double)")
    parser.add_argument("--cpu", action="store_true", help="over gloo, to try the program where there is no GPU")


def run(args: argparse.Namespace) -> int:
    try:
        indices, world = devices(args.gpus, args.world, os.environ)
        model = model_from(args)
        unknown = [name for name in args.arms.split(",") if name not in ARMS]
        if unknown:
            raise ValueError(f"There is no arm {', '.join(unknown)}; there are {', '.join(ARMS)}.")
        marked = sorted({model.message(tokens) for tokens in (1, args.draft_tokens)})
        sizes = [int(size) for size in args.sizes.split(",")] if args.sizes else [1 << bit for bit in range(10, 24)]
        wrong = [size for size in {*sizes, *marked} if size <= 0 or size % 16]
        if wrong:
            raise ValueError(f"{wrong[0]} bytes cannot be measured: SGLang's kernels take multiples of 16.")
    except ValueError as error:
        print(f"servelab collectives: {error}", file=sys.stderr)
        return 2
    args.out.mkdir(parents=True, exist_ok=True)
    worker = shlex.split(args.worker) if args.worker else [args.python, *_program()]
    worker += [f"--hidden={model.hidden}", f"--samples={args.samples}"]
    worker.append("--sizes=" + ",".join(map(str, sorted({*sizes, *marked}))))
    base = dict(os.environ)
    if args.cpu:
        worker.append("--cpu")
    elif indices:
        # As indices: SGLang's communicator reads the variable as numbers.
        base["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, indices))
    names = args.arms.split(",")
    arms = []
    for number, name in enumerate(names, 1):
        where = f"{name} ({number} of {len(names)})"
        tell(args.out, "working", where, where)
        record = run_arm(
            ARMS[name], worker, world, args.out, limit=args.limit, base=base,
            say=lambda text, where=where: tell(args.out, "working", where, f"{where}: {text}"),  # type: ignore[misc]
        )  # fmt: skip
        print(f"{where}: {record['status']}{': ' + record['reason'] if record['reason'] else ''}", file=sys.stderr)
        arms.append(record)
    result = result_of(arms, model, args.draft_tokens, world, marked)
    (args.out / "collectives.json").write_text(json.dumps(redact_value(result), indent=1, ensure_ascii=False) + "\n")
    text = words.report(result)
    (args.out / "collectives.md").write_text(text)
    print(text)
    measured = any(arm["rows"] for arm in arms)
    valid = measured and all(arm["status"] in ("ok", "refused") for arm in arms)
    tell(args.out, "done" if measured else "failed", "done", _outcome(arms), valid=valid, cause=_outcome(arms))
    return 0 if valid else 3 if measured else 4


def _program() -> list[str]:
    """Our worker as Python is told of it: its file, or the module where the package lies in a wheel."""
    file = Path(__file__).with_name("worker.py")
    return [str(file)] if file.exists() else ["-m", "servelab.collectives.worker"]


def devices(gpus: str | None, world: int | None, environ: Mapping[str, str]) -> tuple[list[int], int]:
    """The GPUs as indices (empty: those that the program sees) and how many. Raises ValueError with one sentence."""
    asked = gpus if gpus is not None else environ.get("CUDA_VISIBLE_DEVICES", "")
    if asked and not re.fullmatch(r"\d+(,\d+)*", asked):
        raise ValueError(
            f"GPUs {asked!r} are not indices such as 0,1,2,3: SGLang's custom allreduce reads CUDA_VISIBLE_DEVICES as "
            "numbers and gives up on UUIDs; give --gpus."
        )
    indices = [int(index) for index in asked.split(",")] if asked else []
    if len(set(indices)) != len(indices):
        raise ValueError(f"GPUs {asked!r} name one card twice: one process per GPU.")
    count = world or len(indices) or len(list(Path("/proc/driver/nvidia/gpus").glob("*")))
    if indices and count > len(indices):
        raise ValueError(f"{count} processes need as many GPUs, and {asked!r} are {len(indices)}.")
    if count < 2:
        raise ValueError(
            f"An all-reduce needs two GPUs at least, and there is {count or 'none'}: give --gpus or --world."
        )
    return indices[:count], count


def model_from(args: argparse.Namespace) -> Model:
    """The model as options or its config.json tell, else the story's."""
    if args.layers or args.hidden:
        return Model(args.layers or STORY.layers, args.hidden or STORY.hidden, "as given")
    if args.model is None:
        return STORY
    file = args.model / "config.json"
    try:
        return model_of(json.loads(file.read_text(encoding="utf-8")), str(file))
    except OSError as error:
        raise ValueError(f"{file} cannot be read ({error.strerror}): give --layers and --hidden.") from error


def result_of(arms: list[dict[str, Any]], model: Model, drafts: int, world: int, marked: list[int]) -> dict[str, Any]:
    """The content of collectives.json."""
    return {
        "schema": SCHEMA,
        "ended": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "simulated": next((arm["ready"]["simulated"] for arm in arms if arm["ready"].get("simulated")), None),
        "world_size": world,
        "marked": marked,
        "model": {"layers": model.layers, "hidden": model.hidden, "source": model.source},
        "arms": arms,
        "prediction": predict(arms, model, [1, drafts], DEFAULT),
    }


def tell(out: Path, state: str, phase: str, sentence: str, **more: Any) -> None:
    """progress.json, as the load client writes it, for whoever watches."""
    beside = out / ".progress.json.new"
    record = {"state": state, "phase": phase, "sentence": sentence, "marker": sentence, **more}
    beside.write_text(json.dumps(record) + "\n")
    beside.replace(out / "progress.json")


def _outcome(arms: list[dict[str, Any]]) -> str:
    bad = [f"{arm['name']} {arm['status']}" for arm in arms if arm["status"] not in ("ok", "refused")]
    good = [arm["name"] for arm in arms if arm["status"] == "ok"]
    return "; ".join([f"{len(good)} of {len(arms)} ways measured", *bad])
