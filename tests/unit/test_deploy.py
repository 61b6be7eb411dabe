"""Which mode at which load, what an adaptive mode is worth, and what of a step is all-reduce: worked out by hand."""

import json
from pathlib import Path

import pytest

from servelab.bundle import Bundle
from servelab.compare import adaptive, allreduce, answer, deploy, words
from servelab.compare.pairs import Arms
from servelab.compare.server_log import Batch, batches

LEVELS = (10, 30, 70)


def run(mode, repetition, rates, tpot=None):
    levels = [
        {
            "concurrency": c,
            "valid": rate is not None,
            "invalid_reasons": [] if rate else ["not sustained"],
            "output_tok_s": rate,
            "tpot_ms": {"mean": tpot},
        }
        for c, rate in zip(LEVELS, rates, strict=True)
    ]
    return Bundle(
        path=Path(f"r{repetition}-{mode}"),
        run={"mode": mode, "status": "ok", "simulated": None, "correctness": {"status": "verified"}},
        summary={"levels": levels, "workload": {"seed": repetition}},
        provenance={"mode": {"args": {"speculative_num_steps": 2} if mode != "baseline" else {}}},
    )


def campaign(noise=0.0, **rates):
    """Three repetitions whose rates alternate by ±noise around what is given, the middle one exact."""
    runs = {
        mode: [run(mode, i, [r and r * (1 + noise * (i - 1)) for r in given]) for i in range(3)]
        for mode, given in rates.items()
    }
    base = runs.pop("baseline")
    return answer.compare_all(
        [Arms("baseline", mode, list(zip(base, other, strict=True))) for mode, other in runs.items()]
    )


def test_the_fastest_mode_of_each_level_and_where_they_change_places():
    found = campaign(baseline=(100, 200, 300), eagle3=(150, 220, 240), ngram=(160, 180, 200))
    assert [(c.concurrency, c.mode, c.also) for c in deploy.choices(found)] == [
        (10, "ngram", []),
        (30, "eagle3", []),
        (70, "baseline", []),
    ]
    # ln 1.1 = 0.09531 at 30, ln 0.8 = −0.22314 at 70: passes 0 at 30 · (70/30)^0.29929 = 38.66.
    assert deploy.hint(found) == [
        "C=10: ngram.",
        "C=30: eagle3.",
        "C=70: baseline.",
        "ngram and eagle3 change places between C=10 and C=30.",
        f"eagle3 and baseline change places at {words.where(found[0].crossing)}.",
    ]
    # √(10 · 30) = 17.3, and 38.66.
    assert deploy.routes(found) == [
        {"from": 1, "mode": "ngram"},
        {"from": 18, "mode": "eagle3"},
        {"from": 39, "mode": "baseline"},
    ]


def test_what_cannot_be_told_apart_is_named_and_ties_go_to_the_base():
    # eagle3's ratio alternates by a tenth around 1.005; ngram is ahead at 10 by as much as eagle3, both beyond doubt.
    even = [run("baseline", i, (100, 100, 100)) for i in range(3)]
    eagle = [run("eagle3", i, (150 * (1 + 0.01 * (i - 1)), 100 * (1 + 0.1 * (i - 1)), 50)) for i in range(3)]
    ngram = [run("ngram", i, (150, 50, 50)) for i in range(3)]
    arms = [
        Arms("baseline", name, list(zip(even, other, strict=True)))
        for name, other in (("eagle3", eagle), ("ngram", ngram))
    ]
    first, second, third = deploy.choices(answer.compare_all(arms))
    assert {first.mode, *first.also} == {"eagle3", "ngram"}
    assert (second.mode, second.also) == ("baseline", ["eagle3"])
    assert (third.mode, third.also) == ("baseline", [])


def test_an_adaptive_mode_that_holds():
    found = campaign(0.001, baseline=(100, 200, 300), eagle3=(150, 220, 240), eagle3_adaptive=(149, 219, 299))
    assert deploy.judgement(found, "eagle3_adaptive", "eagle3") == [
        "eagle3_adaptive is at no level more than 2% slower than the better of baseline and eagle3: one server for "
        "every load."
    ]
    assert [j.best for j in deploy.judge(found, "eagle3_adaptive", "eagle3")] == ["eagle3", "eagle3", "baseline"]


