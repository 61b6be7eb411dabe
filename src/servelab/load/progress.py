"""What a person or a probe sees of a running client: progress.json, rewritten twice a second, and a terminal line."""

from __future__ import annotations

import json
import os
import sys
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from servelab.load.loop import Plan, State

EVERY = 0.5  # seconds between two writes
RECENT = 3.0  # seconds over which tok_s is taken


def write_json(path: Path, value: Any, indent: int | None = None) -> None:
    """Replace `path` atomically: a reader sees the old or the new content, never half of it."""
    beside = path.with_name(f".{path.name}.new")
    beside.write_text(json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False) + "\n")
    beside.replace(path)


class Progress:
    """Progress of one run. `scale`: reported seconds per wall second; `output_tokens`: tokens of a whole response."""

    def __init__(self, path: Path, levels: Sequence[int | str], output_tokens: int) -> None:
        self._path = path
        self._levels = list(levels)
        self._output_tokens = output_tokens
        self.scale = 1.0
        self.simulated = False
        self._next = 0.0
        self._recent: deque[tuple[float, int]] = deque()
        self._terminal = sys.stderr.isatty()
        self._shown = 0
        self._steps = 0

    def phase(
        self, phase: str, sentence: str, level: int | str | None = None, state: str = "working", **more: Any
    ) -> None:
        """Say that another phase has begun, at once."""
        self._steps += 1
        self._write(
            {"state": state, "phase": phase, "level": level, "done": 0, "in_flight": 0, "tok_s": None, "errors": 0}
            | {"eta_s": None, "sentence": self._mark(sentence), "marker": f"{self._steps}:{phase}"}
            | more
        )

    def level(self, plan: Plan, state: State, clock_ns: int) -> None:
        """Say where a level stands; does nothing when it was said less than half a second ago."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + EVERY
        if self._recent and state.bytes_read < self._recent[-1][1]:
            # Another level began to count from 0; the last one's bytes say nothing about its rate.
            self._recent.clear()
        self._recent.append((now, state.bytes_read))
        while len(self._recent) > 1 and self._recent[0][0] < now - RECENT:
            self._recent.popleft()
        rate = self._rate(state)
        eta = self._eta(plan, state, clock_ns)
        number = self._levels.index(plan.name) + 1
        parts = [
            f"level {plan.name} ({number} of {len(self._levels)}): {state.phase}",
            f"{state.ended} requests done, {state.in_flight} in flight",
            f"{rate:.0f} tok/s" if rate is not None else "",
            f"{state.failed} failed" if state.failed else "no errors",
            f"about {eta:.0f} s to go" if eta is not None else "",
        ]
        self._write(
            {
                "state": "working",
                "phase": state.phase,
                "level": plan.name,
                "done": state.ended,
                "in_flight": state.in_flight,
                "tok_s": round(rate, 1) if rate is not None else None,
                "errors": state.failed,
                "eta_s": round(eta, 1) if eta is not None else None,
                "sentence": self._mark(", ".join(part for part in parts if part)),
                # Bytes that arrive are progress, also when requests take minutes.
                "marker": f"{self._steps}:{plan.name}:{state.phase}:{state.ended}:{state.bytes_read}",
            }
        )

    def end_line(self) -> None:
        """Clear the terminal's line, so that something else can be printed."""
        if self._terminal and self._shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()
            self._shown = 0

    def _rate(self, state: State) -> float | None:
        """Output tokens per reported second just now. Nothing is parsed during a level: a complete response had so many
        bytes, so the bytes of the last seconds were about so many tokens."""
        (start, before), (end, after) = self._recent[0], self._recent[-1]
        if not state.ended or end <= start:
            return None
        return (after - before) * self._output_tokens * state.ended / state.bytes_of_ended / (end - start) / self.scale

    def _eta(self, plan: Plan, state: State, now: int) -> float | None:
        """Wall seconds until the level's window closes."""
        if state.window_start is None or state.window_end is not None:
            return None
        passed = (now - state.window_start) / 1e9
        left = plan.min_seconds - passed
        missing = plan.min_requests - state.ended_in_window
        if missing > 0:
            if not state.ended_in_window:
                return None
            left = max(left, missing * passed / state.ended_in_window)
        return max(0.0, left)

    def _mark(self, sentence: str) -> str:
        return f"{sentence} (simulated)" if self.simulated else sentence

    def _write(self, record: dict[str, Any]) -> None:
        write_json(self._path, record)
        if self._terminal:
            width = os.get_terminal_size(sys.stderr.fileno()).columns
            sys.stderr.write("\r\x1b[K" + record["sentence"][: width - 1])
            sys.stderr.flush()
            self._shown = 1
