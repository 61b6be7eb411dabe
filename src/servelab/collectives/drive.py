"""Run the arms one after the other: a process per GPU for each, with its own environment, a time limit and a log."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servelab.collectives.arms import Arm, environment

# When one rank has ended badly the others wait for it for ever; this long they may still say why.
GRACE = 5.0
_TAIL = 1500
_RANK = re.compile(r"\[rank\d+\]:\s?")
_ERROR = re.compile(r"[\w.]*(Error|Exception)\b: ")


def run_arm(
    arm: Arm,
    worker: Sequence[str],
    world: int,
    directory: Path,
    *,
    limit: float,
    base: Mapping[str, str] = os.environ,
    say: Callable[[str], None] = lambda _: None,
) -> dict[str, Any]:
    """Measure one arm on `world` GPUs; returns its record, as in docs/architecture.md, "Collectives".

    `worker` is the command of one rank without --backend and --out; `limit` are the seconds that the arm may take.
    Leaves <arm>.jsonl and <arm>.log in `directory`.
    """
    rows, log = directory / f"{arm.name}.jsonl", directory / f"{arm.name}.log"
    rows.unlink(missing_ok=True)
    command = [*worker, f"--backend={arm.backend}", f"--out={rows}"]
    shared = environment(arm, base) | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(_free_port())}
    begin = time.monotonic()
    ranks: list[subprocess.Popen[bytes]] = []
    with log.open("wb") as output:
        try:
            for rank in range(world):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
                ranks.append(subprocess.Popen(command, env=shared | own, stdout=output, stderr=subprocess.STDOUT))
            in_time = _wait(ranks, begin + limit, rows, say)
        finally:
            for process in ranks:
                if process.poll() is None:
                    process.kill()
                process.wait()
    return {
        "name": arm.name,
        "backend": arm.backend,
        "what": arm.what,
        "mode": arm.mode,
        "env": dict(arm.env),
        "seconds": round(time.monotonic() - begin, 1),
        **judge(_events(rows), [process.returncode for process in ranks], None if in_time else limit, _tail(log)),
    }


def _why(log_tail: str) -> str:
    """What a rank died of: the last error, not what torch complains of when it is torn down; else the last line."""
    lines = [_RANK.sub("", line) for line in log_tail.strip().splitlines()]
    errors = [line for line in lines if _ERROR.match(line)]
    return (errors or lines or ["It wrote nothing."])[-1]


def judge(
    events: Sequence[Mapping[str, Any]], codes: Sequence[int], hung_after: float | None, log_tail: str
) -> dict[str, Any]:
    """What one arm came to, from the events of its rank 0, the ranks' exit statuses and the end of their log.

    `status`: ok; refused (it does not work here, and says why); wrong (sums that are not right: its latencies mean
    nothing); hung (killed after `hung_after` seconds); failed. `rows`: bytes → mode → latency in µs.
    """
    by = {kind: [event for event in events if event["event"] == kind] for kind in _KINDS}
    rows: dict[str, dict[str, Any]] = {}
    for event in by["row"]:
        kept = {key: event[key] for key in ("median_us", "min_us", "p90_us", "samples")}
        rows.setdefault(str(event["bytes"]), {})[event["mode"]] = kept
    wrong = [event for event in by["check"] if event["wrong"]]
    status, reason = "ok", None
    if by["refused"]:
        status, reason = "refused", str(by["refused"][0]["reason"])
    elif hung_after is not None:
        begun = by["begin"][-1] if by["begin"] else None
        where = f"in {begun['what']} at {begun['bytes']} bytes" if begun else "before the first size"
        status, reason = "hung", f"It did not end within {hung_after:g} s and was killed {where}."
    elif any(codes) or not by["end"]:
        status, reason = "failed", f"Its processes ended with {', '.join(map(str, codes))}: {_why(log_tail)}"
    if wrong and status != "refused":
        first = wrong[0]
        sentence = (
            f"Wrong sums: {first['wrong']} of {first['elements']} elements at {first['bytes']} bytes ({first['mode']})"
            + (f", and at {len(wrong) - 1} more sizes or modes." if len(wrong) > 1 else ".")
        )
        status, reason = "wrong", f"{sentence} {reason}" if reason else sentence
    ready = by["ready"][0] if by["ready"] else {}
    return {
        "status": status,
        "reason": reason,
        "rows": rows,
        "checked": len(by["check"]),
        "not_taken": [event["bytes"] for event in by["not_taken"]],
        "ready": {key: value for key, value in ready.items() if key != "event"},
    }


_KINDS = ("ready", "begin", "row", "check", "not_taken", "refused", "end")


def _wait(ranks: Sequence[subprocess.Popen[bytes]], deadline: float, rows: Path, say: Callable[[str], None]) -> bool:
    """Wait for all ranks; False when the time was over first. Returns early when a rank has ended badly."""
    until, last = deadline, None
    while None in (codes := [process.poll() for process in ranks]):
        if time.monotonic() >= until:
            return until < deadline
        if any(codes):
            until = min(until, time.monotonic() + GRACE)
        events = _events(rows)
        begun = next((event for event in reversed(events) if event["event"] == "begin"), None)
        if begun is not None and begun != last:
            last = begun
            say(f"{begun['bytes']} bytes, {begun['what']}")
        time.sleep(0.1)
    return True


def _events(path: Path) -> list[dict[str, Any]]:
    """The worker's lines; a line that was cut off is left out."""
    events = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return [event for event in events if isinstance(event, dict) and "event" in event]


def _tail(log: Path) -> str:
    return log.read_bytes()[-_TAIL:].decode("utf-8", "replace")


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