def test_where_it_does_not_hold_and_why():
    base = [run("baseline", i, (100, 200, 300 * (1 + 0.001 * i)), tpot=20.0) for i in range(3)]
    eagle = [run("eagle3", i, (150, 220, 240), tpot=15.0) for i in range(3)]
    adapt = [run("eagle3_adaptive", i, (150, 220, 270), tpot=22.0) for i in range(3)]
    found = answer.compare_all(
        [
            Arms("baseline", "eagle3", list(zip(base, eagle, strict=True))),
            Arms("baseline", "eagle3_adaptive", list(zip(base, adapt, strict=True))),
        ]
    )
    # 270 against 300, 300.3 and 300.6.
    assert deploy.judgement(found, "eagle3_adaptive", "eagle3") == [
        "eagle3_adaptive is slower than the better of baseline and eagle3 at C=70:",
        "C=70: 0.899 times baseline. A step takes 22.0 ms for 1.00 tokens in eagle3_adaptive, 20.0 ms for 1.00 tokens "
        "in baseline.",
    ]


def test_one_run_shows_no_absence_of_a_loss():
    pair = [(run("baseline", 0, (100, 100, 100)), run("eagle3", 0, (120, 110, 90)))]
    same = [(pair[0][0], run("eagle3_adaptive", 0, (120, 110, 100)))]
    found = answer.compare_all([Arms("baseline", "eagle3", pair), Arms("baseline", "eagle3_adaptive", same)])
    assert deploy.judgement(found, "eagle3_adaptive", "eagle3") == [
        "At C=10, 30, 70 neither a loss beyond 2% nor its absence was shown: one run of each has no interval."
    ]


@pytest.mark.parametrize(
    ("batch", "sizes", "key"),
    [
        (40.0, [1, 8, 32, 40, 44, 64], 44),  # exactly the edge: batches up to 40 stay below
        (37.0, [1, 8, 32, 40, 44, 64], 44),  # ln(40/37) = 0.078, ln(37/32) = 0.145
        (34.0, [1, 8, 32, 40, 44, 64], 40),  # ln(34/32) = 0.061, ln(40/34) = 0.163
        (90.4, [1, 8, 32, 40, 44, 64], 91),  # not padded beyond the largest
        (12.3, [], 13),
        (1.2, [1, 2, 4], 2),
    ],
)
def test_the_key_is_the_captured_size_behind_the_nearest_edge(batch, sizes, key):
    assert adaptive.switch(batch, sizes) == key


LOG = """\
[2026-11-29 12:00:05 TP0] server_args=ServerArgs(…)
[2026-11-29 12:01:00 TP0] Decode batch, #running-req: 3, #token: 9, cuda graph: True, #queue-req: 0
[2026-11-29 12:01:12 TP0] Decode batch, #running-req: 28, #token: 9, cuda graph: True, #queue-req: 0
[2026-11-29 12:01:14 TP0] Decode batch, #running-req: 30, #token: 9, cuda graph: True, #queue-req: 0
[2026-11-29 12:01:16 TP0] Decode batch, #running-req: 29, #token: 9, cuda graph: False, #queue-req: 0
[2026-11-29 12:02:12 TP0] Decode batch, #running-req: 64, #token: 9, cuda graph: False, #queue-req: 6
"""
NOON = 1795953600  # 2026-11-29 12:00:00 UTC


def logged(path, zone=0):
    """A run that began at 12:00:00 UTC on a machine whose clock shows *zone* hours more."""
    path.mkdir(parents=True)
    (path / "server.log").write_text(LOG.replace("-29 12:", f"-29 {12 + zone:02d}:"))
    windows = {30: (NOON + 70, NOON + 80), 70: (NOON + 130, NOON + 140), 100: (NOON + 200, NOON + 210)}
    levels = [{"concurrency": c, "window": {"start": a, "end": b}} for c, (a, b) in windows.items()]
    return Bundle(path, {"mode": "eagle3", "started": "2026-11-29T12:00:00Z"}, {"levels": levels}, {})


@pytest.mark.parametrize("zone", [0, 2, -7])
def test_the_running_batch_is_what_the_servers_log_says_in_the_window(tmp_path, zone):
    assert batches(logged(tmp_path / "run", zone)) == {30: Batch(29, True, 3), 70: Batch(64, False, 1)}


def test_a_run_without_a_log_has_no_batches(tmp_path):
    assert batches(Bundle(tmp_path, {"started": None}, {"levels": []}, {})) == {}


