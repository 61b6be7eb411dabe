"""Every way of the lab's machine is measured or refused in SGLang's words, comes home as a run, and says simulated."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

RESULTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results"


def newest() -> Path:
    return sorted((RESULTS / "collectives").glob("*-collectives"))[-1]


def load(name: str) -> dict:
    return json.loads((newest() / name).read_text())


def ledger() -> dict:
    return json.loads((RESULTS / "ledger.jsonl").read_text().splitlines()[-1])


def test_the_run_is_a_whole_bundle():
    wanted = {"run.json", "provenance.json", "collectives.json", "collectives.md", "nccl.jsonl", "SHA256SUMS"}
    assert wanted <= {path.name for path in newest().iterdir()}
    subprocess.run(["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"], cwd=newest(), check=True)
    assert load("run.json")["status"] == "ok"
    assert load("provenance.json")["gpu_clean"]["before"]["view"] == "node and guest"


def test_simulated_is_written_on_everything():
    told = {"profile": "story"}
    assert told.items() <= load("run.json")["simulated"].items()
    assert told.items() <= load("collectives.json")["simulated"].items()
    assert told.items() <= ledger()["simulated"].items()
    assert (newest() / "collectives.md").read_text().startswith("# All-reduce on 8 GPUs (simulated)")


def test_the_ways_are_what_this_machine_has():
    found = {arm["name"]: arm["status"] for arm in load("collectives.json")["arms"]}
    assert found == {
        "nccl": "ok",
        "nccl_ring_ll": "ok",
        "nccl_no_p2p": "ok",
        "nccl_low_latency": "ok",
        "nccl_throughput": "ok",
        "nccl_fewer_channels": "ok",
        # Eight PCIe cards: SGLang refuses both of its kernels, and the patch opens the older one.
        "custom_ar_unforced": "refused",
        "custom_ar_pcie": "ok",
        "custom_ar_v2": "refused",
        "pcie_ipc": "ok",
    }


def test_a_verify_step_is_predicted_as_the_story_has_it():
    verify = load("collectives.json")["prediction"]["steps"][1]
    assert (verify["bytes"], verify["allreduces"]) == (43008, 122)
    # 122 all-reduces of 240 µs, launched one by one.
    assert verify["arms"]["nccl"]["eager"]["step_ms"] == 29.28


def test_the_ledger_has_it():
    assert (ledger()["mode"], ledger()["status"], ledger()["best_tok_s"]) == ("collectives", "ok", None)


def test_nothing_is_left_running(guest):
    assert not guest.run("systemctl list-units --no-legend --state=active 'servelab-*.service'").stdout
    assert not guest.run("ls /var/lib/servelab/runs").stdout


def test_a_way_that_is_none_is_answered_with_those_that_are(play):
    played = play(collectives_gpus="GPU-5f1c")
    assert not played.ok
    assert "must be indices as in 0,1,2,3" in played.said
