#!/usr/bin/env python3
"""Cleaning against a real driver: who holds the card, who may go, who must live, and when the memory is back.

    python3 tests/gpu/holders/run.py [--gpu N] [--mib M] [--role] [--json FILE]

By hand, as root, on a machine with an NVIDIA GPU that nobody uses. Needs Python 3.11 and nothing else; with --role
ansible-playbook too, and the role gpu_clean then does the work over a local connection. Exit status 0: all was as it
must be; 1: something was not; 77: nothing could be tried.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
sys.path.insert(0, str(ROOT / "src"))

from servelab.shared import nvidia_smi  # noqa: E402
from servelab.shared.fuser import fuser  # noqa: E402
from servelab.shared.gpu_holders import PROTECT, scan  # noqa: E402
from servelab.shared.gpu_policy import plan, table, why_not_clean  # noqa: E402
from servelab.shared.gpu_release import release  # noqa: E402

# What nobody's context can hide below (see gpu_clean_memory_threshold_mib).
THRESHOLD_MIB = 64
MEMORY_BACK_S = 30.0


class Run:
    """One machine, one card, and what was found so far."""

    def __init__(self, asked: argparse.Namespace) -> None:
        self.asked = asked
        self.failures: list[str] = []
        self.rows: list[dict[str, Any]] = []
        self.started: list[subprocess.Popen[str]] = []
        self.pids: list[int] = []

    def expect(self, what: str, found: Any, right: Any) -> None:
        if found != right:
            self.failures.append(f"{what}: {found!r}, but must be {right!r}")
            print(f"   WRONG  {self.failures[-1]}")

    def used(self) -> int:
        """MiB in use on the card."""
        for gpu in nvidia_smi.query().gpus:
            if gpu["index"] == self.asked.gpu and gpu["memory_used_mib"] is not None:
                return int(gpu["memory_used_mib"])
        raise SystemExit(f"nvidia-smi does not tell the memory of GPU {self.asked.gpu}")

    def look(self, **options: Any) -> dict[str, Any]:
        return scan(device_dir=self.asked.device_dir, protect=(*PROTECT, *self.asked.trust), **options)

    def start(self, *options: str, program: Path = HERE / "holder.py") -> list[int]:
        """Start holder.py; the PIDs that have a context."""
        words = [str(program), str(self.asked.gpu), str(self.asked.mib), "--library", self.asked.library, *options]
        # A copy under another name must run by itself, so that its name is the process's.
        command = words if program.name != "holder.py" else [sys.executable, *words]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
        assert process.stdout is not None
        said = process.stdout.readline().split()
        if said[:1] != ["ready"]:
            raise SystemExit(f"{' '.join(words)} could not hold the card")
        self.started.append(process)
        self.pids += [int(word) for word in said[1:]]
        return [int(word) for word in said[1:]]

    def end(self) -> None:
        """Nothing of ours stays, whatever happened."""
        for pid in {*self.pids, *(process.pid for process in self.started)}:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        for process in self.started:
            process.wait()
        self.started, self.pids = [], []

    def memory_back(self, baseline: int, since: float) -> float | None:
        """Seconds after `since` until the card is as empty as before; None when it did not get so."""
        while time.monotonic() - since < MEMORY_BACK_S:
            if self.used() <= baseline + 1:
                return round(time.monotonic() - since, 2)
            time.sleep(0.02)
        return None

    @contextmanager
    def case(self, name: str) -> Iterator[dict[str, Any]]:
        print(f"-- {name}")
        row: dict[str, Any] = {"case": name}
        before = len(self.failures)
        try:
            yield row
        finally:
            self.end()
            row["ok"] = len(self.failures) == before
            self.rows.append(row)


def alive(pid: int) -> bool:
    """Whether the process still runs; one that only waits to be collected does not."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return False
    return text.rpartition(")")[2].split()[0] not in ("Z", "X")


def by_pid(seen: dict[str, Any]) -> dict[int, dict[str, Any]]:
    return {holder["pid"]: holder for holder in seen["holders"]}


