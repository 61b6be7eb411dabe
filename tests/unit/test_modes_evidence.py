"""A mode that fell back says so in its log, and is named for it; one that engaged is believed by its own words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from servelab.shared import modes
from servelab.shared.modes_evidence import judge
from servelab_lab.server.cost import load_profile
from servelab_lab.server.dialect import Dialect
from servelab_lab.server.paths import choose
from servelab_lab.server.serverargs import ServerArgs

SHIPPED = Path(__file__).parents[2] / "roles/sglang_server/vars/modes"
PREFIX = "[2026-11-29 10:00:00 TP0] "
READY = "The server is fired up and ready to roll!"
FORCED = "Custom allreduce is forced over PCIe: world size 8, up to 1048576 bytes."
FELL = "Mode custom_ar_pcie fell back to NCCL: "
NO_P2P = "CustomAllreduce is disabled because your platform lacks GPU P2P capability or P2P test failed. To silence"
REFUSED = (
    "CustomAllreduce is disabled because it's not supported on more than two PCIe-only GPUs. To silence this warning"
)
EAGLE = {"speculative_algorithm": "EAGLE3"}


def mode(name: str) -> dict[str, Any]:
    catalogue = {path.stem: yaml.safe_load(path.read_text()) for path in SHIPPED.glob("*.yml")}
    return modes.merge(catalogue, name)


def log(*lines: str) -> str:
    return "\n".join(PREFIX + line for line in [*lines, READY])


def test_the_custom_all_reduce_engaged() -> None:
    verdict = judge(mode("custom_ar_pcie"), log(FORCED), {})
    assert (verdict.engaged, verdict.reason, verdict.seen) == (True, "Custom all-reduce over PCIe engaged.", [FORCED])


@pytest.mark.parametrize(
    ("lines", "reason"),
    [
        ([], "Mode custom_ar_pcie fell back to NCCL: the log never says that the custom all-reduce came up."),
        (
            [REFUSED],
            f"{FELL}SGLang refused its custom all-reduce on more than two PCIe GPUs, so the gate is shut. "
            f"Its log: {REFUSED}",
        ),
        (
            ["Setup Custom allreduce failed with CUDART error: invalid argument. To silence this warning"],
            "Mode custom_ar_pcie fell back to NCCL: the custom all-reduce could not be set up. Its log: Setup Custom "
            "allreduce failed with CUDART error: invalid argument. To silence this warning",
        ),
        # One process group has it, another could not: that is a failure, too.
        (
            [FORCED, NO_P2P],
            f"{FELL}the cards cannot reach each other's memory. Its log: {NO_P2P}",
        ),
    ],
)  # fmt: skip
def test_a_server_over_nccl_in_a_mode_for_something_else(lines: list[str], reason: str) -> None:
    verdict = judge(mode("custom_ar_pcie"), log(*lines), {})
    assert (verdict.engaged, verdict.reason) == (False, reason)


def test_ranks_that_share_a_line_are_told_apart() -> None:
    text = f"{PREFIX}Load weight begin.[2026-11-29 10:00:00 TP1] {FORCED}\r{PREFIX}{READY}"
    assert judge(mode("custom_ar_pcie"), text, {}).seen == [FORCED]


def test_a_baseline_must_not_use_what_it_does_not_ask_for() -> None:
    assert judge(mode("baseline"), log(REFUSED), {}).engaged is True
    for name in ("baseline", "eagle3", "nccl_throughput", "baseline_graph512"):
        verdict = judge(mode(name), log(FORCED), EAGLE)
        assert verdict.engaged is False
        assert verdict.reason.startswith(
            f"Mode {name} did not engage: SGLang's custom all-reduce is in use, which this mode does not ask for."
        )


def test_both_halves_of_a_mode_made_of_two_must_engage() -> None:
    both = mode("eagle3_custom_ar")
    assert judge(both, log(FORCED), EAGLE).engaged is True
    assert judge(both, log(), EAGLE).reason.startswith("Mode eagle3_custom_ar fell back to NCCL: ")
    assert judge(both, log(FORCED), {"speculative_algorithm": None}).reason == (
        "Mode eagle3_custom_ar did not engage: the server runs with speculative_algorithm=None, not 'EAGLE3'."
    )


def test_pcie_ipc_that_was_enabled_but_never_built_carried_nothing() -> None:
    enabled = "FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first reduction)"
    built = "FlashInfer PCIe-IPC workspace built (world=8, max_numel=917504, hidden=7168)"
    assert judge(mode("pcie_ipc"), log(enabled, built), {}).engaged is True
    assert judge(mode("pcie_ipc"), log(enabled), {}).reason == (
        "Mode pcie_ipc fell back to NCCL: its workspace was never built, so no sum went through it."
    )
    failed = "FlashInfer PCIe-IPC workspace (max_numel=917504) failed: no peer access; all-reduce stays on NCCL."
    assert "could not be set up" in judge(mode("pcie_ipc"), log(enabled, failed), {}).reason


def test_what_a_server_does_not_tell_is_unknown_and_no_failure() -> None:
    verdict = judge(mode("eagle3"), log(), None)
    assert (verdict.engaged, verdict.unknown) == (True, ["The server does not tell speculative_algorithm."])


def test_adaptive_speculation_that_was_refused() -> None:
    said = "speculative_adaptive disabled: enable_dp_attention=True is not supported. Falling back to static"
    verdict = judge(mode("eagle3_adaptive"), log(said), {**EAGLE, "speculative_adaptive": False})
    assert verdict.reason.startswith(
        "Mode eagle3_adaptive fell back to a fixed number of drafts: SGLang refused to adapt; the server runs with "
        "speculative_adaptive=False, not True. Its log: speculative_adaptive disabled: "
    )


def test_a_secret_in_the_line_is_not_shown() -> None:
    verdict = judge(mode("custom_ar_pcie"), log("Setup Custom allreduce failed with api_key='sk-sentinel'."), {})
    assert "sk-sentinel" not in verdict.reason


def test_a_mode_without_a_probe_claims_nothing() -> None:
    assert judge({"name": "mine"}, log(), {}).engaged is None


@pytest.mark.parametrize("release", ["0.5.10", "0.5.12", "0.5.23"])
@pytest.mark.parametrize("patched", [True, False])
def test_the_simulated_server_is_judged_by_the_same_words(tmp_path: Path, release: str, patched: bool) -> None:
    """What the lab's server says where the custom all-reduce engages, and where the patch is missing."""
    directory = tmp_path / "sglang/srt/distributed/device_communicators"
    directory.mkdir(parents=True)
    for name in ("custom_all_reduce.py", "custom_all_reduce_utils.py"):
        (directory / name).write_text("# servelab-patch\n" if patched else "\n")
    asked = mode("custom_ar_pcie")
    args = ServerArgs({"tp_size": 8, "enable_p2p_check": True}, release, "")
    environ = {name: str(value) for name, value in asked["env"].items()}
    way = choose(args, environ, tmp_path / "sglang", Dialect.of(release), load_profile("story"), rows=128)
    verdict = judge(asked, log(*way.joining, *way.first), {})
    assert verdict.engaged is (way.backend == "custom_ar") is patched
    if not patched:
        assert "fell back to NCCL" in verdict.reason


