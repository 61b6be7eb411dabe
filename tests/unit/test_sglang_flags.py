"""Flags of real SGLang releases, against two lists that were made without this code.

fixtures/sglang/flags-by-version.txt was put together by hand from 17 wheels; fixtures/sglang/parser-0.5.23.json is
what the release's own ServerArgs.add_cli_args registered when it was run (with torch replaced by a stand-in).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from sglang_wheels import unpack

from servelab.shared.sglang_flags import Flag, FlagsUnreadable, build_parser, read_flags, resolve
from servelab.shared.sglang_release import Release, ReleaseError, find_package, read_version

FIXTURES = Path(__file__).parent / "fixtures" / "sglang"
# Every release from the first supported one on.
RELEASES = tuple(f"0.5.{number}" for number in range(8, 24))

Flags = Callable[[str], list[Flag]]


@pytest.fixture(scope="module")
def flags(tmp_path_factory: pytest.TempPathFactory) -> Flags:
    known: dict[str, list[Flag]] = {}

    def read(version: str) -> list[Flag]:
        if version not in known:
            known[version] = read_flags(unpack(version, tmp_path_factory.mktemp(version)))
        return known[version]

    return read


def options(flags: list[Flag]) -> set[str]:
    return {option for flag in flags for option in flag.options}


def listed(version: str) -> dict[str, bool]:
    """Flag → whether the release has it, from the list."""
    header, *rows = (FIXTURES / "flags-by-version.txt").read_text().splitlines()
    column = header.split().index(version)
    return {row.split()[0]: row.split()[column] == "Y" for row in rows}


@pytest.mark.parametrize("version", RELEASES)
def test_the_flags_of_a_release_are_those_of_the_list(flags: Flags, version: str) -> None:
    found = options(flags(version))
    assert {flag: flag in found for flag in listed(version)} == listed(version)


def test_the_parser_equals_the_releases_own(flags: Flags) -> None:
    own = json.loads((FIXTURES / "parser-0.5.23.json").read_text())
    built = {
        option: {
            "dest": action.dest,
            "nargs": action.nargs,
            "choices": sorted(map(str, action.choices)) if action.choices is not None else None,
            "required": action.required,
        }
        for action in build_parser(flags("0.5.23"))._actions
        for option in action.option_strings
    }
    # The names of an enumeration are only known at run time: then any value goes.
    assert own["--kv-canary-real-data"].pop("choices") == ["all", "none", "partial"]
    assert built["--kv-canary-real-data"].pop("choices") is None
    assert built == own


def test_defaults_that_are_literals_are_set(flags: Flags) -> None:
    parsed = build_parser(flags("0.5.8")).parse_args(["--model-path", "/m"])
    # The first spelling names the value: 0.5.8 declares --tensor-parallel-size first.
    assert (parsed.tensor_parallel_size, parsed.port, parsed.speculative_num_steps) == (1, 30000, None)
    for version in ("0.5.15", "0.5.23"):
        parsed = build_parser(flags(version)).parse_args(["--model-path", "/m", "--tp", "8"])
        assert (parsed.model_path, parsed.tp_size, parsed.port, parsed.host) == ("/m", 8, 30000, "127.0.0.1")
        assert parsed.trust_remote_code is False
        assert parsed.speculative_num_steps is None


def test_an_ambiguous_option_exits_2_in_argparses_words(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        build_parser(flags("0.5.23"), "launch_server.py").parse_args(["--cuda-graph-max-bs", "128"])
    assert exit_.value.code == 2
    expected = (FIXTURES / "argparse_error.stderr").read_text().splitlines()[-1]
    assert capsys.readouterr().err.splitlines()[-1] == expected


def test_a_deprecated_spelling_sets_what_the_new_one_sets(flags: Flags) -> None:
    parser = build_parser(flags("0.5.15"))
    assert parser.parse_args(["--model", "/m", "--cuda-graph-max-bs", "64"]).cuda_graph_max_bs_decode == 64
    assert parser.parse_args(["--model", "/m"]).cuda_graph_max_bs_decode is None


def test_a_retired_flag_stops_with_the_releases_own_words(flags: Flags, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser(flags("0.5.19")).parse_args(["--model-path", "/m", "--enable-expert-distribution-metrics"])
    assert "--enable-expert-distribution-metrics is no longer supported" in capsys.readouterr().err


STORY = {
    "model_path": "/shared/kimi-k2.5-int4",
    "tp_size": 8,
    "port": 30000,
    "mem_fraction_static": 0.55,
    "trust_remote_code": True,
    "cuda_graph_max_bs": 128,
    "disable_radix_cache": False,
    "chunked_prefill_size": -1,
    "speculative_algorithm": None,
}


@pytest.mark.parametrize(
    ("version", "spelling", "notices"),
    [
        ("0.5.13", "--cuda-graph-max-bs", []),
        ("0.5.15", "--cuda-graph-max-bs-decode", ["cuda_graph_max_bs is written --cuda-graph-max-bs-decode for it."]),
        ("0.5.23", "--cuda-graph-max-bs-decode", ["cuda_graph_max_bs is written --cuda-graph-max-bs-decode for it."]),
    ],
)
def test_the_storys_flags(flags: Flags, version: str, spelling: str, notices: list[str]) -> None:
    result = resolve(flags(version), STORY, "it")
    assert result.errors == []
    assert result.notices == notices
    assert result.argv == [
        *("--model-path", "/shared/kimi-k2.5-int4", "--tp-size", "8", "--port", "30000"),
        *("--mem-fraction-static", "0.55", "--trust-remote-code", spelling, "128", "--chunked-prefill-size", "-1"),
    ]


@pytest.mark.parametrize(
    ("version", "args", "argv"),
    [
        ("0.5.8", {"tp": 4}, ["--tp-size", "4"]),
        ("0.5.23", {"tp": 4}, ["--tp-size", "4"]),
        ("0.5.23", {"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs-decode", "1", "2", "4"]),
        ("0.5.8", {"cuda_graph_bs": [1, 2, 4]}, ["--cuda-graph-bs", "1", "2", "4"]),
        ("0.5.13", {"enable_flashinfer_allreduce_fusion": True}, ["--enable-flashinfer-allreduce-fusion"]),
        ("0.5.14", {"enable_flashinfer_allreduce_fusion": True}, ["--flashinfer-allreduce-fusion-backend", "auto"]),
        ("0.5.23", {"enable_flashinfer_allreduce_fusion": False}, []),
        ("0.5.23", {"trust_rem": True}, ["--trust-remote-code"]),
        ("0.5.23", {"json_model_override_args": {"a": [1]}}, ["--json-model-override-args", '{"a": [1]}']),
        ("0.5.23", {"served_model_name": "-x"}, ["--served-model-name=-x"]),
        ("0.5.23", {"model_checksum": True}, ["--model-checksum"]),
        ("0.5.23", {"max_prefill_tokens": "16k"}, ["--max-prefill-tokens", "16k"]),
    ],
)
def test_values_become_words(flags: Flags, version: str, args: dict[str, object], argv: list[str]) -> None:
    result = resolve(flags(version), {"model_path": "/m", **args})
    assert (result.errors, result.argv) == ([], ["--model-path", "/m", *argv])
    build_parser(flags(version)).parse_args(result.argv)


def test_a_boolean_with_two_spellings(flags: Flags) -> None:
    twins = next(flag for flag in flags("0.5.23") if flag.kind == "boolean_optional")
    key = twins.names[0][2:].replace("-", "_")
    for value, word in ((True, twins.names[0]), (False, f"--no-{twins.names[0][2:]}")):
        assert resolve(flags("0.5.23"), {"model_path": "/m", key: value}).argv == ["--model-path", "/m", word]


def test_all_errors_are_found_at_once(flags: Flags) -> None:
    args = {
        "frobnicate": 1,
        "mem_fraction_statik": 0.5,
        "nnodes": "two",
        "moe_a2a_backend": "flashinfer",
        "enable_metrics": "yes",
        "trust_remote_code": 1,
        "tp_size": True,
        "port": [1, 2],
        "cuda_graph_bs": [],
        "cuda_graph": 8,
        "enable_pcie_oneshot_allreduce": True,
        "api": "sk-invented",
        "load_format": "auto",
        "load-format": "auto",
    }
    result = resolve(flags("0.5.8"), args, "SGLang 0.5.8")
    expected = [
        r"frobnicate is not a flag of SGLang 0\.5\.8\.",
        r"mem_fraction_statik is not a flag of SGLang 0\.5\.8; the nearest one is mem_fraction_static\.",
        r"argument --nnodes: invalid int value: 'two'\.",
        r"argument --moe-a2a-backend: invalid choice: 'flashinfer' \(choose from '?none'?, .*",
        r"enable_metrics is a switch: write true or false, not 'yes'\.",
        r"trust_remote_code is a switch: write true or false, not 1\.",
        r"tp_size needs a value, not true\.",
        r"port takes one value, not the list \[1, 2\]\.",
        r"cuda_graph_bs needs at least one value; the list is empty\.",
        r"cuda_graph is ambiguous in SGLang 0\.5\.8: it could be cuda_graph_bs, cuda_graph_max_bs\.",
        r"enable_pcie_oneshot_allreduce is not a flag of SGLang 0\.5\.8: no published SGLang ever had it, .*",
        r"api must not be among args, because every user of the machine can read a command line; .*",
        r"load_format and load-format both set --load-format; keep one of them\.",
        r"model_path is missing: SGLang 0\.5\.8 does not start without --model-path\.",
    ]
    assert len(result.errors) == len(expected)
    for error, pattern in zip(result.errors, expected, strict=True):
        assert re.fullmatch(pattern, error), (error, pattern)
    assert "sk-invented" not in " ".join([*result.errors, *result.notices, *result.argv])


def test_a_flag_with_a_bad_value_is_not_also_missing(flags: Flags) -> None:
    assert resolve(flags("0.5.23"), {"model": ["a", "b"]}).errors == ["model takes one value, not the list ['a', 'b']."]


def test_a_layout_that_is_not_known_is_refused(tmp_path: Path) -> None:
    with pytest.raises(FlagsUnreadable, match=r"server_args\.py does not exist"):
        read_flags(tmp_path)
    (tmp_path / "srt").mkdir()
    (tmp_path / "srt" / "server_args.py").write_text("class ServerArgs:\n    model_path: str\n")
    with pytest.raises(FlagsUnreadable, match="declares no --model-path"):
        read_flags(tmp_path)


def test_releases_sort_as_they_were_published() -> None:
    order = ["0.4.10.post2", "0.5.1", "0.5.9", "0.5.10", "0.5.10.post1", "0.5.11"]
    assert sorted(order, key=Release.parse) == order
    assert str(Release.parse("0.5.10.post1")) == "0.5.10.post1"
    with pytest.raises(ReleaseError, match="'newest' is not a release number"):
        Release.parse("newest")


@pytest.mark.parametrize("version", ["0.4.9", "0.5.8", "0.5.23"])
def test_the_release_is_read_from_the_package(tmp_path: Path, version: str) -> None:
    package = unpack(version, tmp_path)
    assert read_version(package) == version
    assert find_package(f"{tmp_path}/sg*ng") == package
    for name in ("_version.py", "version.py"):
        (package / name).unlink(missing_ok=True)
    assert read_version(package) == version  # now from the metadata beside it


def test_a_package_that_cannot_be_found_is_named(tmp_path: Path) -> None:
    with pytest.raises(ReleaseError, match="No SGLang package is in"):
        find_package(f"{tmp_path}/python3*/sglang")
    for python in ("python3.11", "python3.13"):
        (tmp_path / python / "sglang").mkdir(parents=True)
    with pytest.raises(ReleaseError, match="fits several directories"):
        find_package(f"{tmp_path}/python3*/sglang")
    with pytest.raises(ReleaseError, match="has no directory srt"):
        read_version(tmp_path / "python3.11" / "sglang")
