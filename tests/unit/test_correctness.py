"""The gate before a measurement: answers held against the baseline's, and what its own restarts allow to differ."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import pytest
from sim_process import ROOT, Sim

from servelab.cli import main
from servelab.shared.correctness import Answer, difference, excuse_of, judge, read_answer, tolerance

SURE, OTHER = math.log(0.8), math.log(0.1)


def answer(*ids: int, chance: float = SURE, rivals: dict[int, tuple[int, float]] | None = None) -> Answer:
    """An answer that gives each of its tokens `chance` and token 99 a tenth; `rivals`: place → another token there."""
    top: list[dict[int, float]] = [{token: chance, 99: OTHER} for token in ids]
    for place, (token, its) in (rivals or {}).items():
        top[place] = {ids[place]: chance, token: its}
    return Answer(ids, (chance,) * len(ids), tuple(top), "text")


RIGHT = [answer(1, 2, 3, 4), answer(5, 6, 7, 8), answer(9, 10, 11, 12), answer(13, 14, 15, 16)]
START = [RIGHT, RIGHT]


def test_the_same_answers_do_not_differ() -> None:
    seen = difference(RIGHT, RIGHT, 0.4)
    assert (seen.match, seen.kl, seen.shift, seen.unexplained) == (1.0, 0.0, 0.0, 0)


def test_chances_are_compared_up_to_and_with_the_first_token_that_differs() -> None:
    # Two tokens are the same; at the third the reference gave 0.8 to 3, and the other gives 0.8 to 77 and 0.1 to 3.
    left = [answer(1, 2, 3, 4)]
    right = [Answer((1, 2, 77, 4), (SURE,) * 4, ({1: SURE, 99: OTHER}, {2: SURE, 99: OTHER}, {77: SURE, 3: OTHER}, {}))]
    seen = difference(left, right, excuse_of(0.0))
    assert (seen.match, seen.unexplained) == (0.5, 1)
    # 0.8 ln(0.8 / 0.1) + 0.1 ln(0.1 / 0.1) + 0.1 ln(0.1 / 0.9), over three places.
    assert seen.kl == pytest.approx((0.8 * math.log(8) + 0.1 * math.log(1 / 9)) / 3)


def test_parting_at_a_near_tie_is_explained() -> None:
    tie = [answer(1, 2, 3, 4, chance=math.log(0.46), rivals={2: (77, math.log(0.44))})]
    other = [answer(1, 2, 77, 5, chance=math.log(0.46), rivals={2: (3, math.log(0.45))})]
    seen = difference(tie, other, excuse_of(0.0))
    assert (seen.match, seen.unexplained) == (0.5, 0)
    assert difference(tie, [answer(1, 2, 88, 5)], excuse_of(0.0)).unexplained == 1


def test_the_tolerance_is_what_restarts_of_the_baseline_differ_by() -> None:
    assert tolerance([START]) is None
    exact = tolerance([START, START])
    assert exact is not None
    # Restarts that agree to the last bit still allow three times half the square of a bf16 step (16 / 256 = 0.0625).
    assert exact.kl == pytest.approx(3 * 0.0625**2 / 2)
    # Two starts of two passes: four pairs between them and one in each.
    assert (exact.pairs, exact.starts, exact.match, exact.unexplained) == (6, 2, 1.0, 0)
    noisy = [answer(*each.ids, chance=math.log(0.7)) for each in RIGHT]
    # 0.8 ln(0.8 / 0.7) + 0.1 ln(0.1 / 0.2), the rest being 0.1 and 0.2: the first start is the reference.
    wider = tolerance([START, [noisy, noisy]])
    assert wider is not None
    assert wider.kl == pytest.approx(3 * (0.8 * math.log(8 / 7) + 0.1 * math.log(1 / 2)))
    assert wider.shift == pytest.approx(math.log(8 / 7))


def test_what_restarts_do_too_is_verified() -> None:
    verdict = judge(START, [START, START])
    assert verdict.status == "verified"
    assert (
        verdict.reason == "100% of the tokens as the baseline's, KL 0 nats; 2 starts of the baseline allow KL 0.0059."
    )
    assert verdict.figures["tolerance"]["kl"] == 0.005859


def test_other_chances_than_restarts_have_are_wrong_though_the_tokens_agree() -> None:
    drifted = [answer(*each.ids, chance=math.log(0.5)) for each in RIGHT]
    verdict = judge([drifted, drifted], [START, START])
    assert (verdict.status, verdict.figures["match"]) == ("wrong", 1.0)
    assert verdict.reason.startswith("Wrong output: 100% of the tokens as the baseline's, KL 0.")


def test_one_answer_that_parts_without_a_tie_is_wrong() -> None:
    parted = [*RIGHT[:3], Answer((13, 14, 15, 77), (SURE,) * 4, RIGHT[3].top)]
    verdict = judge([parted, parted], [START, START])
    assert (verdict.status, verdict.figures["unexplained"]) == ("wrong", 1)


def test_without_a_record_or_a_second_start_nothing_is_verified() -> None:
    assert judge(START, []).status == "unverified"
    assert "No start is recorded of the baseline" in judge(START, []).reason
    assert "This is the first recorded start" in judge(START, [], baseline=True).reason
    once = judge(START, [START])
    assert once.status == "unverified"
    assert "it takes two to know what may differ" in once.reason


def test_another_start_of_the_baseline_widens_what_may_differ_unless_it_is_another_model() -> None:
    drifted = [answer(*each.ids, chance=math.log(0.5)) for each in RIGHT]
    assert judge([drifted, drifted], [START, START], baseline=True).status == "verified"
    stranger = [answer(*(token + 100 for token in each.ids)) for each in RIGHT]
    verdict = judge([stranger, stranger], [START], baseline=True)
    assert (verdict.status, verdict.reason) == (
        "wrong",
        # 0.8 ln(0.8 / 0.1) + 0.1 ln(0.1 / 0.9) at the first place, the only one that can be compared.
        "Wrong output: 0% of the tokens as the baseline's, KL 1.4 nats; that is another model's answer.",
    )


@pytest.mark.parametrize(
    ("answers", "words"),
    [
        ([answer(0, 0, 0, 0)] * 4, "every answer is one token repeated"),
        ([answer(1, 2, 3, 4, chance=-9.0)] * 4, "mean log-probability is -9.0: the model is sure of nothing"),
        ([answer(1, 2, 3, 4, chance=math.nan)] * 4, "some log-probabilities are not numbers"),
    ],
)
def test_garbage_is_seen_without_a_record(answers: list[Answer], words: str) -> None:
    verdict = judge([answers, answers], [])
    assert verdict.status == "wrong"
    assert verdict.reason.startswith("Wrong output: ")
    assert words in verdict.reason


def test_a_server_that_says_something_else_when_asked_again_is_wrong() -> None:
    other = [answer(*(token + 100 for token in each.ids)) for each in RIGHT]
    verdict = judge([RIGHT, other], [])
    assert verdict.reason == "Wrong output: it does not agree with itself (0% of the tokens the same when asked again)."


def test_without_log_probabilities_the_tokens_are_compared() -> None:
    bare = [Answer(each.ids) for each in RIGHT]
    verdict = judge([bare, bare], [START, START])
    assert (verdict.status, verdict.figures["kl"]) == ("verified", None)
    parted = [*bare[:3], Answer((13, 14, 15, 77))]
    assert judge([parted, parted], [START, START]).status == "wrong"


def test_the_real_servers_answer_is_read() -> None:
    # As 0.5.15 answers; the log-probabilities are a model's that knows what comes.
    body: dict[str, Any] = {
        "text": " w14527 w567",
        "output_ids": [14527, 567],
        "meta_info": {
            "completion_tokens": 2,
            "output_token_logprobs": [[-0.0375, 14527, None], [-0.0254, 567, None]],
            "output_top_logprobs": [[[-0.0375, 14527, None], [-8.5, 3, None]], [[-0.0254, 567, None], [-9.1, 4, None]]],
        },
    }
    read = read_answer(body, 2)
    assert (read.ids, read.logprobs) == ((14527, 567), (-0.0375, -0.0254))
    assert read.top == ({14527: -0.0375, 3: -8.5}, {567: -0.0254, 4: -9.1})
    # A way to speculate that gives alternatives for some tokens only is compared by tokens alone.
    body["meta_info"]["output_top_logprobs"][0] = None
    assert (read_answer(body, 2).ids, read_answer(body, 2).top) == ((14527, 567), ())
    with pytest.raises(ValueError, match="2 tokens where 3 were asked for"):
        read_answer(body, 3)
    with pytest.raises(ValueError, match="no answer of /generate"):
        read_answer({"error": {"message": "boom"}}, 2)


# -- the module against the simulated server ----------------------------------------------------------------------


@pytest.fixture(scope="module")
def sims(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Sim]]:
    with (
        Sim(tmp_path_factory.mktemp("right"), time_scale=500) as right,
        Sim(tmp_path_factory.mktemp("garbage"), faults=["garbage_output"], time_scale=500) as garbage,
    ):
        right.wait_ready()
        garbage.wait_ready()
        yield {"right": right, "garbage": garbage}


def probe(sim: Sim, records: Path, **options: Any) -> dict[str, Any]:
    """The module's answer, run as Ansible runs it."""
    arguments = json.dumps({"port": sim.port, "record_dir": str(records), "stack": "/nowhere", **options})
    command = ["ansible", "localhost", "-c", "local", "-e", f"ansible_python_interpreter={sys.executable}", "-o"]
    environment = {
        **os.environ,
        "ANSIBLE_LOAD_CALLBACK_PLUGINS": "1",
        "ANSIBLE_STDOUT_CALLBACK": "ansible.builtin.minimal",
    }
    done = subprocess.run(
        [*command, "-m", "servelab.sglang.correctness_probe", "-a", arguments],
        capture_output=True, text=True, cwd=ROOT, env=environment, timeout=120, check=False,
    )  # fmt: skip
    answer: dict[str, Any] = json.loads(done.stdout[done.stdout.index("{") :])
    return answer