def test_a_crossover_in_concurrency_becomes_a_batch(tmp_path):
    pair = (run("baseline", 0, (100, 200, 300)), run("eagle3", 0, (150, 220, 240)))
    other = pair[1]
    server = {"cuda_graph_config": {"decode": {"bs": [1, 8, 16, 24, 32, 40]}}, "speculative_num_steps": 3}
    known = logged(tmp_path / "run")
    windows = known.summary["levels"][:2]
    levels = [dict(level) for level in other.summary["levels"]]
    for level, window in zip(levels[1:], windows, strict=True):
        level["window"] = window["window"]
    spec = Bundle(known.path, {**other.run, "started": "2026-11-29T12:00:00Z"}, {"levels": levels}, {}, server)
    found = adaptive.derive(answer.compare(Arms("baseline", "eagle3", [(pair[0], spec)]), forced=True))
    # C = 38.66 lies at 0.29929 of the way from 30 to 70 in the logarithm: 29 · (64/29)^0.29929 = 36.76. Of the edges 32
    # and 40 the latter is nearer, and it is the largest captured size: from 41 on there are no drafts.
    assert (found.crossing, found.batch) == (pytest.approx(38.66, abs=0.01), pytest.approx(36.76, abs=0.01))
    assert found.document == {"1": {"candidate_steps": [3]}, "41": {"candidate_steps": [0]}}


@pytest.mark.parametrize(
    ("rates", "why"),
    [
        ((150, 250, 350), "eagle3 pays at every level that decided, so there is nothing to adapt: run eagle3."),
        ((50, 100, 150), "eagle3 pays nowhere, so there is nothing to adapt: run baseline."),
        ((100, 200, 300), "No difference between eagle3 and baseline was shown: run baseline, or repeat more often."),
    ],
)
def test_where_there_is_nothing_to_adapt(rates, why):
    (found,) = campaign(baseline=(100, 200, 300), eagle3=rates)
    with pytest.raises(adaptive.NotAdaptable, match=why):
        adaptive.derive(found)


