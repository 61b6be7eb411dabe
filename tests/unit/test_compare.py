"""Comparison of runs; every expectation is worked out by hand."""

import json
import math
import random
from pathlib import Path

import pytest

from servelab import bundle
from servelab.bundle import Bundle
from servelab.compare import answer, pairs, verify, words
from servelab.compare.pairs import Arms


def arm(mode, rates, *, run=None, workload=None, invalid=(), tpot=None, started=None):
    levels = [
        {
            "concurrency": c,
            "valid": c not in invalid,
            "invalid_reasons": ["2 of 40 requests failed"] if c in invalid else [],
            "output_tok_s": rate,
            "accept_length": 2.5 if mode == "eagle3" else None,
            "tpot_ms": {"mean": tpot[c] if tpot else None},
        }
        for c, rate in rates.items()
    ]
    return Bundle(
        path=Path(f"{started or '20261129T100000Z'}-{mode}"),
        run={
            "mode": mode,
            "status": "ok",
            "simulated": None,
            "started": started,
            "correctness": {"status": "verified"},
            **(run or {}),
        },
        summary={"levels": levels, "workload": {"output_tokens": 128, "seed": 1, **(workload or {})}},
        provenance={},
    )


def one(base, other, **options):
    return answer.compare(Arms(base.mode, other.mode, [(base, other)]), **options)


def repeated(rates, modes=("baseline", "eagle3")):
    """rates: per repetition (base's, other's); ABBA order, one seed per repetition."""
    found = []
    for i, (left, right) in enumerate(rates):
        times = (f"T{i}1", f"T{i}2") if i % 2 == 0 else (f"T{i}2", f"T{i}1")
        seed = {"seed": i + 1}
        found.append(
            (
                arm(modes[0], left, workload=seed, started=times[0]),
                arm(modes[1], right, workload=seed, started=times[1]),
            )
        )
    return answer.compare(Arms(*modes, found))


@pytest.mark.parametrize(
    ("sides", "outcome"),
    [
        ([1, 1, 1], "everywhere"),
        ([1, 1, 0], "everywhere"),
        ([-1, -1, -1], "nowhere"),
        ([1, 0, -1], "below"),
        ([-1, 0, 1], "above"),
        ([1, -1, 1], "several"),
        ([0, 0, 0], "no difference"),
        ([], "nothing valid"),
    ],
)
def test_outcome(sides, outcome):
    assert answer.outcome_of(sides) == outcome


def test_verdict_below_of_single_runs_has_a_bracket_and_no_interval():
    result = one(arm("baseline", {1: 50, 40: 1000, 100: 2000}), arm("eagle3", {1: 80, 40: 1100, 100: 1500}))
    # ln 1.1 = 0.0953 at ln 40 = 3.6889; ln 0.75 = −0.2877 at ln 100 = 4.6052;
    # root 3.6889 + 0.0953 / 0.3830 · 0.9163 = 3.9169 = ln 50.25.
    assert result.crossing.estimate == pytest.approx(50.25, abs=0.05)
    assert words.verdict(result) == (
        "In one run of each, eagle3 pays up to C ≈ 50 (between the measured levels 40 and 100); beyond, "
        "baseline is faster."
    )
    assert "One run per mode: the noise between two starts is unknown, so no interval is given." in words.text(result)


def test_a_crossing_through_a_level_without_a_difference():
    # +0.1 at C=10, a tie at 40, −0.1 at C=160: the root is the tie.
    result = one(arm("baseline", {10: 100, 40: 100, 160: 100}), arm("eagle3", {10: 110.517, 40: 100, 160: 90.4837}))
    assert result.crossing.estimate == pytest.approx(40, rel=1e-4)


def test_verdict_nowhere_names_span_and_ratios():
    result = one(arm("baseline", {1: 89.5, 250: 900}), arm("eagle3", {1: 54.1, 250: 340}))
    assert words.verdict(result) == (
        "In one run of each, eagle3 pays nowhere from C=1 to C=250: 0.38–0.60 times baseline's tokens per second."
    )


