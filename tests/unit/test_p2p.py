"""Verdicts on pairs of cards. The figures are written by hand after what such machines are reported to give."""

from __future__ import annotations

import pytest

from servelab.shared.p2p import judge, parse_report

PCIE5 = {"from_host_gb_s": 55.0, "to_host_gb_s": 54.0}
GOOD = {
    "advertised": True,
    "copy_wrong_words": 0,
    "copy_gb_s": 50.0,
    "store_wrong_words": 0,
    "store_gb_s": 48.0,
    "load_wrong_words": 0,
    "load_gb_s": 35.0,
    "load_latency_us": 1.9,
}


def pair(source: int, target: int, state: str = "done", error: str | None = None, **measured) -> dict:
    entry = {"from": source, "to": target, "state": state}
    return {**entry, "error": error} if error else {**entry, "measured": {**GOOD, **measured}}


def report(*pairs: dict, all_reduce: list[dict] | None = None, link: dict | None = None) -> dict:
    host = [{"gpu": gpu, "state": "done", "measured": link or PCIE5} for gpu in range(2)]
    return {"schema": "servelab.p2p/1", "host": host, "pairs": list(pairs), "all_reduce": all_reduce or []}


def reduced(way: str = "peer memory", state: str = "done", error: str | None = None, **measured) -> dict:
    entry = {"way": way, "state": state}
    figures = {"bytes": 65536, "late_gpus": 0, "wrong_words": 0, "us": 21.34}
    return {**entry, "error": error} if error else {**entry, "measured": {**figures, **measured}}


def test_a_good_machine_has_no_problem():
    judged = judge(report(pair(0, 1), pair(1, 0), all_reduce=[reduced()]))
    assert judged.status == "ok"
    assert judged.problems == []
    assert judged.notices == ["All-reduce over peer memory, 64 KiB: 21.3 µs"]
    assert judged.table[:3] == [
        "from\\to  GPU0     GPU1",
        "GPU0     -        ok 50.0",
        "GPU1     ok 50.0  -",
    ]


@pytest.mark.parametrize(
    ("one", "verdict", "reason", "remedy"),
    [
        # Advertised, and NCCL hangs for ever: what users report most.
        (pair(0, 1, "hung", "no answer within 20 s"), "broken", "never ended", "NCCL_P2P_DISABLE=1"),
        (pair(0, 1, "hung", "no answer within 20 s"), "broken", "never ended", "iommu=pt"),
        (pair(0, 1, "error", "cudaErrorIllegalAddress"), "broken", "cudaErrorIllegalAddress", "ACS"),
        # Wrong data in place of a hang (patched drivers).
        (pair(0, 1, store_wrong_words=12), "broken", "(by store)", "iommu=pt"),
        (pair(0, 1, copy_wrong_words=1, load_wrong_words=1), "broken", "(by copy and load)", "iommu=pt"),
        # Wrong data weigh more than missing peer access.
        (pair(0, 1, advertised=False, copy_wrong_words=3), "broken", "other data arrive", "iommu=pt"),
        (pair(0, 1, advertised=False, copy_gb_s=14.0), "slow", "offers no peer access", "pve_gpu_host_force_p2p"),
        (pair(0, 1, copy_gb_s=20.0), "slow", "copy by far below the host links", "link width"),
        (pair(0, 1, store_gb_s=3.1), "slow", "store by far below", "pve_gpu_host_force_p2p"),
        (pair(0, 1, load_gb_s=2.4), "slow", "load by far below", "pve_gpu_host_force_p2p"),
        (pair(0, 1, load_latency_us=27.0), "slow", "more than 10 µs", "NCCL_P2P_DISABLE=1"),
        (pair(0, 1, "not_run", "a process hangs"), "unknown", "a process hangs", "reboot"),
    ],
)
def test_a_bad_pair_has_its_verdict_its_reason_and_its_remedy(one, verdict, reason, remedy):
    judged = judge(report(one, pair(1, 0)))
    assert judged.status == verdict
    assert [found.verdict for found in judged.pairs] == [verdict, "ok"]
    (problem,) = judged.problems
    assert problem.startswith(f"P2P between GPUs 0→1 is {verdict}: ")
    assert reason in problem and remedy in problem