LOW_LATENCY = {
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "LL",
    "NCCL_P2P_LEVEL": "SYS",
    "NCCL_IB_DISABLE": "1",
    "NCCL_MIN_NCHANNELS": "8",
    "NCCL_ALLOC_P2P_NET_LL_BUFFERS": "1",
}


def test_nccls_variables_are_seen_in_every_scheduler() -> None:
    workers = {71: {**LOW_LATENCY, "HOME": "/x"}, 72: LOW_LATENCY}
    verdict = judge(mode("nccl_low_latency"), log(), {}, workers)
    assert (verdict.engaged, verdict.unknown) == (True, [])
    assert "NCCL_P2P_LEVEL=SYS in 2 schedulers" in verdict.seen
    assert len(verdict.seen) == 6


@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"NCCL_PROTO": "LL128"}, "scheduler 72 runs with NCCL_PROTO=LL128, not LL"),
        ({"NCCL_MIN_NCHANNELS": None}, "scheduler 72 runs without NCCL_MIN_NCHANNELS=8"),
    ],
)
def test_a_variable_that_did_not_arrive_is_another_mode(changed: dict[str, str | None], reason: str) -> None:
    other = {key: value for key, value in {**LOW_LATENCY, **changed}.items() if value is not None}
    verdict = judge(mode("nccl_low_latency"), log(), {}, {71: LOW_LATENCY, 72: other})
    assert (verdict.engaged, verdict.reason) == (False, f"Mode nccl_low_latency did not engage: {reason}.")


@pytest.mark.parametrize("workers", [{}, {71: None}])
def test_an_environment_that_cannot_be_read_is_unknown(workers: dict[int, dict[str, str] | None]) -> None:
    verdict = judge(mode("nccl_low_latency"), log(), {}, workers)
    assert verdict.engaged is True
    assert (
        "Whether NCCL_PROTO reached the schedulers is not known: their environment cannot be read." in verdict.unknown
    )


def test_the_forcing_variable_must_be_there_too() -> None:
    env = {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}
    verdict = judge(mode("custom_ar_pcie"), log(FORCED), {}, {71: {**env, "SGLANG_CUSTOM_ALLREDUCE_ALGO": "1stage"}})
    assert verdict.reason == (
        "Mode custom_ar_pcie did not engage: scheduler 71 runs without SGLANG_FORCE_CUSTOM_AR_PCIE=1."
    )
