"""What refuses a headline. Case 17 is one of the collection's small inputs with the right answer beside it."""

import copy
import json
from pathlib import Path

import pytest

from servelab.bundle import Bundle
from servelab.compare import answer, guard, words
from servelab.compare.pairs import Arms

CASE = Path(__file__).with_name("cases") / "17-not-comparable"

MODE = {
    "args": {"tp_size": 8, "mem_fraction_static": 0.85},
    "env": {"NCCL_ALGO": "Ring"},
    "patches": [],
    "treatment": [],
}
EAGLE = {
    "args": {**MODE["args"], "speculative_algorithm": "EAGLE3", "speculative_num_steps": 2},
    "env": MODE["env"],
    "patches": [],
    "treatment": ["speculative_*", "kv_pool"],
}


def made(mode, *, started="2026-11-29T10:00:00Z", merged=None):
    """A bundle with everything that the guard looks at, as a run leaves it."""
    return Bundle(
        path=Path(f"x-{mode}"),
        run={
            "mode": mode,
            "status": "ok",
            "started": started,
            "simulated": None,
            "correctness": {"status": "verified"},
        },
        summary={
            "client": {"version": "0.1.0"},
            "server": {"sglang_version": "0.5.23", "model": "m"},
            "workload": {
                "api": "completions",
                "input_tokens": 512,
                "output_tokens": 128,
                "ignore_eos": True,
                "seed": 1,
                "warmup_requests": 4,
            },
            "levels": [
                {
                    "concurrency": 10,
                    "valid": True,
                    "invalid_reasons": [],
                    "output_tok_s": 100.0,
                    "requests": {"in_window": 40},
                    "prompt_tokens_mean": 500,
                    "cached_tokens_mean": 0,
                }
            ],
        },
        provenance={
            "node": {"boot_id": "b1"},
            "guest": {"kernel": "6.8", "packages": {"torch": "2.11.0"}},
            "client": {"wheel_sha256": "w"},
            "gpus": [{"uuid": f"GPU-{i}", "driver_version": "580.95.05", "pcie_link_width": 16} for i in range(2)],
            "gpus_after": [{"uuid": f"GPU-{i}"} for i in range(2)],
            "gpu_clean": {"before": {"holders": []}, "after": {"holders": []}},
            "patch": {"shape": "B4", "manifest_sha256": None},
            "mode": copy.deepcopy(merged or (EAGLE if mode == "eagle3" else MODE)),
        },
        server_info={"mem_fraction_static": 0.85, "max_total_num_tokens": 100_000, "max_running_requests": 256},
    )


def judge(left, right):
    found = guard.findings("baseline", "eagle3", [(left, right)])
    return [f.text for f in found if f.decisive], [f.text for f in found if not f.decisive]


@pytest.fixture
def base():
    return made("baseline")


@pytest.fixture
def other():
    return made("eagle3", started="2026-11-29T10:20:00Z")


def test_only_the_treatment_differs(base, other):
    assert judge(base, other) == ([], ["eagle3 always ran second."])


