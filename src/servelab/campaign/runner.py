"""One run of a campaign: bench.yml, through ansible-runner."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from servelab import bundle
from servelab.bundle import BundleError
from servelab.campaign import orphans
from servelab.campaign.drive import Outcome
from servelab.campaign.spec import CampaignError, Spec

# The one task whose lines are news while it runs.
WATCHING = ("Watch the levels", "Wait until")


class BenchRunner:
    """Runs bench.yml of the collection at *root* for a campaign whose bundles go to *results*."""

    def __init__(
        self, root: Path, results: Path, spec: Spec, variables: Mapping[str, Any], inventories: Sequence[str] = ()
    ) -> None:
        """*inventories*: in place of the one in ansible.cfg (or $ANSIBLE_INVENTORY), as ansible-playbook's -i."""
        self.root = root
        self.results = results.resolve()
        self.spec = spec
        self.variables = dict(variables)
        # Not as ansible-runner's own argument, which copies what it is given into its scratch directory.
        paths = ",".join(str(Path(name).resolve()) for name in inventories)
        self.inventory = {"ANSIBLE_INVENTORY": paths} if paths else {}
        if not (root / "bench.yml").is_file():
            raise CampaignError(f"{root} holds no bench.yml: run the campaign from the collection's directory.")

    def __call__(
        self,
        mode: str,
        levels: list[int],
        seed: int,
        say: Callable[[str], None],
        cancelled: Callable[[], bool],
        variables: Mapping[str, Any],
    ) -> Outcome:
        failure: list[str] = []

        def listen(event: dict[str, Any]) -> bool:
            data = event.get("event_data") or {}
            if event.get("event") == "runner_on_failed" and not data.get("ignore_errors"):
                failure.append(_reason(data))
            elif event.get("event") == "verbose":
                # What the watch plugin says between a task's start and its end.
                for line in str(event.get("stdout") or "").splitlines():
                    if line.startswith("  "):
                        say(line.strip())
            return False  # nothing is kept: the bundle is the record

        before = self._bundles()
        status = self._play(
            "bench.yml",
            {
                **self.spec.variables,
                **self.variables,
                **variables,
                "mode": mode,
                "campaign": self.spec.name,
                "levels": ",".join(map(str, levels)),
                "bench_seed": seed,
                "bench_results_dir": str(self.results),
                # Between its runs too, nobody else may have the GPUs; when this process is dead, anybody may.
                "gpu_clean_lease_pid": os.getpid(),
                # A level that is not valid is recorded; the others of the run still count.
                "bench_invalid_ok": True,
            },
            event_handler=listen,
            cancel_callback=cancelled,
        )
        new = sorted(self._bundles() - before)
        if status == "canceled":
            # Even if a bundle came home: the run was ended from outside, and its GPUs were not left clean.
            return Outcome("cancelled", None, None)
        if not new:
            return Outcome("failed", None, failure[-1] if failure else f"bench.yml ended as {status}")
        try:
            found = bundle.read(self.results / self.spec.name / new[-1])
        except BundleError as error:
            return Outcome("failed", new[-1], str(error))
        reason = found.run.get("reason")
        start = found.provenance.get("start") or {}
        return Outcome(
            str(found.run["status"]),
            new[-1],
            str(reason).splitlines()[0] if reason else None,
            start["id"] if start.get("left_running") else None,
        )

    def stop_servers(self) -> None:
        self._play("playbooks/stop.yml", self.variables)

    def _play(self, playbook: str, variables: Mapping[str, Any], **options: Any) -> str:
        """How it ended, in ansible-runner's word."""
        import ansible_runner

        with tempfile.TemporaryDirectory(prefix="servelab-campaign-") as scratch:
            done = ansible_runner.run(
                private_data_dir=scratch,
                project_dir=str(self.root),
                playbook=playbook,
                extravars=dict(variables),
                envvars={
                    "ANSIBLE_CONFIG": str(self.root / "ansible.cfg"),
                    "PWD": str(self.root),
                    **self.inventory,
                    **orphans.mark(self.results),
                },
                quiet=True,
                **options,
            )
        return str(done.status)

    def _bundles(self) -> set[str]:
        directory = self.results / self.spec.name
        if not directory.is_dir():
            return set()
        return {path.name for path in directory.iterdir() if bundle.RUN_ID.fullmatch(path.name)}


def _reason(data: Mapping[str, Any]) -> str:
    message = str((data.get("res") or {}).get("msg") or "no message").splitlines()[0]
    return f"{data.get('task', 'a task')}: {message}"
