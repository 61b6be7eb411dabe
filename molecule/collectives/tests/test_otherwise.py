"""The run with most variables changed: two ways, four cards, another model."""

from __future__ import annotations

import json
import os
from pathlib import Path

PATH = Path(os.environ["MOLECULE_EPHEMERAL_DIRECTORY"]) / "results/otherwise"


def found() -> dict:
    (path,) = PATH.glob("*-collectives")
    return json.loads((path / "collectives.json").read_text())


def test_only_what_was_named_was_measured_on_as_many_cards():
    result = found()
    assert [(arm["name"], arm["status"]) for arm in result["arms"]] == [("nccl", "ok"), ("nccl_no_p2p", "ok")]
    assert result["world_size"] == 4


def test_the_prediction_is_for_the_model_that_was_named():
    """16 layers make 32 all-reduces; 5 tokens of 2048 elements of 2 bytes are 20480 bytes."""
    verify = found()["prediction"]["steps"][1]
    assert (verify["allreduces"], verify["bytes"]) == (32, 20480)