def put(place, keys, value):
    def change(run):
        target = getattr(run, place)
        for key in keys[:-1]:
            target = target[key]
        target[keys[-1]] = value

    return change


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (put("summary", ["workload", "seed"], 2), "the prompt seed differs: 1 in baseline, 2 in eagle3."),
        (put("summary", ["workload", "input_tokens"], 64), "the input length differs: 512 in baseline, 64 in eagle3."),
        (put("summary", ["client", "version"], "9"), "the client differs: 0.1.0 in baseline, 9 in eagle3."),
        (
            put("summary", ["server", "sglang_version"], "0.5.9"),
            "the SGLang release differs: 0.5.23 in baseline, 0.5.9 in eagle3.",
        ),
        (put("provenance", ["client", "wheel_sha256"], "v"), "the client's build differs: w in baseline, v in eagle3."),
        (
            put("provenance", ["client", "host"], "far"),
            "the machine that made the load differs: the guest in baseline, far in eagle3.",
        ),
        (put("provenance", ["node", "boot_id"], "b2"), "the node's boot differs: b1 in baseline, b2 in eagle3."),
        (put("provenance", ["node", "boot_id"], None), "the node's boot differs: b1 in baseline, unknown in eagle3."),
        (put("provenance", ["guest", "packages"], {"torch": "2.13.0"}), "the stack differs: torch."),
        (
            put("provenance", ["patch", "manifest_sha256"], "926ff7b4f52b"),
            "the state of the all-reduce patch differs: B4, not patched in baseline, B4, patched (926ff7b4) in eagle3.",
        ),
        (
            put("provenance", ["gpus", 1, "pcie_link_width"], 8),
            "the PCIe link's width differs: 16/16 in baseline, 16/8 in eagle3.",
        ),
        (
            put("provenance", ["gpus", 1, "throttle_reasons"], ["hw_thermal_slowdown"]),
            "GPUs of eagle3 were throttled: hw_thermal_slowdown.",
        ),
        (
            put("provenance", ["gpu_clean", "before", "holders"], [{"pid": 7}]),
            "1 foreign process(es) held GPUs before a run of eagle3 (x-eagle3).",
        ),
        (put("provenance", ["gpus_after"], [{"uuid": "GPU-0"}]), "the GPUs changed during a run of eagle3 (x-eagle3)."),
        (
            put("provenance", ["mode", "env", "NCCL_ALGO"], "Tree"),
            "the variable NCCL_ALGO differs: Ring in baseline, Tree in eagle3, "
            "and no mode declares it as its treatment.",
        ),
        (
            put("provenance", ["mode", "args", "tp_size"], 4),
            "the flag tp_size differs: 8 in baseline, 4 in eagle3, and no mode declares it as its treatment.",
        ),
        (
            put("server_info", ["max_running_requests"], 48),
            "the most requests at a time differs: 256 in baseline, 48 in eagle3.",
        ),
        (
            put("server_info", ["mem_fraction_static"], 0.55),
            "the memory fraction differs: 0.85 in baseline, 0.55 in eagle3.",
        ),
        (
            put("run", ["simulated"], {"profile": "story"}),
            "the simulator differs: unknown in baseline, {'profile': 'story'} in eagle3.",
        ),
        (put("run", ["status"], "failed"), "eagle3 failed: no reason was recorded"),
    ],
)
def test_each_reason_is_named(base, other, change, reason):
    change(other)
    assert judge(base, other)[0] == [reason]


def test_a_smaller_pool_that_the_mode_declares_is_told_and_not_refused(base, other):
    other.server_info["max_total_num_tokens"] = 90_000
    refused, told = judge(base, other)
    assert refused == []
    assert told[0].startswith("the KV pool differs: 100000 tokens in baseline, 90000 in eagle3 (declared")


def test_a_smaller_pool_from_another_memory_fraction_is_refused(base, other):
    other.server_info.update(max_total_num_tokens=13_000, mem_fraction_static=0.55)
    assert judge(base, other)[0] == [
        "the KV pool differs: 100000 tokens in baseline, 13000 in eagle3 "
        "(the memory fraction differs: 0.85 in baseline, 0.55 in eagle3)."
    ]


def test_a_smaller_pool_that_nobody_declares_is_refused(base, other):
    other.server_info["max_total_num_tokens"] = 90_000
    other.provenance["mode"]["treatment"] = ["speculative_*"]
    assert judge(base, other)[0] == ["the KV pool differs: 100000 tokens in baseline, 90000 in eagle3."]


def test_repetitions_of_one_arm_must_agree_too(base, other):
    odd = made("baseline", started="2026-11-29T12:00:00Z")
    odd.provenance["node"]["boot_id"] = "b2"
    again = made("eagle3", started="2026-11-29T11:00:00Z")
    found = guard.findings("baseline", "eagle3", [(base, other), (odd, again)])
    assert [f.text for f in found if f.decisive] == ["the node's boot differs between the runs of baseline: b1, b2."]


def test_order_is_decisive_once_it_was_the_same_twice(base, other):
    later = (made("baseline", started="2026-11-29T11:00:00Z"), made("eagle3", started="2026-11-29T11:20:00Z"))
    found = guard.findings("baseline", "eagle3", [(base, other), later])
    assert [(f.text, f.decisive) for f in found] == [("eagle3 always ran second.", True)]
    swapped = (made("baseline", started="2026-11-29T11:20:00Z"), made("eagle3", started="2026-11-29T11:00:00Z"))
    assert guard.findings("baseline", "eagle3", [(base, other), swapped]) == []


