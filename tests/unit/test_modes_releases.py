"""Every mode on real releases: it renders to a command line that the release accepts, or it is refused with a reason.

The expectations are by hand, from reading the wheels; so are the texts that the probes look for, and that they stand in
the wheels is tested here.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import yaml
from sglang_wheels import unpack

from servelab.shared import modes
from servelab.shared.modes_needs import Machine, architecture, ask
from servelab.shared.sglang_flags import Flag, read_flags, resolve
from servelab.shared.sglang_patch import execute, plan

SHIPPED = Path(__file__).parents[2] / "roles/sglang_server/vars/modes"
SETTINGS = {
    "model_path": "/m", "draft_model_path": "/d", "served_model_name": None, "host": "127.0.0.1", "port": 30000,
    "tp_size": 8, "mem_fraction_static": None, "cuda_graph_max_bs": 128, "trust_remote_code": None,
    "max_running_requests": 256, "model_revision": None, "adaptive_config": "/etc/servelab/adaptive.json",
}  # fmt: skip
# Every release from the first supported one on, and three of them for what takes long to look up.
RELEASES = tuple(f"0.5.{number}" for number in range(8, 24))
PROBED = ("0.5.10", "0.5.12", "0.5.23")
ALWAYS = ["--model-path", "/m", "--host", "127.0.0.1", "--port", "30000", "--tp-size", "8"]
EAGLE3 = [
    *("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", "/d", "--speculative-num-steps", "2"),
    *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "3"),
]
LIMIT = ["--max-running-requests", "256", "--enable-metrics", "--enable-cache-report"]
NCCL = ["--disable-custom-all-reduce"]
# What the story's machine is: eight SM120 cards, everything installed, the patch in place.
STORY = Machine(architectures=["SM120"], missing_tools=[], patches=["custom_allreduce"])


def since(release: str, first: int) -> bool:
    return int(release.rpartition(".")[2]) >= first


def graphs(release: str, size: int = 128) -> list[str]:
    return ["--cuda-graph-max-bs-decode" if since(release, 14) else "--cuda-graph-max-bs", str(size)]


def catalogue() -> dict:
    return {path.stem: yaml.safe_load(path.read_text()) for path in SHIPPED.glob("*.yml")}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A release as its wheel brings it, with the project's patch in it."""
    known: dict[str, Path] = {}

    def get(release: str) -> Path:
        if release not in known:
            known[release] = unpack(release, tmp_path_factory.mktemp(release))
            execute(plan(known[release], "present"))
        return known[release]

    return get


@cache
def flags(package_dir: Path) -> list[Flag]:
    """A release's flags; reading them takes a second."""
    return read_flags(package_dir)


def render(mode: str, **settings: object) -> dict:
    return modes.render(catalogue(), mode, {**SETTINGS, **settings})


def answered(mode: str, release: str, machine: Machine = STORY, **settings: object) -> list[str]:
    found = Machine(release, machine.architectures, machine.missing_tools, machine.patches)
    return ask(render(mode, **settings), found).unmet


FUSION = "FlashInfer all-reduce fusion needs SM90 or SM10x; this is SM120."
SYMMETRIC = (
    "Torch symmetric memory needs SM90 or SM10x; this is SM120: SGLang's table of sizes has no others, and without "
    "multicast (NVLink) it is switched off."
)
IPC = (
    "PCIe-IPC all-reduce needs SGLang >=0.5.22; {} is installed: 0.5.21 has the switch, but comes with a FlashInfer "
    "without these kernels, and older ones have neither."
)
ADAPTIVE = (
    "Adaptive speculation needs SGLang >=0.5.14; {} is installed: only since then may a batch size be given 0 steps, "
    "which switches speculation off."
)
EXPERTS = (
    "Expert parallelism over FlashInfer's all-to-all needs SGLang >=0.5.10,<0.5.13; {} is installed: 0.5.9 and "
    "older do not have this all-to-all, and since 0.5.13 SGLang takes it only with data-parallel attention on every "
    "rank, which is another way of serving."
)

EAGLE3_IS_NEWER = (
    "{} needs SGLang >=0.5.10; {} is installed: since then Kimi's model classes can feed an EAGLE-3 draft."
)

