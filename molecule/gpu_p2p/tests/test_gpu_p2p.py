"""Without a GPU the role says so; the probe compiles; what a probe prints becomes verdicts, which are kept."""

from __future__ import annotations

import json

import pytest

# The play that judges what a test's probe printed, and no other.
JUDGE = ("--skip-tags", "inventory,alternative")
CANNED = "/srv/other/canned"
GOOD = {"advertised": True, "copy_wrong_words": 0, "copy_gb_s": 50.1, "load_latency_us": 1.7}


def report(**second: object) -> str:
    pairs = [
        {"from": 0, "to": 1, "state": "done", "measured": GOOD},
        {"from": 1, "to": 0, **({"state": "done", "measured": GOOD} | second)},
    ]
    survey = {"state": "done", "measured": {"count": 2}}
    return json.dumps({"schema": "servelab.p2p/1", "survey": survey, "host": [], "pairs": pairs, "all_reduce": []})


@pytest.fixture
def probe(guest):
    """Puts a program in the probe's place that prints a report, and counts its calls."""

    def put(text: str, rc: int = 0) -> None:
        script = f"#!/bin/sh\necho \"$@\" >> {CANNED}/calls\ncat <<'END'\n{text}\nEND\nexit {rc}\n"
        guest.check_output(f"mkdir -p {CANNED} && cat > {CANNED}/p2p_probe <<'SCRIPT'\n{script}SCRIPT")
        guest.check_output(f"chmod 755 {CANNED}/p2p_probe")

    yield put
    guest.check_output(f"rm -rf {CANNED}")


def test_without_a_gpu_it_says_so(play):
    played = play()
    assert played.ok
    assert played.changed == []
    (said,) = played.results["Say why P2P is not probed"]
    assert said["msg"] == "P2P was not probed on lab-gpu1: CUDA finds no GPU (CUDA_ERROR_NO_DEVICE)."


def test_the_compiled_probe_says_so_too(guest):
    done = guest.run("/srv/other/p2p/p2p_probe")
    assert done.rc == 77
    assert json.loads(done.stdout)["survey"]["measured"]["cuda"] == "cudaErrorNoDevice"
    assert guest.run("/srv/other/p2p/p2p_probe --mib 1").rc == 2


def test_good_pairs_pass_and_are_not_probed_again(play, guest, probe):
    probe(report())
    played = play(*JUDGE)
    assert played.ok
    assert ("Write and verify for every pair, and sum over all cards", "lab-gpu1") in played.changed
    assert "GPU0     -        ok 50.1" in played.results["Show the verdicts"][-1]["msg"]
    assert play(*JUDGE).changed == []
    assert guest.check_output(f"cat {CANNED}/calls") == "--mib 32 --limit 5.0"


def test_a_broken_pair_stops_the_play_with_the_remedy(play, probe):
    probe(report(state="hung", error="no answer within 5 s", measured=None))
    played = play(*JUDGE)
    assert not played.ok
    assert played.said.startswith(
        "P2P between GPUs 1→0 is broken: a transfer never ended (no answer within 5 s). Remedy: "
    )
    assert "iommu=pt" in played.said and "NCCL_P2P_DISABLE=1" in played.said
    assert played.said.endswith("(gpu_p2p_fatal=false goes on all the same.)")
    assert play(*JUDGE, gpu_p2p_fatal=False).ok


def test_a_driver_that_cuda_does_not_start_with_is_no_missing_gpu(play, probe):
    survey = {"state": "done", "measured": {"code": 999, "says": "unknown error", "count": 0}}
    probe(json.dumps({"schema": "servelab.p2p/1", "survey": survey}), rc=1)
    played = play(*JUDGE)
    assert not played.ok
    assert "CUDA does not start in this machine: unknown error" in played.said


def test_bad_settings_are_all_told_at_once(play):
    played = play(gpu_p2p_architectures=["blackwell"], gpu_p2p_mib=1, gpu_p2p_limit=0.1)
    assert not played.ok
    assert "gpu_p2p_architectures has blackwell, which is no architecture" in played.said
    assert "gpu_p2p_mib is 1, but must be from 4 to 1024" in played.said
    assert "gpu_p2p_limit is 0.1, but must be 1 s or more" in played.said