def test_what_nobody_recorded_is_said(base, other):
    assert "the GPUs' highest clocks" in guard.unknown([(base, other)])
    assert "the driver" not in guard.unknown([(base, other)])


def from_case(name):
    """The case's flat record as the bundle that our own run would have left."""
    case = json.loads((CASE / f"{name}.json").read_text())
    run = made(case["label"], started=f"2026-11-29T1{case['order']}:00:00Z")
    run.summary["workload"] |= {
        "output_tokens": case["mean_output_tokens"],
        "ignore_eos": case["ignore_eos"],
        "warmup_requests": case["warmup"],
    }
    level = run.summary["levels"][0]
    level |= {
        "output_tok_s": case["tok_s"],
        "requests": {"in_window": case["requests"]},
        "prompt_tokens_mean": case["prompt_tokens"] / case["requests"],
        "cached_tokens_mean": case["cached_prompt_tokens"] / case["requests"],
    }
    run.server_info.update(mem_fraction_static=case["mem_fraction_static"], max_total_num_tokens=case["kv_tokens"])
    run.provenance["mode"]["args"]["mem_fraction_static"] = case["mem_fraction_static"]
    return run


def test_case_17_is_refused_with_its_five_reasons():
    expected = json.loads((CASE / "expected.json").read_text())
    result = answer.compare(Arms("baseline", "eagle3", [(from_case("run_a"), from_case("run_b"))]))
    assert result.refused == [
        # expected: "output length 512 vs 219 (ignore_eos differs)"
        "the output length differs: 512 in baseline, 219 in eagle3 (ignore_eos differs).",
        # expected: "warm-up 2 vs 0"
        "the number of warm-up requests differs: 2 in baseline, 0 in eagle3.",
        # expected: "84% of B's prompt tokens were cache hits, A's 0%"
        "84% of eagle3's prompt tokens were cache hits, baseline's 0%.",
        # expected: "KV pool 159000 vs 13000 tokens"
        "the KV pool differs: 159000 tokens in baseline, 13000 in eagle3 "
        "(the memory fraction differs: 0.78 in baseline, 0.55 in eagle3).",
        # expected: "B always ran second"
        "eagle3 always ran second.",
    ]
    assert len(result.refused) == len(expected["reasons"])
    said = words.text(result)
    assert "No headline: these runs cannot be compared." in said
    assert "faster" not in said.split("**No headline")[1]


def under_load(*shares):
    """Levels 10, 20, … with what held the clocks down in which share of the readings; None: nobody looked."""
    return [
        {"concurrency": 10 * i, "cards": None if share is None else {"throttle": share}}
        for i, share in enumerate(shares, 1)
    ]


@pytest.mark.parametrize(
    ("levels", "decisive", "text"),
    [
        # One reading in twenty may fall into a change of clocks.
        (under_load({"hw_slowdown": 0.05}, {}), None, None),
        (
            under_load({"hw_slowdown": 0.05}, {"hw_slowdown": 0.5}),
            True,
            "GPUs of eagle3 were throttled at C=20: hw_slowdown.",
        ),
        (under_load({"sw_power_cap": 1.0}), False, "GPUs of eagle3 were held at their power limit at C=10."),
        (under_load({"applications_clocks_setting": 1.0}), None, None),
    ],
)
def test_throttling_under_load(levels, decisive, text):
    other = made("eagle3", merged=EAGLE)
    other.summary["levels"] = levels
    found = guard.findings("baseline", "eagle3", [(made("baseline", merged=MODE), other)])
    told = [(finding.text, finding.decisive) for finding in found if "GPUs" in finding.text]
    assert told == ([] if text is None else [(text, decisive)])


def test_whether_anybody_looked_at_the_cards_at_work_is_said():
    pair = (made("baseline", merged=MODE), made("eagle3", merged=EAGLE))
    assert "throttling under load" in guard.unknown([pair])
    pair[0].summary["levels"] = under_load({})
    assert "throttling under load" not in guard.unknown([pair])
    pair[0].summary["levels"] = under_load(None)
    assert "throttling under load" in guard.unknown([pair])