# mode → release → the refusal, or the words that stand for the mode between ALWAYS and LIMIT and behind LIMIT.
Words = tuple[list[str], list[str]]
EXPECTED: dict[str, Callable[[str], str | Words]] = {
    "baseline": lambda release: (graphs(release), []),
    "custom_ar_pcie": lambda release: (["--mem-fraction-static", "0.55", *graphs(release)], ["--enable-p2p-check"]),
    "eagle3": lambda release: (
        (graphs(release), EAGLE3) if since(release, 10) else EAGLE3_IS_NEWER.format("EAGLE-3 speculation", release)
    ),
    "eagle3_custom_ar": lambda release: (
        (["--mem-fraction-static", "0.55", *graphs(release)], [*EAGLE3, "--enable-p2p-check"])
        if since(release, 10)
        else EAGLE3_IS_NEWER.format("Custom all-reduce over PCIe", release)
    ),
    "eagle3_adaptive": lambda release: (
        (
            graphs(release),
            [*EAGLE3, "--speculative-adaptive", "--speculative-adaptive-config", "/etc/servelab/adaptive.json"],
        )
        if since(release, 14)
        else ADAPTIVE.format(release)
    ),
    "eagle3_pcie_ipc": lambda release: (graphs(release), EAGLE3) if since(release, 22) else IPC.format(release),
    "expert_parallel": lambda release: (
        EXPERTS.format(release)
        if release not in ("0.5.10", "0.5.11", "0.5.12")
        else (
            graphs(release),
            [
                *("--ep-size", "8", "--moe-a2a-backend", "flashinfer"),
                *("--moe-runner-backend", "flashinfer_cutlass"),
            ],
        )
    ),
    "flashinfer_fusion": lambda release: FUSION,
    "nccl_fewer_channels": lambda release: (graphs(release), []),
    "nccl_low_latency": lambda release: (graphs(release), []),
    "nccl_throughput": lambda release: (graphs(release), []),
    "ngram": lambda release: (
        graphs(release),
        ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", "8"],
    ),
    "pcie_ipc": lambda release: (graphs(release), []) if since(release, 22) else IPC.format(release),
    "torch_symm_mem": lambda release: SYMMETRIC,
}


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("mode", sorted(EXPECTED))
def test_a_mode_renders_or_is_refused(package: Callable[[str], Path], mode: str, release: str) -> None:
    expected = EXPECTED[mode](release)
    if isinstance(expected, str):
        assert answered(mode, release) == [expected]
        return
    assert answered(mode, release) == []
    result = resolve(flags(package(release)), render(mode)["args"])
    before, after = expected
    assert (result.errors, result.argv) == (
        [],
        [*ALWAYS, *before, *LIMIT, *([] if "custom_ar" in mode else NCCL), *after],
    )


@pytest.mark.parametrize("release", RELEASES)
def test_graphs_up_to_512_need_as_many_requests(package: Callable[[str], Path], release: str) -> None:
    assert answered("baseline_graph512", release) == []
    result = resolve(flags(package(release)), render("baseline_graph512")["args"])
    assert result.errors == []
    assert result.argv == [
        *ALWAYS,
        *graphs(release, 512),
        "--max-running-requests",
        "512",
        "--enable-metrics",
        "--enable-cache-report",
        *NCCL,
    ]


@pytest.mark.parametrize("release", RELEASES)
def test_b12x_is_refused_and_no_release_has_the_forks_flag(package: Callable[[str], Path], release: str) -> None:
    (reason,) = answered("b12x", release)
    assert reason.startswith("The b12x all-reduce is refused: b12x is a kernel library that no published SGLang calls")
    (error,) = resolve(flags(package(release)), render("b12x")["args"]).errors
    assert error.startswith("enable_pcie_oneshot_allreduce is not a flag of")


