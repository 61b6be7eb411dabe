"""Which all-reduce engages: what SGLang's sources of the release decide for eight PCIe cards, and say in the log."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sglang_wheels import unpack

from servelab.shared.sglang_patch import execute
from servelab.shared.sglang_patch import plan as plan_patch
from servelab_lab.server.cost import load_profile
from servelab_lab.server.dialect import Dialect
from servelab_lab.server.paths import Way, choose
from servelab_lab.server.serverargs import ServerArgs

STORY = load_profile("story")
FORCED = {"SGLANG_FORCE_CUSTOM_AR_PCIE": "1", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}
REFUSED = (
    "{} is disabled because it's not supported on more than two PCIe-only GPUs. "
    "To silence this warning, specify disable_custom_all_reduce=True explicitly."
)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A package whose custom all-reduce is patched."""
    directory = tmp_path / "sglang/srt/distributed/device_communicators"
    directory.mkdir(parents=True)
    for name in ("custom_all_reduce.py", "custom_all_reduce_utils.py"):
        (directory / name).write_text("# servelab-patch\n")
    return tmp_path / "sglang"


def way(release: str, environ: dict[str, str], package: Path = Path("/nowhere"), **args: Any) -> Way:
    values = ServerArgs({"tp_size": 8, **args}, release, "")
    return choose(values, environ, package, Dialect.of(release), STORY, rows=128)


@pytest.mark.parametrize(
    ("release", "environ", "names"),
    [
        ("0.5.8", {}, ["Custom allreduce"]),
        ("0.5.10", {}, ["CustomAllreduce"]),
        # Up to 0.5.12 version 2 leaves no second try, and in 0.5.12 it is on by itself.
        ("0.5.10", {"SGLANG_USE_JIT_ALL_REDUCE": "1"}, ["CustomAllReduceV2"]),
        ("0.5.12", {}, ["CustomAllReduceV2"]),
        ("0.5.12", {"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0"}, ["CustomAllreduce"]),
        ("0.5.23", {}, ["CustomAllReduceV2", "CustomAllreduce"]),
    ],
)
def test_without_a_patch_every_release_refuses_eight_pcie_cards(
    release: str, environ: dict[str, str], names: list[str]
) -> None:
    chosen = way(release, {**environ, "SGLANG_FORCE_CUSTOM_AR_PCIE": "1"})
    assert (chosen.backend, chosen.limit) == ("nccl", None)
    assert chosen.joining == [REFUSED.format(name) for name in names]


@pytest.mark.parametrize("release", ["0.5.10", "0.5.12", "0.5.23"])
def test_the_patch_alone_and_the_variable_alone_change_nothing(release: str, package: Path) -> None:
    assert way(release, {}, package).backend == "nccl"
    assert way(release, FORCED).backend == "nccl"
    chosen = way(release, FORCED, package)
    assert (chosen.backend, chosen.limit, chosen.joining) == ("custom_ar", 1048576, [])
    assert chosen.first == ["Custom allreduce is forced over PCIe: world size 8, up to 1048576 bytes."]


def test_in_0_5_12_version_2_must_be_off(package: Path) -> None:
    assert way("0.5.12", {"SGLANG_FORCE_CUSTOM_AR_PCIE": "1"}, package).backend == "nccl"
    later = way("0.5.23", {"SGLANG_FORCE_CUSTOM_AR_PCIE": "1"}, package)
    assert (later.backend, later.joining) == ("custom_ar", [REFUSED.format("CustomAllReduceV2")])


def test_the_size_limit_is_the_patchs_variable(package: Path) -> None:
    assert way("0.5.23", {**FORCED, "SGLANG_CUSTOM_AR_PCIE_MAX_BYTES": "65536"}, package).limit == 65536


def test_p2p_is_tested_only_where_asked_and_not_skipped(package: Path) -> None:
    assert way("0.5.23", FORCED, package, enable_p2p_check=True).checks_p2p
    assert not way("0.5.23", FORCED, package).checks_p2p
    skipped = way("0.5.23", {**FORCED, "SGLANG_SKIP_P2P_CHECK": "1"}, package, enable_p2p_check=True)
    assert not skipped.checks_p2p
    assert skipped.joining == ["Skipping P2P check and trusting the driver's P2P report."]


def test_switched_off_or_few_cards_say_nothing() -> None:
    assert way("0.5.23", {}, disable_custom_all_reduce=True).joining == []
    assert way("0.5.23", {}, tp_size=1).joining == []
    assert way("0.5.23", {}, tp_size=2).joining == []
    assert "unsupported world size: 3. Supported world sizes: [2, 4, 6, 8]." in way("0.5.23", {}, tp_size=3).joining[0]


def test_pcie_ipc_is_there_from_0_5_22() -> None:
    on = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}
    assert way("0.5.20", on).backend == "nccl"
    early = way("0.5.21", on)
    assert early.backend == "nccl"
    assert early.joining[-1].endswith("no pcie_ipc_comm; falling back to NCCL all-reduce.")
    chosen = way("0.5.22", on)
    # 128 rows of 7168 elements of two bytes.
    assert (chosen.backend, chosen.limit) == ("pcie_ipc", 1835008)
    assert chosen.joining[-1] == (
        "FlashInfer PCIe-IPC all-reduce enabled (world=8, workspace sized on first reduction)"
    )
    assert chosen.built[0] == "FlashInfer PCIe-IPC workspace built (world=8, max_numel=917504, hidden=7168)"
    assert "autotuned 8 shape(s)" in chosen.built[1]
    assert way("0.5.23", {**on, "SGLANG_PCIE_IPC_MAX_NUMEL": "7168"}).limit == 14336


def test_the_forced_custom_all_reduce_goes_before_pcie_ipc(package: Path) -> None:
    assert way("0.5.23", {**FORCED, "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1"}, package).backend == "custom_ar"


def test_nccl_without_p2p_is_a_way_of_its_own() -> None:
    chosen = way("0.5.23", {"NCCL_P2P_DISABLE": "1"})
    assert (chosen.backend, chosen.nccl) == ("nccl_no_p2p", "nccl_no_p2p")


def test_torch_symmetric_memory_is_refused_by_the_card() -> None:
    assert way("0.5.23", {}, enable_torch_symm_mem=True).joining[-1] == (
        "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available."
    )


def test_a_custom_all_reduce_that_cannot_be_set_up_leaves_nccl(package: Path) -> None:
    args = ServerArgs({"tp_size": 8}, "0.5.23", "")
    chosen = choose(args, FORCED, package, Dialect.of("0.5.23"), STORY, 128, custom_fails=True)
    assert chosen.backend == "nccl"
    assert chosen.joining[0].startswith("Setup Custom allreduce failed with ")


def test_the_words_are_the_real_sources_and_the_real_patch_opens_the_way(tmp_path: Path) -> None:
    real = unpack("0.5.23", tmp_path)
    helpers = (real / "srt/distributed/device_communicators/custom_all_reduce_utils.py").read_text()
    assert "is disabled because it's not supported on" in helpers
    ipc = (real / "srt/distributed/device_communicators/pcie_ipc_ar.py").read_text()
    assert '"FlashInfer PCIe-IPC workspace built (world=%d, max_numel=%d, hidden=%d)"' in ipc
    assert way("0.5.23", FORCED, real).backend == "nccl"
    execute(plan_patch(real, "present"))
    assert way("0.5.23", FORCED, real).backend == "custom_ar"