def test_repetitions_give_intervals_and_a_bounded_crossover():
    noise = (0.0, 0.01, -0.01)
    result = repeated(
        [
            ({1: 50, 10: 400, 100: 2000}, {1: 80 * math.exp(a), 10: 480 * math.exp(a), 100: 1500 * math.exp(a)})
            for a in noise
        ]
    )
    # Level 1: ln 1.6, sd 0.01: half width 4.3027 · 0.01 / √3 = 0.024842 → 1.6 · e^∓0.024842 = 1.5607 … 1.6402.
    assert words.interval(result.rows[0].ratio) == "1.600 [1.561, 1.640]"
    assert [row.side for row in result.rows] == [1, 1, -1]
    # ln 1.2 = 0.18232 at ln 10, ln 0.75 = −0.28768 at ln 100:
    # root 2.302585 + 0.18232 / 0.47 · 2.302585 = 3.19579 = ln 24.43.
    assert result.crossing.estimate == pytest.approx(24.43, abs=0.01)
    assert result.crossing.low < 24.43 < result.crossing.high
    assert "eagle3 pays up to C = 24.4 [" in words.verdict(result)
    assert result.refused == []


def test_what_noise_hides_is_said_as_such():
    result = repeated([({1: 100, 10: 100}, {1: 100 + d, 10: 150 + d}) for d in (-9, 8, 1)])
    assert [row.side for row in result.rows] == [0, 1]
    assert "no difference shown" in words.table(result)
    assert words.verdict(result).endswith("; no difference was shown at C=1.")
    assert any(
        note.startswith("To show a difference of 2% where none was shown takes about")
        for note in words.qualifications(result)
    )


def test_equality_that_was_shown_is_said_as_such():
    result = repeated([({1: 100}, {1: 100 + d}) for d in (-0.1, 0.1, 0.0, 0.05)])
    assert words.verdict(result) == "eagle3 and baseline differ by no more than 2% from C=1 to C=1."


def test_many_levels_must_be_surer_than_one():
    # p is 0.02 at one level of two tested; the other says nothing: Holm doubles it to 0.04, still a win …
    d = [0.05, 0.06, 0.04, 0.08, 0.03]  # mean 0.052, sd 0.01924, t = 6.04, p = 0.0038
    few = repeated([({1: 100}, {1: 100 * math.exp(x)}) for x in d])
    assert few.rows[0].ratio.p == pytest.approx(0.0038, abs=1e-4)
    assert few.rows[0].side == 1
    # … and among 14 levels of which 13 are the same noise around 1 it is 14 · 0.0038 = 0.053: no longer.
    levels = range(2, 15)
    noise = [0.05, -0.05, 0.04, -0.04, 0.0]
    many = repeated(
        [
            ({1: 100, **dict.fromkeys(levels, 100)}, {1: 100 * math.exp(x), **dict.fromkeys(levels, 100 * math.exp(y))})
            for x, y in zip(d, noise, strict=True)
        ]
    )
    assert many.rows[0].side == 0


def test_an_invalid_level_is_shown_and_not_used():
    result = one(arm("baseline", {1: 50, 10: 400}), arm("eagle3", {1: 60, 10: 900}, invalid={10}))
    assert result.rows[0].ratio.value == pytest.approx(1.2)
    assert result.rows[1].ratio is None
    assert "| 10 | 400.0 | — | — | — | eagle3: 2 of 40 requests failed |" in words.table(result)
    assert result.outcome == "everywhere"


def test_a_level_of_one_arm_only_is_said():
    result = one(arm("baseline", {1: 50, 10: 400}), arm("eagle3", {1: 60}))
    assert result.rows[1].note == "eagle3 was not measured"


def test_a_level_added_later_is_no_omission():
    result = repeated([({1: 50}, {1: 60}), ({1: 50, 7: 300}, {1: 60, 7: 330})])
    assert (result.rows[1].ratio.n, result.rows[1].note) == (1, "")


def test_no_headline_when_the_workload_differs_unless_forced_and_then_with_the_reason():
    base, other = arm("baseline", {1: 50}), arm("eagle3", {1: 80}, workload={"output_tokens": 219})
    result = one(base, other)
    assert result.refused == ["the output length differs: 128 in baseline, 219 in eagle3."]
    assert "pays" not in words.text(result).replace("It pays", "")
    forced = words.text(one(base, other, forced=True))
    assert "**NOT COMPARABLE, printed by force: In one run of each, eagle3 pays" in forced
    assert "- the output length differs: 128 in baseline, 219 in eagle3." in forced


def test_simulated_is_in_table_and_qualifications():
    lab = {"simulated": {"profile": "story", "time_scale": 5}}
    said = words.text(one(arm("baseline", {1: 50}, run=lab), arm("eagle3", {1: 80}, run=lab)))
    assert "baseline tok/s (simulated)" in said
    assert (
        "- simulated: these figures come from the lab's cost model (profile story, time scale 5), not from GPUs."
        in said
    )


