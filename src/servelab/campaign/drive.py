"""Make the runs of a campaign, one after the other, until all are done, time is up or somebody asks to stop."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Protocol

from servelab.campaign import learn, plan
from servelab.campaign.spec import Spec
from servelab.campaign.state import State

# A mode that failed this often in a row will fail again; its other runs would only cost the others their time.
GIVE_UP = 2


@dataclass(frozen=True)
class Outcome:
    """``status``: ok, invalid, failed, or cancelled (then it is made again). ``run_id`` None: there is no bundle.
    ``start``: the id of the server's start, where it was left running."""

    status: str
    run_id: str | None
    reason: str | None
    start: str | None = None


@dataclass(frozen=True)
class Kept:
    """A server that goes on into the next run: its mode and the id of its start; None where there is none."""

    mode: str | None = None
    start: str | None = None


class Runner(Protocol):
    """Makes one run and tells its progress in sentences."""

    def __call__(
        self,
        mode: str,
        levels: list[int],
        seed: int,
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
        variables: Mapping[str, Any],
    ) -> Outcome: ...

    def stop_servers(self) -> None:
        """Stop what the last run left running."""


class Stop:
    """Asked once: after this run. Asked twice: now."""

    def __init__(self) -> None:
        self.asked = 0

    def ask(self, *_: Any) -> None:
        self.asked += 1

    def now(self) -> bool:
        return self.asked > 1


def drive(
    spec: Spec,
    results: Path,
    runner: Runner,
    say: Callable[[str], None],
    *,
    budget: float | None = None,
    retry: bool = False,
    stop: Stop | None = None,
    clock: Callable[[], float] = time.monotonic,
    pause: Callable[[float], None] = time.sleep,
) -> State:
    """Make what is not made yet; returns the state, which is on disk after every run.

    Raises CampaignError when the directory holds another campaign's runs or the budget is too small.
    """
    stop = stop or Stop()
    directory = results / spec.name
    state = State(directory, spec, plan.order(spec))
    if retry:
        state.again()
    begun = clock()
    allowed = _allowed(spec, state, budget, say)
    learn.spare(state, directory, say)
    state.save()
    made = 0
    kept = Kept()
    for entry in state.waiting():
        if entry["status"] != "waiting":  # skipped or spared meanwhile
            continue
        if stop.asked:
            say(f"stopped; {len(state.waiting())} runs are left: the same command goes on with them")
            break
        if (entry["arm"], entry["repetition"]) not in allowed:
            continue
        if budget is not None and made and clock() - begun + _each(spec, state) > budget:
            say(f"the budget is used up; {len(state.waiting())} runs are left")
            break
        if _gave_up(state, entry["mode"]):
            entry.update(status="skipped", reason=f"{entry['mode']} failed {GIVE_UP} times in a row")
            state.save()
            continue
        if why := learn.configure(state, directory, entry["mode"], say):
            # This run only: the next repetition may tell more.
            say(f"{entry['arm']}, repetition {entry['repetition'] + 1} is skipped: {why}")
            entry.update(status="skipped", reason=why)
            state.save()
            continue
        if made and spec.pause_seconds:
            pause(spec.pause_seconds)
        kept = _make(state, directory, entry, runner, say, stop, clock, kept)
        made += 1
        learn.refine(state, directory, say)
        learn.spare(state, directory, say)
        state.save()
    if kept.start:
        say(f"the server of {kept.mode} was kept for a run that was not made, and is stopped")
        runner.stop_servers()
    return state


def _allowed(spec: Spec, state: State, budget: float | None, say: Callable[[str], None]) -> set[tuple[str, int]]:
    waiting = [plan.Planned(e["arm"], e["mode"], e["repetition"], e["seed"]) for e in state.waiting()]
    each = _each(spec, state)
    left: list[plan.Planned] = []
    if budget is not None:
        waiting, left = plan.fitting(spec, waiting, budget, each)
    say(f"{len(waiting)} runs, about {plan.duration(each)} each, {plan.duration(len(waiting) * each)} together")
    if left:
        numbers = sorted({run.repetition + 1 for run in left})
        say(f"left out for the budget: repetition{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}")
    return {(run.arm, run.repetition) for run in waiting}


def _each(spec: Spec, state: State) -> float:
    return plan.run_seconds(
        spec, [e["seconds"] for e in state.entries if e["seconds"] and e["status"] in ("ok", "invalid")]
    )


def _make(
    state: State,
    directory: Path,
    entry: dict[str, Any],
    runner: Runner,
    say: Callable[[str], None],
    stop: Stop,
    clock: Callable[[], float],
    kept: Kept,
) -> Kept:
    done = sum(1 for e in state.entries if e["status"] not in ("waiting", "running"))
    failed = sum(1 for e in state.entries if e["status"] == "failed")
    where = f"[{done + 1}/{len(state.entries)}] {entry['arm']}, repetition {entry['repetition'] + 1}"
    eta = plan.duration(_each(state.spec, state) * len(state.waiting()))
    say(f"{where}: starts; about {eta} to go, {failed} failed so far")
    levels = sorted({*state.spec.levels, *state.added_levels})
    variables = learn.variables(state, directory, entry["mode"])
    if entry.get("begun"):
        # It was cut off, and its load client may still be at work: that one may be ended.
        variables = {**variables, "bench_left_behind": f"{entry['begun']}-{entry['mode']}"}
    if kept.start and kept.mode == entry["mode"]:
        variables = {**variables, "bench_go_on_with": kept.start}
    if state.spec.keep_server and _next_mode(state, entry) == entry["mode"]:
        variables = {**variables, "bench_leave_running": True}
    entry.update(status="running", levels=levels, begun=entry.get("begun") or f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}")
    state.save()
    begun = clock()
    outcome = runner(
        entry["mode"],
        levels,
        entry["seed"],
        lambda text: say(f"{where}: {text}"),
        stop.now,
        variables,
    )
    if outcome.status == "cancelled":
        entry.update(status="waiting", levels=None)
        say(f"{where}: cancelled; it will be made again")
        return Kept()
    entry.update(status=outcome.status, run_id=outcome.run_id, reason=outcome.reason, seconds=round(clock() - begun, 1))
    say(f"{where}: {outcome.status}{': ' + outcome.reason if outcome.reason else ''}")
    return Kept(entry["mode"], outcome.start)


def _next_mode(state: State, entry: dict[str, Any]) -> str | None:
    """The mode of the run that is planned behind this one."""
    behind = [other for other in state.waiting() if other is not entry]
    return str(behind[0]["mode"]) if behind else None


def _gave_up(state: State, mode: str) -> bool:
    last = [e["status"] for e in state.entries if e["mode"] == mode and e["status"] in ("ok", "invalid", "failed")]
    return last[-GIVE_UP:] == ["failed"] * GIVE_UP
