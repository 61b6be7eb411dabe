#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Run the P2P probe once for a state of the machine, judge it, and keep what it found."""

from __future__ import annotations

DOCUMENTATION = r"""
module: p2p_probe
short_description: See whether peer-to-peer between the GPUs works
version_added: 0.1.0
description:
  - Runs the compiled probe, which writes and verifies a pattern for every ordered pair of GPUs, measures latency and
    bandwidth and sums over all of them, each step with a hard time limit; and gives a verdict for each pair with the
    remedy.
  - Keeps the result in O(record). As long as the probe, the GPUs, the driver and the boot are the same, it is not run
    again.
  - Never fails because of what the probe finds; whoever calls it decides what a V(broken) means.
author: The Servelab developers
options:
  probe:
    description: The compiled probe.
    type: path
    required: true
  record:
    description: Where the result is kept, a JSON file.
    type: path
    required: true
  nccl:
    description:
      - NCCL's library, for an all-reduce over NCCL with and without P2P. Empty to leave it out. May hold wildcards.
    type: str
    default: ""
  mib:
    description: Size of one transfer in MiB, from 4 to 1024.
    type: int
    default: 64
  limit:
    description: Seconds that one step may take.
    type: float
    default: 20
  busy_mib:
    description:
      - With a GPU that has more memory than this in use nothing is probed, as the figures would be wrong and its user
        disturbed.
    type: int
    default: 1024
  force:
    description: Whether to run the probe although a result of the same state is there.
    type: bool
    default: false
attributes:
  check_mode:
    description: Tells whether the probe would run, without running it.
    support: full
  diff_mode:
    description: Shows the verdicts before and after.
    support: full
"""

EXAMPLES = r"""
- name: See whether the cards reach each other
  servelab.sglang.p2p_probe:
    probe: /opt/servelab/p2p/p2p_probe
    record: /var/lib/servelab/p2p.json
  register: p2p
  failed_when: p2p.status == 'broken'
"""

RETURN = r"""
status:
  description: >-
    The worst verdict, V(ok), V(slow) (staged through host memory), V(broken) or V(unknown); V(skipped) where the probe
    did not run, for RV(reason).
  returned: always
  type: str
reason:
  description: Why the probe did not run, a sentence, or null.
  returned: always
  type: str
pairs:
  description: A verdict for each ordered pair.
  returned: always
  type: list
  elements: dict
  contains:
    source: {description: The GPU that reaches into the other one's memory., type: int}
    target: {description: The GPU that is reached., type: int}
    verdict: {description: "V(ok), V(slow), V(broken) or V(unknown).", type: str}
    reason: {description: "What is wrong, or empty.", type: str}
    remedy: {description: "What to do, or null.", type: str}
    gb_s: {description: Bandwidth of a copy., type: float}
    latency_us: {description: Time of one load., type: float}
problems:
  description: Sentences, each with its remedy.
  returned: always
  type: list
  elements: str
table:
  description: Verdicts and figures as lines for a person.
  returned: always
  type: list
  elements: str
"""

import hashlib
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import query, run_bounded
from ansible_collections.servelab.sglang.plugins.module_utils.p2p import Judgement, judge, parse_report

NO_GPU = 77
NOTHING: dict[str, Any] = {"status": "skipped", "reason": None, "pairs": [], "problems": [], "table": []}


def read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""


def state_of(module: AnsibleModule, nccl: str, gpus: list[dict[str, Any]]) -> dict[str, Any]:
    """What a result belongs to. ACS settings and the like go with a reboot, so the boot is part of it."""
    probe = Path(module.params["probe"])
    return {
        "probe": hashlib.sha256(probe.read_bytes()).hexdigest() if probe.is_file() else None,
        "gpus": [gpu.get("uuid") for gpu in gpus],
        "driver": next((gpu.get("driver_version") for gpu in gpus), None),
        "boot": read("/proc/sys/kernel/random/boot_id"),
        "nccl": nccl,
        "mib": module.params["mib"],
    }


def kept(path: str) -> dict[str, Any]:
    try:
        content = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