def test_two_starts_of_the_baseline_verify_a_third_server_and_garbage_is_caught(
    sims: dict[str, Sim], tmp_path: Path
) -> None:
    right, garbage = sims["right"], sims["garbage"]
    nothing = probe(right, tmp_path)
    assert (nothing["status"], nothing["changed"], list(tmp_path.iterdir())) == ("unverified", False, [])
    first = probe(right, tmp_path, record=True, start="one")
    assert (first["status"], first["changed"]) == ("unverified", True)
    again = probe(right, tmp_path, record=True, start="one")
    assert "This is the first recorded start" in again["reason"], "the same start is no second one"
    second = probe(right, tmp_path, record=True, start="two")
    assert second["status"] == "verified"
    verified = probe(right, tmp_path)
    assert (verified["status"], verified["changed"]) == ("verified", False)
    assert (verified["figures"]["match"], verified["figures"]["kl"]) == (1.0, 0.0)
    record = json.loads(Path(verified["record"]).read_text())
    assert [start["start"] for start in record["starts"]] == ["one", "two"]

    caught = probe(garbage, tmp_path)
    assert caught["status"] == "wrong"
    assert caught["reason"] == "Wrong output: every answer is one token repeated ('!!!!!!!!!!!!')."
    poisoned = probe(garbage, tmp_path, record=True, start="three")
    assert (poisoned["status"], poisoned["changed"]) == ("wrong", False)
    assert len(json.loads(Path(verified["record"]).read_text())["starts"]) == 2


