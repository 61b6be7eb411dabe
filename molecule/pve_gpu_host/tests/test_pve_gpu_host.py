"""The audit tells a good node from a bad one, says why and what to do, and calls unknown what cannot be looked at."""

from __future__ import annotations

import json

import pytest

KEEP = "Keep the audit for what follows"


def findings(result: dict) -> dict[str, dict]:
    return {finding["check"]: finding for finding in result["ansible_facts"]["pve_gpu_host_audit"]["findings"]}


@pytest.fixture(scope="module")
def played(play):
    return play("--diff")


def test_the_node_is_good_and_nothing_changes(played):
    assert played.ok
    assert played.changed == []
    audit = played.results[KEEP][0]["ansible_facts"]["pve_gpu_host_audit"]
    # The lab's kernel shows nothing about an IOMMU, and that is not "ok".
    assert {name: finding["status"] for name, finding in findings(played.results[KEEP][0]).items()} == {
        "kernel driver": "ok",
        "driver flavour": "ok",
        "device nodes": "ok",
        "GPUs": "ok",
        "topology": "ok",
        "IOMMU": "unknown",
    }
    assert audit["driver_version"] == "580.95.05"
    assert [gpu["index"] for gpu in audit["gpus"]] == list(range(8))
    assert {gpu["memory_total_mib"] for gpu in audit["gpus"]} == {97887}


def test_the_topology_has_two_islands(played):
    topology = played.results[KEEP][0]["ansible_facts"]["pve_gpu_host_audit"]["topology"]
    assert "2 NUMA islands (0-3; 4-7)" in findings(played.results[KEEP][0])["topology"]["found"]
    assert topology


def test_another_purpose_finds_another_verdict_and_goes_on(played):
    found = findings(played.results[KEEP][1])
    assert played.results[KEEP][1]["ansible_facts"]["pve_gpu_host_audit"]["status"] == "fail"
    assert found["kernel driver"]["status"] == "fail"
    assert found["kernel driver"]["found"] == "580.95.05"
    assert found["kernel driver"]["right"] == "590.44.01 or newer"
    assert found["GPUs"]["status"] == "fail"
    assert "GPU-00000000-0000-0000-0000-000000000000" in json.dumps(found["GPUs"])
    assert found["device nodes"]["status"] == "ok"


def test_a_missing_card_stops_the_play_with_the_remedy(play):
    played = play(pve_gpu_host_expected_gpus=9)
    assert not played.ok
    assert played.said.startswith("lab-pve1 cannot give its GPUs away as it is: GPUs: 8 x NVIDIA RTX PRO 6000")
    assert "(right: 9 GPUs). Remedy: " in played.said
    assert "(pve_gpu_host_audit_fatal=false goes on all the same.)" in played.said


# Failure of the switchboard, the check that finds it, and what it finds.
@pytest.mark.parametrize(
    ("name", "check", "found"),
    [
        ("smi_hang", "GPUs", "nvidia-smi did not answer within 2"),
        ("no_devices", "GPUs", "the driver is loaded, but this"),
        ("no_driver", "GPUs", "driver"),
        ("driver_mismatch", "GPUs", "version"),
        ("off_the_bus", "GPUs", "a GPU has fallen off the bus"),
        ("needs_reset", "GPUs", "GPU 3: needs-reset"),
        ("unreadable", "GPUs", "GPU 3: error"),
        ("uvm_missing", "device nodes", "missing: nvidia-uvm, nvidia-uvm-tools"),
        ("node_is_file", "device nodes", "nvidia3 is a regular file"),
    ],
)
def test_a_failure_is_found_and_stops_the_play_with_its_remedy(play, fault, name, check, found):
    with fault(name):
        played = play(pve_gpu_host_timeout=2)
    assert not played.ok
    finding = findings(played.results[KEEP][0])[check]
    assert finding["status"] == "fail"
    assert found in finding["found"]
    assert f"{check}: {finding['found']} (right: {finding['right']}). Remedy: {finding['remedy']}." in played.said


def test_a_moved_number_is_no_fault_of_the_node(play, fault):
    with fault("uvm_moved"):
        played = play()
    assert played.ok
    assert findings(played.results[KEEP][0])["device nodes"]["status"] == "ok"
