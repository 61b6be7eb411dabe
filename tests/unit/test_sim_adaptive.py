"""Adaptive speculation: which step count a batch gets, by the rules of SGLang's documentation and sources."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from servelab_lab.server.adaptive import Adaptive, unsupported
from servelab_lab.server.dialect import Dialect
from servelab_lab.server.serverargs import ServerArgs

NOW = Dialect.of("0.5.23")
# What SGLang captures under speculation, up to 64.
CAPTURED = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4)]


def adaptive(tmp_path: Path, document: dict[str, Any], initial: int = 3, dialect: Dialect = NOW) -> Adaptive:
    path = tmp_path / "adaptive.json"
    path.write_text(json.dumps(document))
    return Adaptive(initial, str(path), dialect, CAPTURED)


CAPTURE = {"1": {"candidate_steps": [1, 3]}, "8": {"candidate_steps": [0, 1]}, "32": {"candidate_steps": [0]}}


def test_batches_are_padded_and_take_the_largest_key_not_above(tmp_path: Path) -> None:
    chooser = adaptive(tmp_path, CAPTURE)
    # Of two candidates the later is the start where the flag's value is none of them: 8 -> 1.
    assert [chooser.steps(batch) for batch in (1, 4, 7, 8, 16, 31, 32, 64, 100)] == [3, 3, 3, 1, 1, 0, 0, 0, 0]


def test_the_greeting_is_the_captured_servers(tmp_path: Path) -> None:
    assert adaptive(tmp_path, CAPTURE).greeting() == (
        "AdaptiveSpeculativeParams initialized: steps=3, candidate_steps=[1, 3]"
    )
    assert adaptive(tmp_path, CAPTURE).candidates == [0, 1, 3]


def test_nothing_moves_during_the_warm_up_and_then_every_fifth_batch(tmp_path: Path) -> None:
    chooser = adaptive(tmp_path, {"1": {"candidate_steps": [1, 3]}})
    for _ in range(14):
        chooser.saw(1, 0.0)
    assert chooser.steps(1) == 3
    chooser.saw(1, 0.0)
    # The average went from 2 to 2 x 0.8^15 = 0.07, below 1 - 0.5 - 0.25.
    assert chooser.steps(1) == 1


def test_accepted_drafts_make_longer_ones(tmp_path: Path) -> None:
    chooser = adaptive(tmp_path, {"1": {"candidate_steps": [1, 3, 7]}}, initial=1)
    for _ in range(15):
        chooser.saw(1, 1.0)
    # 0 towards 1: 0.96 > 1 - 0.5, not above 3 - 0.5.
    assert chooser.steps(1) == 3


def test_no_speculation_is_left_for_a_probe(tmp_path: Path) -> None:
    chooser = adaptive(tmp_path, {"1": {"candidate_steps": [0, 1]}}, initial=0)
    for _ in range(14):
        chooser.saw(1, 0.0)
    assert chooser.steps(1) == 0
    chooser.saw(1, 0.0)
    assert chooser.steps(1) == 1
    for _ in range(5):
        chooser.saw(1, 0.0)
    assert chooser.steps(1) == 0


def test_options_beside_the_sizes_hold_for_all_and_an_entrys_own_win(tmp_path: Path) -> None:
    chooser = adaptive(
        tmp_path, {"warmup_batches": 0, "update_interval": 1, "ema_alpha": 1.0, "1": {"candidate_steps": [1, 3]}}
    )
    chooser.saw(1, 0.0)
    assert chooser.steps(1) == 1


def test_the_built_in_configuration() -> None:
    assert Adaptive(3, None, NOW, CAPTURED).candidates == [0, 1, 3, 5, 7]


@pytest.mark.parametrize(
    ("document", "release", "words"),
    [
        (
            {"1": {"candidate_steps": []}},
            "0.5.23",
            r"BS 1: candidate_steps must be a list of non-negative ints",
        ),
        ({"1": {"candidate_steps": [0, 1]}}, "0.5.13", r"must be a list of positive ints, got \[0, 1\]"),
        ({"x": 1}, "0.5.23", r"must contain at least one integer-string BS key.*Got keys: \['x'\]"),
    ],
)
def test_bad_configurations_are_refused(tmp_path: Path, document: dict[str, Any], release: str, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        adaptive(tmp_path, document, dialect=Dialect.of(release))


def test_what_cannot_adapt() -> None:
    def why(**values: Any) -> str | None:
        return unsupported(ServerArgs({"speculative_algorithm": "EAGLE3", **values}, "0.5.23", ""))

    assert why() is None
    assert why(speculative_algorithm="NEXTN") == "speculative_algorithm=NEXTN (only EAGLE/EAGLE3 are supported)"
    assert why(speculative_eagle_topk=4) == "speculative_eagle_topk=4 (only topk=1 is supported)"