def test_a_known_answer_that_comes_out_wrong_is_wrong_and_a_right_one_proves_only_itself(
    sims: dict[str, Sim], tmp_path: Path
) -> None:
    # What the simulated model says after these tokens (docs/simulator.md): their hash is where its chain begins.
    first = crc32(b"w17 w23") % 32768
    second = (20021 * first + 12345) % 32768
    known = {"input_ids": [17, 23], "output_ids": [first, second]}
    right = probe(sims["right"], tmp_path, known_answers=[known])
    assert (right["status"], right["figures"]) == ("unverified", {"known_answers_right": 1})
    off = {"input_ids": [17, 23], "output_ids": [first, second + 1]}
    wrong = probe(sims["right"], tmp_path, known_answers=[known, off])
    assert wrong["status"] == "wrong"
    assert (
        wrong["reason"]
        == f"Wrong output: known answer 2 of 2 is wrong from token 1 on ({second} instead of {second + 1})."
    )


def test_by_hand_it_is_a_command(sims: dict[str, Sim], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["correctness", f"--url=http://127.0.0.1:{sims['right'].port}", f"--records={tmp_path}"]
    assert main([*words, "--record", "--start=one"]) == 3
    assert main([*words, "--record", "--start=two"]) == 0
    capsys.readouterr()
    assert main(words) == 0
    assert json.loads(capsys.readouterr().out)["figures"]["match"] == 1.0
    assert main([words[0], f"--url=http://127.0.0.1:{sims['garbage'].port}", words[2]]) == 1
    assert main([words[0], "--url=http://127.0.0.1:1", words[2], "--timeout=1"]) == 1