def cleaned(run: Run, row: dict[str, Any], pids: Sequence[int], baseline: int, deaf: bool = False) -> None:
    """Judge, release and prove: the heart of every case."""
    began = time.monotonic()
    seen = run.look()
    row["scan_ms"] = round((time.monotonic() - began) * 1e3, 1)
    run.expect("holders", sorted(by_pid(seen)), sorted(pids))
    run.expect("complete", seen["complete"], True)
    for holder in seen["holders"]:
        run.expect(f"cards of {holder['pid']}", len(holder["gpus"]) >= 1, True)
        run.expect(f"{holder['pid']} has nvidiactl", any(d.startswith("nvidiactl") for d in holder["devices"]), True)
    row["used_mib"] = run.used()
    run.expect("memory in use is seen", row["used_mib"] >= baseline + run.asked.mib, True)
    unasked = plan(seen)
    run.expect("unasked, nobody is released", (unasked["release"], len(unasked["refuse"])), ([], len(pids)))
    forced = plan(seen, force=True)
    print("   " + table(forced).replace("\n", "\n   "))
    began = time.monotonic()
    done = release(forced["release"], grace=3, nodes=seen["nodes"] if forced["sweep"] else ())
    row["released_s"] = round(time.monotonic() - began, 2)
    row["notes"] = done["notes"]
    run.expect("outcomes", {r["outcome"] for r in done["results"]}, {"killed" if deaf else "exited"})
    run.expect("who still runs", [pid for pid in pids if alive(pid)], [])
    row["memory_back_s"] = run.memory_back(baseline, began)
    after = run.look()
    verdict = nvidia_smi.memory_verdict(
        {"gpus": [gpu for gpu in nvidia_smi.query().gpus if gpu["index"] == run.asked.gpu], "diagnosis": None},
        THRESHOLD_MIB,
    )
    run.expect("why not clean", why_not_clean(plan(after), {"guest": verdict}), [])
    print(f"   {row['used_mib']} MiB; gone after {row['released_s']} s, memory back after {row['memory_back_s']} s")


def parent_killed(run: Run, baseline: int) -> None:
    with run.case("a parent is killed, its two children hold the card") as row:
        pids = run.start("--survivors", "2")
        parent = run.started[-1]
        parent.kill()
        parent.wait()
        time.sleep(0.5)
        run.expect("who survived", [pid for pid in pids if alive(pid)], pids)
        cleaned(run, row, pids, baseline)


def monitored(run: Run, baseline: int) -> None:
    """A name on the protect list keeps a process alive, and its memory is not passed off as clean."""
    with run.case("a monitor lives through it") as row, tempfile.TemporaryDirectory() as scratch:
        exporter = Path(scratch, "dcgm-exporter")
        exporter.write_text(f"#!{sys.executable}\n" + (HERE / "holder.py").read_text())
        exporter.chmod(0o755)
        (monitor,), (target,) = run.start(program=exporter), run.start()
        decided = plan(run.look(), force=True)
        run.expect("to release", [holder["pid"] for holder in decided["release"]], [target])
        run.expect("tolerated", [holder["pid"] for holder in decided["tolerate"]], [monitor])
        run.expect("no sweep beside a monitor", decided["sweep"], False)
        began = time.monotonic()
        # The nodes are given against the plan's advice: the sweep has to notice the monitor by itself.
        row["notes"] = release(decided["release"], grace=3, nodes=run.look()["nodes"])["notes"]
        row["released_s"] = round(time.monotonic() - began, 2)
        run.expect("the monitor lives, the target does not", (alive(monitor), alive(target)), (True, False))
        report = {"gpus": [g for g in nvidia_smi.query().gpus if g["index"] == run.asked.gpu], "diagnosis": None}
        verdict = nvidia_smi.memory_verdict(report, THRESHOLD_MIB)
        reasons = why_not_clean(plan(run.look()), {"guest": verdict})
        run.expect("its memory is told", any("dcgm-exporter" in reason for reason in reasons), True)
        os.kill(monitor, signal.SIGKILL)
        row["memory_back_s"] = run.memory_back(baseline, time.monotonic())