def shown(judged: Judgement) -> dict[str, Any]:
    return {
        "status": judged.status,
        "reason": None,
        "pairs": [asdict(pair) for pair in judged.pairs],
        "problems": judged.problems,
        "table": judged.table,
    }


def verdicts(report: dict[str, Any]) -> str:
    """Without the figures, which differ a little each time."""
    if not report.get("pairs"):
        return ""
    return "".join(f"{pair.source}->{pair.target}: {pair.verdict}\n" for pair in judge(report).pairs)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "probe": {"type": "path", "required": True},
            "record": {"type": "path", "required": True},
            "nccl": {"type": "str", "default": ""},
            "mib": {"type": "int", "default": 64},
            "limit": {"type": "float", "default": 20},
            "busy_mib": {"type": "int", "default": 1024},
            "force": {"type": "bool", "default": False},
        },
        supports_check_mode=True,
    )
    found = sorted(Path("/").glob(module.params["nccl"].lstrip("/"))) if module.params["nccl"] else []
    nccl = str(found[0]) if found else ""
    gpus = query().gpus
    state = state_of(module, nccl, gpus)
    earlier = kept(module.params["record"])
    if earlier.get("state") == state and earlier.get("report", {}).get("pairs") and not module.params["force"]:
        module.exit_json(changed=False, **shown(judge(earlier["report"])))
    busy = [gpu for gpu in gpus if (gpu.get("memory_used_mib") or 0) > module.params["busy_mib"]]
    if busy:
        used = ", ".join(f"GPU {gpu['index']} ({gpu['memory_used_mib']} MiB)" for gpu in busy)
        reason = (
            f"P2P was not probed: {used} in use, and only free cards tell. Stop what uses them (playbooks/clean.yml "
            "--check names it), then run playbooks/validate.yml --tags p2p."
        )
        module.exit_json(changed=False, **{**NOTHING, "reason": reason})
    if module.check_mode:
        module.exit_json(changed=True, **{**NOTHING, "reason": "Check mode does not run the probe."})

    argv = [module.params["probe"], "--mib", str(module.params["mib"]), "--limit", str(module.params["limit"])]
    if nccl:
        argv += ["--nccl", nccl]
    # Every step has its own limit in the probe; this one is for a driver in which not even the probe's parent returns.
    pairs = max(len(gpus), 2) ** 2
    try:
        answer = run_bounded(argv, 120 + (pairs + 8) * module.params["limit"])
    except OSError as error:
        module.fail_json(msg=f"The P2P probe {argv[0]} cannot be started: {error}; run the role gpu_p2p.")
        raise
    if answer is None:
        module.fail_json(
            msg="The P2P probe did not end; a process hangs in the driver. Reboot the node, then run again."
        )
        raise AssertionError  # fail_json does not return
    rc, out, err = answer
    try:
        report = parse_report(out)
    except ValueError as error:
        module.fail_json(msg=f"{error}; {err.strip()[:300] or 'nothing on stderr'} (exit status {rc}).")
        raise
    survey = report.get("survey", {}).get("measured", {})
    if rc == NO_GPU:
        count = int(survey.get("count", 0))
        reason = (
            "there is one GPU only" if count == 1 else f"CUDA finds no GPU here ({survey.get('says', 'no answer')})"
        )
        module.exit_json(changed=False, **{**NOTHING, "reason": f"P2P was not probed: {reason}."})
    if rc != 0:
        said = survey.get("says") or report.get("survey", {}).get("error")
        module.fail_json(
            msg=f"CUDA does not start in this machine: {said}; run the role nvidia_userspace, which names the cause.",
            report=report,
        )
    path = Path(module.params["record"])
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    beside.write_text(json.dumps({"state": state, "report": report}, indent=1) + "\n", encoding="utf-8")
    beside.replace(path)
    diff = {"before": verdicts(earlier.get("report", {})), "after": verdicts(report)}
    module.exit_json(changed=True, diff=diff, **shown(judge(report)))


if __name__ == "__main__":
    main()
