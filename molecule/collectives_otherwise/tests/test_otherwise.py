"""The run with most variables changed: two ways, four cards, another model; and one whose sums are wrong."""

from __future__ import annotations

import json
import os
from pathlib import Path

RESULTS = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results"
WAYS = Path(__file__).resolve().parents[2] / "collectives/converge.yml"


def found(campaign: str = "otherwise") -> dict:
    (path,) = (RESULTS / campaign).glob("*-collectives")
    return json.loads((path / "collectives.json").read_text())


def test_only_what_was_named_was_measured_on_as_many_cards():
    result = found()
    assert [(arm["name"], arm["status"]) for arm in result["arms"]] == [("nccl", "ok"), ("nccl_no_p2p", "ok")]
    assert result["world_size"] == 4


def test_the_prediction_is_for_the_model_that_was_named():
    """16 layers make 32 all-reduces; 5 tokens of 2048 elements of 2 bytes are 20480 bytes."""
    verify = found()["prediction"]["steps"][1]
    assert (verify["allreduces"], verify["bytes"]) == (32, 20480)


def test_garbage_is_named_and_not_used(play, fault):
    with fault("garbage_output"):
        played = play(playbook=WAYS, collectives_arms=["nccl", "custom_ar_pcie"], collectives_campaign="garbage")
    assert not played.ok
    assert "custom_ar_pcie wrong" in played.said
    line = json.loads((RESULTS / "ledger.jsonl").read_text().splitlines()[-1])
    assert (line["status"], "custom_ar_pcie wrong" in line["reason"]) == ("invalid", True)
    assert "custom_ar_pcie" not in found("garbage")["prediction"]["steps"][1]["arms"]