@pytest.mark.parametrize(
    ("release", "words"),
    [
        *((f"0.5.{number}", ["--enable-flashinfer-allreduce-fusion"]) for number in range(8, 14)),
        *((f"0.5.{number}", ["--flashinfer-allreduce-fusion-backend", "auto"]) for number in range(14, 24)),
    ],
)
def test_the_fusion_renders_where_the_cards_can(package: Callable[[str], Path], release: str, words: list[str]) -> None:
    assert answered("flashinfer_fusion", release, Machine(architectures=["SM103"])) == []
    result = resolve(flags(package(release)), render("flashinfer_fusion")["args"])
    assert (result.errors, result.argv) == ([], [*ALWAYS, *graphs(release), *LIMIT, *NCCL, *words])


def test_the_catalogue_is_the_one_that_is_tested_here() -> None:
    assert set(catalogue()) == {*EXPECTED, "baseline_graph512", "b12x"}
    assert modes.check_all(catalogue()) == []


# -- what a machine lacks -----------------------------------------------------------------------------------------


def test_the_patch_must_be_in_place() -> None:
    assert answered("custom_ar_pcie", "0.5.23", Machine(patches=[])) == [
        "Custom all-reduce over PCIe needs the patch custom_allreduce in the installed SGLang, and it is not in place; "
        "run playbooks/guest.yml (role sglang_allreduce)."
    ]


@pytest.mark.parametrize(
    ("mode", "ranks", "reason"),
    [
        ("custom_ar_pcie", 2, "needs 4, 6 or 8 ranks; tp_size is 2: SGLang has kernels for"),
        ("custom_ar_pcie", 6, None),
        ("pcie_ipc", 6, "needs 2, 4 or 8 ranks; tp_size is 6."),
        ("baseline", 7, None),
    ],
)
def test_the_number_of_ranks(mode: str, ranks: int, reason: str | None) -> None:
    found = answered(mode, "0.5.23", tp_size=ranks)
    assert [reason in text for text in found] == ([True] if reason else [])


def test_kernels_that_are_compiled_need_a_toolchain() -> None:
    assert answered("pcie_ipc", "0.5.23", Machine(missing_tools=["nvcc", "ninja"])) == [
        "PCIe-IPC all-reduce compiles kernels when it starts and needs nvcc, g++ and ninja; nvcc and ninja are missing."
    ]


@pytest.mark.parametrize(
    ("value", "works"), [("0,1,2,3", True), ("7", True), ("GPU-8f2c,GPU-11aa", False), ("MIG-1", False)]
)
def test_cards_are_named_by_index_where_ipc_needs_it(value: str, works: bool) -> None:
    mode = modes.render(catalogue(), "custom_ar_pcie", SETTINGS, env={"CUDA_VISIBLE_DEVICES": value})
    found = ask(mode, Machine("0.5.23", patches=["custom_allreduce"])).unmet
    expected = f"Custom all-reduce over PCIe does not work with CUDA_VISIBLE_DEVICES={value}: it reads the variable as"
    assert [text.startswith(expected) for text in found] == ([] if works else [True])


def test_what_is_unknown_neither_meets_nor_fails_a_need() -> None:
    answer = ask(render("flashinfer_fusion"), Machine())
    assert answer.unmet == []
    assert answer.unknown == [
        "FlashInfer all-reduce fusion needs SGLang >=0.5.5, and which one is installed is unknown.",
        "FlashInfer all-reduce fusion needs SM90 or SM10x, and which GPUs this machine has is unknown.",
    ]


def test_one_unfit_card_among_others_is_enough() -> None:
    machine = Machine("0.5.23", ["SM90", "SM120"])
    assert ask(render("flashinfer_fusion"), machine).unmet == [FUSION]


@pytest.mark.parametrize(
    ("said", "kind"), [("12.0", "SM120"), (" 9.0\n", "SM90"), ("10.3", "SM103"), ("[N/A]", None), ("", None)]
)
def test_the_name_of_an_architecture(said: str, kind: str | None) -> None:
    assert architecture(said) == kind


# -- the texts of the probes --------------------------------------------------------------------------------------