def test_what_the_machine_could_not_do_is_among_the_qualifications():
    here = {"skipped": {"pve_container": "there is no node here"}}
    said = words.text(one(arm("baseline", {1: 50}, run=here), arm("eagle3", {1: 80}, run=here)))
    assert "- Skipped on the machine that was measured: pve_container (there is no node here)." in said


def test_repetitions_that_share_a_start_are_counted():
    result = repeated([({1: 50}, {1: 80}), ({1: 51}, {1: 82})])
    assert "2 repetitions, each one fresh start of both modes." in words.text(result)
    result.pairs[1][1].provenance["start"] = {"id": "abc", "went_on": True}
    assert (
        "2 repetitions. In 1 of the 4 runs the server of the run before went on (keep_server), so two repetitions "
        "share a start, and the brackets see only a part of the noise between starts."
    ) in words.text(result)


def test_why_speculation_lost_names_what_it_would_need():
    # One step of eagle3 is 18 ms TPOT · 2.5 tokens = 45 ms, one of baseline 12 ms:
    # 2.5 tokens may take 30 ms, 45 ms must yield 3.75.
    result = one(arm("baseline", {1: 80}, tpot={1: 12}), arm("eagle3", {1: 54}, tpot={1: 18}))
    assert words.why(result) == [
        "C=1: a step of eagle3 takes 45.0 ms and yields 2.50 tokens, one of baseline takes 12.0 ms for one. "
        "It does not pay: at this accept length it may take 30.0 ms, or at this step time it must yield 3.75 tokens."
    ]


def speculating(tpot, draft_tokens):
    base = arm("baseline", {1: 80, 10: 400, 100: 1000}, tpot={1: 10, 10: 20, 100: 80})
    other = arm("eagle3", {1: 54, 10: 300, 100: 800}, tpot=tpot)
    other.provenance["mode"] = {"args": {"speculative_num_draft_tokens": draft_tokens}}
    return one(base, other)


def test_the_verify_is_read_off_the_plain_mode_and_the_rest_is_the_draft():
    # A step of eagle3 at C=1 is 8 ms · 2.5 tokens = 20 ms. Three tokens a pass lie at log 3 = 0.4771 of the way from
    # 1 to 10 in the logarithm: 10 · 2^0.4771 = 13.92 ms, which is 70 % of it. At C=100 the plain mode was not measured
    # under 300 requests.
    small, large = words.why(speculating({1: 8, 10: 20, 100: 60}, 3))
    assert small.endswith(
        " A pass over 3 tokens takes baseline about 13.9 ms: so much is the verify (70%), "
        "and 6.1 ms are the draft and what surrounds it."
    )
    assert "A pass over" not in large


def test_between_two_measured_levels_a_step_grows_straight_in_the_logarithm():
    points = [(1, 10.0), (10, 20.0), (100, 80.0)]
    # 30 lies at log 3 = 0.4771 of the way from 10 to 100: 20 · 4^0.4771 = 38.75.
    assert verify.between(points, 30) == pytest.approx(38.75, abs=0.01)
    assert [verify.between(points, x) for x in (1, 10, 100, 101)] == [10.0, 20.0, pytest.approx(80.0), None]


def test_no_share_is_told_where_nothing_is_left_or_one_token_is_checked():
    # A step of 12.5 ms is shorter than the 13.92 of three tokens; and a mode that says no number checks one.
    for result in (speculating({1: 5, 10: 20, 100: 60}, 3), speculating({1: 8, 10: 20, 100: 60}, None)):
        assert "A pass over" not in words.why(result)[0]


def test_crossover_at_equal_speed_per_user():
    # Base: 50 tok/s per user with 10 users (500), 20 with 100 (2000). Other: at 50 per user 800, at 20 per user 1250.
    # ln ratio at 50: ln 1.6 = 0.4700; at 20: ln 0.625 = −0.4700: passes 0 at √(50 · 20) = 31.62 tok/s per user.
    base = arm("baseline", {10: 500, 100: 2000}, tpot={10: 20, 100: 50})
    other = arm("eagle3", {16: 800, 62: 1250}, tpot={16: 20, 62: 50})
    found = answer.per_user_crossing([(base, other)])
    assert found.estimate == pytest.approx(31.62, abs=0.01)


