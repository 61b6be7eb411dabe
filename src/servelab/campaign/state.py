"""What is done: one file beside the campaign's runs, from which any interruption is resumed.

The same file tells `servelab compare` which runs are repetitions of one experiment (schema servelab.campaign/1).
"""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from servelab.campaign.plan import Planned
from servelab.campaign.spec import CampaignError, Spec
from servelab.compare.pairs import PLAN

SCHEMA = "servelab.campaign/1"
# What may change between two sittings without making the runs another experiment.
FREE = {"description", "repetitions", "pause_seconds", "precision"}


class State:
    """``entries``: one per planned run, with ``status`` waiting, running, ok, invalid, failed, skipped (its mode failed
    too often) or spared (the others are precise enough). ``derived``: mode → what its configuration was made from."""

    def __init__(self, directory: Path, spec: Spec, runs: Sequence[Planned]) -> None:
        """Read the state in *directory*, or begin one. Raises CampaignError when it is another campaign's."""
        self.path = directory / PLAN
        self.spec = spec
        self.added_levels: list[int] = []
        self.derived: dict[str, dict[str, Any]] = {}
        known: dict[tuple[str, int], dict[str, Any]] = {}
        if self.path.exists():
            try:
                content = json.loads(self.path.read_text())
                self._same(content["spec"])
                self.added_levels = list(content["added_levels"])
                self.derived = dict(content.get("derived") or {})
                known = {(entry["arm"], entry["repetition"]): entry for entry in content["runs"]}
            except (OSError, ValueError, LookupError, TypeError) as error:
                raise CampaignError(f"{self.path} cannot be used ({error!r}): move the directory away.") from error
        waiting = {"status": "waiting", "run_id": None, "reason": None, "seconds": None, "levels": None}
        # When a run was begun outlives its being cut off: by it the next sitting knows what it left on the guest.
        self.entries = [known.pop((run.arm, run.repetition), {**asdict(run), **waiting, "begun": None}) for run in runs]
        # Repetitions made when the campaign still asked for more of them stay.
        self.entries += [entry for entry in known.values() if entry["run_id"]]
        for entry in self.entries:
            # What was cut off left no complete run; whether spared ones are needed is for this sitting to say.
            if entry["status"] in ("running", "spared"):
                entry.update(waiting)

    def _same(self, before: dict[str, Any]) -> None:
        now = asdict(self.spec)
        # What a campaign of an older release does not name had the value that it has by default.
        usual = asdict(Spec(self.spec.name, "", [], []))
        changed = [key for key in now if key not in FREE and before.get(key, usual[key]) != now[key]]
        if changed:
            raise CampaignError(
                f"Campaign {self.spec.name} was begun with other {', '.join(changed)}: its runs would not be "
                f"comparable. Give the changed campaign a new name, or move {self.path.parent} away."
            )

    def save(self) -> None:
        """Write it whole or not at all: this may be the last thing before the power fails."""
        content = {
            "schema": SCHEMA,
            "spec": asdict(self.spec),
            "added_levels": self.added_levels,
            "derived": self.derived,
            "runs": self.entries,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self.path.with_suffix(".new")
        with scratch.open("w") as stream:
            stream.write(json.dumps(content, indent=1) + "\n")
            stream.flush()
            os.fsync(stream.fileno())
        scratch.rename(self.path)

    def waiting(self) -> list[dict[str, Any]]:
        return [entry for entry in self.entries if entry["status"] == "waiting"]

    def again(self) -> None:
        """Put what failed or was skipped for it back in the queue."""
        for entry in self.entries:
            if entry["status"] in ("failed", "skipped", "invalid"):
                entry.update(status="waiting", run_id=None, reason=None, seconds=None, levels=None, begun=None)


@contextmanager
def lease(results: Path) -> Iterator[None]:
    """One campaign at a time: two that stop each other's servers measure nothing. Ends with the process."""
    results.mkdir(parents=True, exist_ok=True)
    with (results / ".campaign.lock").open("a") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise CampaignError(f"Another campaign is running with {results}: wait for it, or stop it.") from error
        yield
