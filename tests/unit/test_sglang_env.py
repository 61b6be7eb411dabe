"""Environment variables per release, against the wheels: case 18 and what the sources read."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_wheels import texts, unpack

from servelab.shared.sglang_env import names, notices

RELEASES = tuple(f"0.5.{number}" for number in range(8, 24))


@pytest.fixture(scope="module")
def empty(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A package that reads two variables."""
    package = tmp_path_factory.mktemp("package") / "sglang"
    (package / "srt").mkdir(parents=True)
    (package / "srt" / "environ.py").write_text("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE = EnvBool(False)\nSGL_OTHER = 1\n")
    return package


@pytest.mark.parametrize("release", RELEASES)
def test_case_18_spec_v2(empty: Path, release: str) -> None:
    number = int(release.rpartition(".")[2])
    said = notices({"SGLANG_ENABLE_SPEC_V2": "1"}, {"speculative_algorithm": "EAGLE3"}, empty, release)
    unset = notices({}, {"speculative_algorithm": "EAGLE3"}, empty, release)
    if number <= 10:
        # Honoured, and known to the release by the test below; this package does not have it.
        assert said == [f"SGLANG_ENABLE_SPEC_V2: SGLang {release} reads no variable of this name."]
        assert [sentence.split(":")[0] for sentence in unset] == [
            f"SGLANG_ENABLE_SPEC_V2 is off by default in SGLang {release}"
        ]
        return
    words = (
        "is on by default"
        if number <= 13
        else "does nothing but make the server warn"
        if number <= 20
        else "is not known any more"
    )
    assert [sentence.startswith(f"SGLANG_ENABLE_SPEC_V2: in SGLang {release} it {words}") for sentence in said] == [
        True
    ]
    assert unset == []


@pytest.mark.parametrize("release", ["0.5.10", "0.5.13", "0.5.14", "0.5.20", "0.5.21", "0.5.23"])
def test_the_wheels_agree_about_spec_v2(release: str) -> None:
    source = texts(release)
    number = int(release.rpartition(".")[2])
    assert ("SGLANG_ENABLE_SPEC_V2 = EnvBool(" in source) == (number <= 13)
    assert ("SGLANG_ENABLE_SPEC_V2 has been removed" in source) == (14 <= number <= 20)
    assert ("SGLANG_ENABLE_SPEC_V2" in source) == (number <= 20)


def test_a_release_with_a_post_counts_as_that_release(empty: Path) -> None:
    env = {"SGLANG_ENABLE_SPEC_V2": "1"}
    assert "does nothing but" in notices(env, {}, empty, "0.5.20.post1")[0]
    assert "off by default" in notices({}, {"speculative_algorithm": "EAGLE"}, empty, "0.5.10.post1")[0]


def test_a_name_that_the_release_does_not_read_is_told_with_the_nearest(empty: Path) -> None:
    assert notices({"SGLANG_ENABLE_PCIE_IPC_ALREDUCE": "1"}, {}, empty, "0.5.23") == [
        "SGLANG_ENABLE_PCIE_IPC_ALREDUCE: SGLang 0.5.23 reads no variable of this name; the nearest one is "
        "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE."
    ]
    quiet = {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE": "1", "SGL_OTHER": "1", "NCCL_ALGO": "Ring", "SGLANG_NOT_SET": None}
    quiet |= {"SGLANG_CUSTOM_ALLREDUCE_ALGO": "1stage", "SGLANG_FORCE_CUSTOM_AR_PCIE": "1"}
    assert notices(quiet, {}, empty, "0.5.23") == []


def test_what_the_server_overwrites_is_told(empty: Path) -> None:
    (said,) = notices({"CUDA_DEVICE_MAX_CONNECTIONS": "1"}, {}, empty, "0.5.8")
    assert "is overwritten with 8" in said


def test_a_real_release_reads_what_the_shipped_modes_set(tmp_path: Path) -> None:
    package = unpack("0.5.23", tmp_path)
    assert {"SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2"} <= names(package)
    assert "SGLANG_ENABLE_SPEC_V2" not in names(package)