def test_pairs_share_their_prompts_first():
    base = [arm("baseline", {1: 1}, workload={"seed": s}, started=f"T{s}") for s in (1, 2, 3)]
    other = [arm("eagle3", {1: 1}, workload={"seed": s}, started=f"U{s}") for s in (3, 1)]
    found = pairs.pair(base, other)
    assert [(a.path.name[:2], b.path.name[:2]) for a, b in found] == [("T1", "U1"), ("T3", "U3")]


def test_two_runs_of_one_mode_are_an_a_a_test():
    (found,) = pairs.of_bundles([arm("baseline", {1: 50}), arm("baseline", {1: 51})])
    assert (found.base, found.other, len(found.pairs)) == ("baseline", "baseline (again)", 1)


def test_campaign_without_a_baseline_is_refused(tmp_path):
    with pytest.raises(bundle.BundleError, match="holds measured runs of no mode; a comparison needs baseline"):
        pairs.of_campaign(tmp_path)


def keep(campaign, run_id, mode, rate, status="ok", seed=1):
    path = campaign / run_id
    path.mkdir(parents=True)
    level = {"concurrency": 1, "valid": True, "invalid_reasons": [], "output_tok_s": rate}
    run = {"schema": "servelab.run/1", "run_id": run_id, "mode": mode, "status": status, "reason": None}
    (path / "run.json").write_text(json.dumps(run))
    (path / "summary.json").write_text(json.dumps({"levels": [level], "workload": {"seed": seed}}))


def test_runs_made_by_hand_are_no_repetitions(tmp_path):
    for i, mode in enumerate(("baseline", "eagle3", "baseline", "eagle3")):
        keep(tmp_path, f"2026112{i}T101500Z-{mode}", mode, 100 + i)
    (found,) = pairs.of_campaign(tmp_path)
    assert [(a.path.name[:8], b.path.name[:8]) for a, b in found.pairs] == [("20261122", "20261123")]
    assert found.left_out[0].startswith("2 older runs of these modes not used")


def test_the_campaigns_plan_says_which_runs_are_repetitions(tmp_path):
    plan = []
    order = ("baseline", "eagle3", "eagle3", "baseline", "baseline", "eagle3")
    for i, mode in enumerate(order):
        run_id = f"2026112{i}T101500Z-{mode}"
        keep(tmp_path, run_id, mode, 100 + i, status="failed" if i == 5 else "ok")
        plan.append({"arm": mode, "mode": mode, "repetition": i // 2, "run_id": run_id})
    (tmp_path / pairs.PLAN).write_text(json.dumps({"runs": plan}))
    (found,) = pairs.of_campaign(tmp_path)
    assert [(a.path.name[:8], b.path.name[:8]) for a, b in found.pairs] == [
        ("20261120", "20261121"),
        ("20261123", "20261122"),
    ]
    assert found.left_out == ["Repetition 3 was measured for baseline only and is not used."]


def story(curve, campaigns=60, noise=0.007, seed=3):
    """Outcomes of simulated campaigns of five repetitions, start and level noise alike."""
    rng = random.Random(seed)
    levels = (1, 2, 5, 10, 30, 70, 100, 250)
    told = []
    for _ in range(campaigns):
        rates = []
        for _ in range(5):
            start = rng.gauss(0, noise)
            other = {c: 100 * math.exp(curve(c) + start + rng.gauss(0, noise)) for c in levels}
            rates.append((dict.fromkeys(levels, 100.0), other))
        told.append(repeated(rates))
    return told


@pytest.mark.parametrize(
    ("outcome", "curve"),
    [
        ("everywhere", lambda c: 0.4 - 0.05 * math.log(c)),
        ("nowhere", lambda c: -0.3 - 0.1 * math.log(c)),
        ("above", lambda c: 0.1 * (math.log(c) - math.log(41.9))),
        # Wins at 1 and 2, loses from 5 to 70, wins at 100 and 250.
        ("several", lambda c: 0.2 * math.cos(math.pi * math.log(c) / math.log(17.5))),
    ],
)
def test_every_campaign_tells_the_true_story(outcome, curve):
    told = story(curve)
    assert {comparison.outcome for comparison in told} == {outcome}
    assert all((comparison.crossing is None) == (outcome != "above") for comparison in told)


def test_equal_modes_are_hardly_ever_told_apart():
    # Not even one of eight levels, in at least 19 of 20 campaigns: that is what Holm is for.
    told = story(lambda c: 0.0, noise=0.05)
    assert sum(comparison.outcome != "no difference" for comparison in told) <= 3