def test_a_card_on_a_narrow_link_is_held_against_that_link():
    # PCIe 4.0 x8: a tenth of what another machine gives, and all that this one can.
    narrow = {"from_host_gb_s": 13.1, "to_host_gb_s": 13.2}
    assert judge(report(pair(0, 1, copy_gb_s=12.0, store_gb_s=11.5, load_gb_s=8.0), link=narrow)).status == "ok"


@pytest.mark.parametrize(
    ("speed", "width", "said"),
    [
        ("16.0 GT/s PCIe", "16", "The PCIe link of GPU 0 runs at 16 GT/s x16 under load, and can 32 GT/s x16."),
        ("32.0 GT/s PCIe", "8", "The PCIe link of GPU 0 runs at 32 GT/s x8 under load, and can 32 GT/s x16."),
        ("32.0 GT/s PCIe", "16", ""),
        ("Unknown", "16", ""),
        ("", "", ""),  # no sysfs in the guest
    ],
)
def test_a_link_below_its_best_under_load_is_told(speed, width, said):
    entry = report(pair(0, 1), pair(1, 0))
    best = {"max_link_speed": "32.0 GT/s PCIe", "max_link_width": "16"} if speed else {}
    entry["host"][0]["measured"] = {**PCIE5, "current_link_speed": speed, "current_link_width": width, **best}
    judged = judge(entry)
    assert judged.status == ("slow" if said else "ok")
    assert " ".join(judged.problems).startswith(said)


def test_without_a_host_figure_speed_is_not_judged():
    entry = report(pair(0, 1, copy_gb_s=1.0))
    entry["host"][0] = {"gpu": 0, "state": "error", "error": "out of memory"}
    assert judge(entry).status == "ok"


def test_pairs_with_the_same_fault_are_one_sentence():
    hung = [pair(a, b, "hung", "no answer within 20 s") for a in range(3) for b in range(3) if a != b]
    (problem,) = judge(report(*hung)).problems
    assert problem.startswith("P2P between GPUs 0↔1, 0↔2, 1↔2 is broken: ")


def test_a_sum_that_never_comes_makes_good_pairs_worthless():
    judged = judge(report(pair(0, 1), pair(1, 0), all_reduce=[reduced(late_gpus=2, us=None)]))
    assert judged.status == "broken"
    assert "2 GPUs waited in vain" in judged.problems[0] and "NCCL_P2P_DISABLE=1" in judged.problems[0]


def test_wrong_sums_are_broken():
    assert judge(report(pair(0, 1), all_reduce=[reduced(wrong_words=7)])).status == "broken"


def test_no_sum_through_peer_memory_is_no_fault_of_its_own_without_peer_access():
    judged = judge(report(pair(0, 1, advertised=False), all_reduce=[reduced(state="error", error="unsupported")]))
    assert judged.status == "slow"
    assert "All-reduce over peer memory was not possible: some pairs have no peer access." in judged.notices


def test_nccl_that_hangs_with_p2p_and_works_without_is_told_so():
    ways = [
        reduced("NCCL", "hung", "no answer within 20 s"),
        reduced("NCCL, P2P off", us=60.0),
    ]
    judged = judge(report(pair(0, 1), all_reduce=ways))
    assert judged.status == "broken"
    assert judged.problems[0].startswith(
        "All-reduce over NCCL is broken: no answer within 20 s. Remedy: NCCL_P2P_DISABLE=1 works here"
    )
    assert judged.notices == ["All-reduce over NCCL, P2P off, 64 KiB: 60.0 µs"]


@pytest.mark.parametrize("text", ["", "Killed", "{}", "[1]", '{"schema": "other"}'])
def test_what_is_no_report_is_refused(text):
    with pytest.raises(ValueError, match="did not print its report"):
        parse_report(text)