def collectives(tmp_path, **latencies):
    """A collectives run of a model of 61 layers, 7168 wide, on one card; µs of 43008 bytes per arm and way."""
    path = tmp_path / "all" / "20261129T090000Z-collectives"
    path.mkdir(parents=True)
    env = {"nccl": {}, "nccl_ring_ll": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"}}
    arms = [
        {
            "name": name,
            "status": "ok",
            "backend": "nccl",
            "env": env[name],
            "rows": {"43008": {mode: {"median_us": us} for mode, us in ways.items()}},
        }
        for name, ways in latencies.items()
    ]
    result = {"model": {"layers": 61, "hidden": 7168, "source": "x"}, "arms": arms}
    run_ = {"schema": "servelab.run/1", "mode": "collectives", "status": "ok", "simulated": None}
    (path / "run.json").write_text(json.dumps(run_))
    (path / "provenance.json").write_text(json.dumps({"gpus": [{"uuid": "GPU-0"}]}))
    (path / "collectives.json").write_text(json.dumps(result))


def measured(tmp_path, uuid="GPU-0", **env):
    provenance = {"gpus": [{"uuid": uuid}], "mode": {"env": env, "args": {"speculative_num_draft_tokens": 3}}}
    return Bundle(
        tmp_path / "first" / "r-eagle3", {"mode": "eagle3", "status": "ok", "simulated": None}, None, provenance
    )


def test_the_share_of_the_all_reduces_follows_the_modes_own_way(tmp_path):
    collectives(tmp_path, nccl={"eager": 100.0}, nccl_ring_ll={"graph": 200.0, "eager": 240.0})
    of_mode = measured(tmp_path, NCCL_ALGO="Ring", NCCL_PROTO="LL")
    found = allreduce.find(of_mode)
    # 3 tokens of one request: 3 · 7168 · 2 = 43008 bytes; 122 of 240 µs are 29.28 ms, of 200 µs 24.4 ms.
    assert found.share(of_mode, Batch(1, False, 9), 3) == allreduce.Share(3, 29.28, 29.28, "nccl_ring_ll")
    unknown = found.share(of_mode, Batch(1, None, 9), 3)
    assert (unknown.low_ms, unknown.high_ms) == (pytest.approx(24.4), pytest.approx(29.28))
    assert found.share(of_mode, Batch(2, False, 9), 3) is None  # 86016 bytes were not measured
    assert found.share(measured(tmp_path), Batch(1, False, 9), 3).way == "nccl"


@pytest.mark.parametrize(
    ("args", "way"),
    [
        ({"tp_size": 2, "disable_custom_all_reduce": True}, "nccl_ring_ll"),
        ({"tp_size": 8}, "nccl_ring_ll"),
        ({"tp_size": 2}, None),  # seen on two H200s: the variables ask for NCCL, and it carries nothing
    ],
)
def test_between_two_cards_nccl_is_used_only_where_sglangs_own_way_is_off(tmp_path, args, way):
    collectives(tmp_path, nccl={"eager": 100.0}, nccl_ring_ll={"eager": 240.0})
    run = measured(tmp_path, NCCL_ALGO="Ring", NCCL_PROTO="LL")
    run.provenance["mode"]["args"] |= args
    share = allreduce.find(run).share(run, Batch(1, False, 9), 3)
    assert (share and share.way) == way


def test_other_cards_or_another_profile_tell_nothing(tmp_path):
    collectives(tmp_path, nccl={"eager": 100.0})
    assert allreduce.find(measured(tmp_path, uuid="GPU-1")) is None
    of_story = measured(tmp_path)
    of_story.run["simulated"] = {"profile": "story", "time_scale": 5}
    assert allreduce.find(of_story) is None
    assert allreduce.find(measured(tmp_path)) is not None


def test_the_reason_names_the_share(tmp_path):
    collectives(tmp_path, nccl={"eager": 240.0})
    other = measured(tmp_path)
    log = tmp_path / "first" / "r-eagle3" / "server.log"
    log.parent.mkdir(parents=True)
    log.write_text(LOG.replace("#running-req: 28", "#running-req: 1").replace("cuda graph: True", "cuda graph: False"))
    level = {
        "concurrency": 1,
        "valid": True,
        "invalid_reasons": [],
        "output_tok_s": 54.0,
        "tpot_ms": {"mean": 18.0},
        "accept_length": 2.5,
        "window": {"start": NOON + 70, "end": NOON + 73},
    }
    eagle = Bundle(other.path, {**other.run, "started": "2026-11-29T12:00:00Z"}, {"levels": [level]}, other.provenance)
    base = Bundle(
        tmp_path / "first" / "r-baseline",
        {"mode": "baseline", "status": "ok", "simulated": None},
        {"levels": [{**level, "output_tok_s": 80.0, "tpot_ms": {"mean": 12.0}, "accept_length": None}]},
        {},
    )
    (said,) = words.why(answer.compare(Arms("baseline", "eagle3", [(base, eagle)])))
    assert said.startswith("C=1: a step of eagle3 takes 45.0 ms and yields 2.50 tokens")
    assert said.endswith("Of which all-reduce, by 20261129T090000Z-collectives: 29.3 ms (3 tokens, nccl) in eagle3.")


def test_a_lead_that_was_not_shown_is_no_reason_to_forget_the_mode():
    # Two repetitions, ratios 1.2 and 1.4: far above 1, and with one degree of freedom nothing is shown.
    base = [run("baseline", i, (100, 100, 100)) for i in range(2)]
    eagle = [run("eagle3", i, (120 + 20 * i, 50, 50)) for i in range(2)]
    found = answer.compare_all([Arms("baseline", "eagle3", list(zip(base, eagle, strict=True)))])
    first = deploy.choices(found)[0]
    assert (first.mode, first.also) == ("baseline", ["eagle3"])


@pytest.mark.parametrize(
    ("said", "chunk", "tokens"),
    [
        (2.54, 2.5, 2.54),
        (None, 2.5, 2.5),
        (None, 1.0, None),
        (64.0, 1.0, None),  # an adaptive server that verified once in 64 steps
        (9.0, 1.4, 1.4),  # or in some of them
        (2.5, None, 2.5),
    ],
)
def test_tokens_of_a_step_where_not_every_step_verifies(said, chunk, tokens):
    assert answer.accepted({"accept_length": said, "tokens_per_chunk": chunk}) == tokens


def test_no_change_of_places_where_the_modes_were_not_told_apart():
    base = [run("baseline", i, (100, 100, 100)) for i in range(2)]
    # At 10 far ahead and not shown to be; at 30 ahead and shown to be.
    eagle = [run("eagle3", i, (120 + 20 * i, 150 + 0.001 * i, 150)) for i in range(2)]
    said = deploy.hint(answer.compare_all([Arms("baseline", "eagle3", list(zip(base, eagle, strict=True)))]))
    assert said == ["C=10: baseline (not told apart: eagle3 at C=10).", "C=30 to 70: eagle3."]