def by_the_role(run: Run, baseline: int) -> None:
    """The same through Ansible, on this machine: without force it names and refuses, with force it cleans."""
    here = shutil.which("ansible-playbook")
    command = [here] if here else [sys.executable, "-m", "ansible", "playbook"]
    command += ["-i", "localhost,", str(HERE / "clean.yml")]
    given = {"gpu_clean_device_dir": run.asked.device_dir, "gpu_clean_protect": [*PROTECT, *run.asked.trust]}
    command += ["-e", json.dumps(given)]
    environment = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "PYTHONPATH": str(ROOT / "src")}
    with run.case("the role, over a local connection") as row:
        pids = run.start() + run.start("--survivors", "1")
        refused = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
        run.expect("without force it refuses", refused.returncode, 2)
        run.expect("and names everybody", all(str(pid) in refused.stdout for pid in pids), True)
        run.expect("and nobody was signalled", [pid for pid in pids if alive(pid)], pids)
        began = time.monotonic()
        forced = subprocess.run(
            [*command, "-e", "gpu_clean_force=true"],
            cwd=ROOT,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
        row["released_s"] = round(time.monotonic() - began, 2)
        if forced.returncode:
            print(forced.stdout + forced.stderr)
        run.expect("with force it succeeds", forced.returncode, 0)
        run.expect("who still runs", [pid for pid in pids if alive(pid)], [])
        run.expect("the card is as before", run.used() <= baseline + 1, True)
        print("   " + "\n   ".join(line for line in forced.stdout.splitlines() if "are clean" in line))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", type=int, default=0, help="nvidia-smi's number of the card (default 0)")
    parser.add_argument("--mib", type=int, default=4096, help="memory of each holder (default 4096)")
    parser.add_argument("--role", action="store_true", help="also through the role gpu_clean")
    parser.add_argument(
        "--trust", action="append", default=[], metavar="NAME", help="a program that even root may not look at here"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write what was found there too")
    parser.add_argument("--device-dir", default="/dev", help=argparse.SUPPRESS)
    parser.add_argument("--library", default="libcuda.so.1", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    report = nvidia_smi.query()
    if not report.gpus:
        print(f"nothing was tried: {report.diagnosis.cause if report.diagnosis else 'no GPU'}")
        return 77
    run = Run(asked)
    first = run.look()
    if [one["pid"] for one in first["unreadable"]] == [1]:
        # A virtual machine's init that has more rights than root. It is no user of the card.
        asked.trust.append(first["unreadable"][0]["name"])
        print(f"PID 1 ({asked.trust[-1]}) may not be looked at, and is taken for one that may stay")
        first = run.look()
    if first["holders"] or not first["complete"]:
        print(
            "nothing was tried: the card is in use, or processes may not be looked at (--trust NAME if they may stay)"
        )
        print(table(plan(first)), *first["unreadable"], sep="\n")
        return 77
    baseline = run.used()
    gpu = next(gpu for gpu in report.gpus if gpu["index"] == asked.gpu)
    print(f"{gpu['name']}, driver {gpu['driver_version']}, kernel {os.uname().release}, view: {first['view']}")
    print(f"nodes: {' '.join(first['nodes'])}; {baseline} MiB in use when nobody holds it")
    try:
        for name, options in {
            "one process": (),
            "one that ignores SIGTERM": ("--deaf",),
            "a child that has the context, a parent that has none": ("--child",),
        }.items():
            with run.case(name) as row:
                cleaned(run, row, run.start(*options), baseline, deaf="--deaf" in options)
        parent_killed(run, baseline)
        monitored(run, baseline)
        with run.case("fuser and the scan agree, as it is one namespace"):
            pids = run.start()
            if shutil.which("fuser"):
                run.expect("fuser", sorted(set(fuser(run.look()["nodes"]).pids)), sorted(pids))
            else:
                print("   fuser is not here; skipped")
        if asked.role:
            by_the_role(run, baseline)
    finally:
        run.end()
    if asked.json:
        asked.json.write_text(json.dumps({"gpu": gpu, "baseline_mib": baseline, "cases": run.rows}, indent=1) + "\n")
    print(f"{sum(row['ok'] for row in run.rows)} of {len(run.rows)} cases were as they must be")
    return 1 if run.failures else 0


if __name__ == "__main__":
    sys.exit(main())