# (mode, entry) → the releases of those below in whose source one of its texts must stand.
LATE, ALL = ("0.5.23",), PROBED
TEXTS = {
    ("baseline", "must_not", "custom_ar"): ALL,
    ("baseline", "must_not", "pcie_ipc"): LATE,
    ("custom_ar_pcie", "must", "forced"): ALL,
    ("custom_ar_pcie", "must_not", "refused"): ALL,
    ("custom_ar_pcie", "must_not", "no_p2p"): ALL,
    ("custom_ar_pcie", "must_not", "world_size"): ALL,
    ("custom_ar_pcie", "must_not", "failed"): ALL,
    ("eagle3_adaptive", "must", "adaptive"): LATE,
    ("eagle3_adaptive", "must_not", "refused"): ("0.5.12", "0.5.23"),
    ("expert_parallel", "must", "enabled"): ("0.5.10", "0.5.12"),
    ("flashinfer_fusion", "must", "workspace"): ALL,
    ("flashinfer_fusion", "must_not", "architecture"): LATE,
    ("flashinfer_fusion", "must_not", "failed"): ALL,
    ("flashinfer_fusion", "must_not", "preflight"): ("0.5.12", "0.5.23"),
    ("flashinfer_fusion", "must_not", "missing"): ALL,
    ("ngram", "must", "chosen"): ALL,
    ("pcie_ipc", "must", "enabled"): LATE,
    ("pcie_ipc", "must", "workspace"): LATE,
    ("pcie_ipc", "must_not", "missing"): LATE,
    ("pcie_ipc", "must_not", "failed"): LATE,
    ("pcie_ipc", "must_not", "not_bf16"): LATE,
    ("torch_symm_mem", "must_not", "refused"): ALL,
    ("torch_symm_mem", "must_not", "multicast"): ALL,
}
# Where SGLang says these things; parsing the whole package would take minutes.
PLACES = (
    "srt/distributed/parallel_state.py",
    "srt/distributed/device_communicators/*.py",
    "srt/layers/flashinfer_comm_fusion.py",
    "srt/server_args.py",
    "srt/arg_groups/*.py",
    "srt/speculative/adaptive_spec_params.py",
)


def own_entries() -> dict[tuple[str, str, str], list[str]]:
    """The probes' texts where they are written, not where they are inherited."""
    return {
        (mode, key, name): entry["log"]
        for mode, content in catalogue().items()
        for key in ("must", "must_not")
        for name, entry in content.get("probe", {}).get(key, {}).items()
        if entry is not None
    }


@pytest.fixture(scope="module")
def texts(package: Callable[[str], Path]) -> Callable[[str], list[str]]:
    """Every text constant of the places above; what stands between a formatted text's values is a text of its own."""
    known: dict[str, list[str]] = {}

    def get(release: str) -> list[str]:
        if release not in known:
            trees = [
                ast.parse(file.read_text())
                for place in PLACES
                for file in sorted(package(release).glob(place))
                if file.is_file()
            ]
            known[release] = [
                node.value
                for tree in trees
                for node in ast.walk(tree)
                if isinstance(node, ast.Constant) and isinstance(node.value, str)
            ]
        return known[release]

    return get


def test_every_text_of_every_probe_is_looked_up_in_the_wheels() -> None:
    assert set(own_entries()) == set(TEXTS)


@pytest.mark.parametrize("release", PROBED)
def test_the_texts_stand_in_the_releases_that_they_are_for(texts: Callable[[str], list[str]], release: str) -> None:
    said = texts(release)
    missing = [
        entry
        for entry, literals in own_entries().items()
        if release in TEXTS[entry] and not any(literal in text for literal in literals for text in said)
    ]
    assert missing == []


def test_no_text_is_one_that_no_release_says(texts: Callable[[str], list[str]]) -> None:
    said = [text for release in PROBED for text in texts(release)]
    dead = {
        literal
        for literals in own_entries().values()
        for literal in literals
        if not any(literal in text for text in said)
    }
    assert dead == set()


def test_resolved_settings_that_probes_ask_for_are_settings_of_the_releases(package: Callable[[str], Path]) -> None:
    asked = {key for content in catalogue().values() for key in content.get("probe", {}).get("server", {})}
    assert asked == {"speculative_algorithm", "speculative_adaptive", "enable_torch_symm_mem", "moe_a2a_backend"}
    assert asked <= {flag.dest for flag in read_flags(package("0.5.23"))}
