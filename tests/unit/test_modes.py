"""Modes merge predictably, machines fill in their settings, and every mistake gets a sentence."""

from pathlib import Path

import pytest
import yaml

from servelab.shared import modes
from servelab.shared.modes_unit import unit_command, unit_env, unit_word

SHIPPED = Path(__file__).parents[2] / "roles/sglang_server/vars/modes"
SETTINGS = {
    "model_path": "/models/kimi", "draft_model_path": "/models/draft", "served_model_name": None, "host": "127.0.0.1",
    "port": 30000, "tp_size": 8, "mem_fraction_static": 0.55, "cuda_graph_max_bs": 128, "trust_remote_code": None,
    "max_running_requests": 256, "model_revision": None,
}  # fmt: skip


def shipped() -> dict:
    return {path.stem: yaml.safe_load(path.read_text()) for path in SHIPPED.glob("*.yml")}


FAMILY = {
    "base": {
        "description": "b",
        "args": {"tp_size": 8, "enable_metrics": True, "port": "${port}"},
        "env": {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL"},
        "patches": ["x"],
        "requires": {"sglang": ">=0.5.8"},
        "evidence": [{"result": "1"}],
    },
    "child": {
        "description": "c",
        "extends": "base",
        "args": {"tp_size": 4, "enable_metrics": None, "page_size": 16},
        "env": {"NCCL_PROTO": None, "OMP_NUM_THREADS": 8},
    },
    "grandchild": {"description": "g", "extends": "child", "args": {"page_size": None}, "patches": []},
}


def test_a_child_changes_in_place_adds_last_and_removes_by_null() -> None:
    mode = modes.merge(FAMILY, "child")
    assert mode["lineage"] == ["base", "child"]
    assert list(mode["args"].items()) == [("tp_size", 4), ("port", "${port}"), ("page_size", 16)]
    assert mode["env"] == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": 8}
    assert mode["patches"] == ["x"]
    assert mode["requires"] == {"sglang": ">=0.5.8"}
    assert mode["evidence"] == []


def test_a_grandchild_removes_what_its_parent_added() -> None:
    mode = modes.merge(FAMILY, "grandchild")
    assert mode["lineage"] == ["base", "child", "grandchild"]
    assert mode["args"] == {"tp_size": 4, "port": "${port}"}
    assert mode["patches"] == []


def test_merging_does_not_change_the_catalogue() -> None:
    before = repr(FAMILY)
    modes.merge(FAMILY, "grandchild")["patches"].append("y")
    assert repr(FAMILY) == before


def test_the_shipped_eagle3_rendered_by_hand() -> None:
    mode = modes.render(
        shipped(), "eagle3", SETTINGS, {"page_size": 64, "enable_metrics": None}, {"NCCL_DEBUG": "WARN"}
    )
    assert mode["args"] == {
        "model_path": "/models/kimi",
        "host": "127.0.0.1",
        "port": 30000,
        "tp_size": 8,
        "mem_fraction_static": 0.55,
        "cuda_graph_max_bs": 128,
        "max_running_requests": 256,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/models/draft",
        "speculative_num_steps": 2,
        "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3,
        "page_size": 64,
    }
    assert mode["env"] == {"NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "NCCL_DEBUG": "WARN"}


def test_every_shipped_mode_is_well_formed_and_says_where_its_evidence_comes_from() -> None:
    catalogue = shipped()
    assert {"baseline", "eagle3"} <= set(catalogue)
    assert modes.check_all(catalogue) == []
    for mode in catalogue.values():
        assert mode["evidence"]
        assert all("not measured by us" in item["source"] for item in mode["evidence"])


def test_a_placeholder_inside_text_and_types_of_lone_ones() -> None:
    catalogue = {
        "m": {"description": "d", "args": {"a": "http://${host}:${port}/", "b": "${port}", "c": ["${tp_size}"]}}
    }
    assert modes.render(catalogue, "m", SETTINGS)["args"] == {"a": "http://127.0.0.1:30000/", "b": 30000, "c": [8]}


@pytest.mark.parametrize(
    "catalogue, name, sentence",
    [
        (FAMILY, "chld", "There is no mode 'chld'; the known modes are: base, child, grandchild. Did you mean child?"),
        (FAMILY, "", "There is no mode ''; the known modes are: base, child, grandchild."),
        ({"a": {"description": "d", "extends": "b"}, "b": {"description": "d", "extends": "a"}}, "a",
         "Mode 'a' extends itself through a → b → a; break the circle."),
        ({"a": {"description": "d", "extends": "gone"}}, "a", "Mode 'a' extends 'gone', which does not exist."),
        ({"a": {"description": "d", "arg": {}}}, "a", "Mode 'a' has an unknown key 'arg'; it may have description,"),
        ({"a": {"description": "d", "args": ["--tp"]}}, "a", "Mode 'a': args is ['--tp'], but must be a mapping."),
        ({"a": {"args": {}}}, "a", "Mode 'a' has no description"),
        ({"a": {"description": "d", "args": {"--tp-size": 1}}}, "a", "'--tp-size' is not a flag's name"),
        ({"a": {"description": "d", "args": {"api_key": "x"}}}, "a", "api_key is a secret"),
        ({"a": {"description": "d", "env": {"HF_TOKEN": "x"}}}, "a", "HF_TOKEN is a secret"),
        ({"a": {"description": "d", "env": {"X": True}}}, "a", "X is True, but an environment variable is text"),
        ({"a": {"description": "d", "args": {"x": "${prot}"}}}, "a", "x asks for ${prot}; the settings are: "),
        ({"a": {"description": "d", "args": {"x": "${served_model_name}"}}}, "a",
         "x needs sglang_server_served_model_name, which is not set"),
    ],
)  # fmt: skip
def test_mistakes_get_a_sentence(catalogue: dict, name: str, sentence: str) -> None:
    with pytest.raises(modes.ModeError) as error:
        modes.render(catalogue, name, SETTINGS)
    assert sentence in str(error.value)


def test_all_mistakes_at_once() -> None:
    broken = {"m": {"description": "d", "args": {"x": "${nope}", "y": "${served_model_name}"}, "env": {"Z": "${no}"}}}
    with pytest.raises(modes.ModeError) as error:
        modes.render(broken, "m", SETTINGS)
    assert len(error.value.errors) == 3


@pytest.mark.parametrize(
    "version, spec, fits",
    [
        ("0.5.23", ">=0.5.10", True),
        ("0.5.9", ">=0.5.10", False),
        ("0.5.12.post1", ">0.5.12", True),
        ("0.5.12", "==0.5.12.0", True),
        ("0.5.23", ">=0.5.10,<0.5.20", False),
        ("2.11.0+cu130", "==2.11.0", True),
    ],
)
def test_versions(version: str, spec: str, fits: bool) -> None:
    assert modes.satisfies(version, spec) is fits


def test_what_a_mode_requires() -> None:
    assert modes.unmet({"sglang": ">=0.5.10"}, {"sglang": "0.5.23"}) == []
    assert modes.unmet({"sglang": ">=0.5.10"}, {"sglang": None}) == ["it needs sglang >=0.5.10, which is not installed"]


# -- words of a unit ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word, expected",
    [
        ("--tp-size", "--tp-size"),
        (8, "8"),
        ("/models/a b", '"/models/a b"'),
        ("50%", "50%%"),
        ("$HOME", "$$HOME"),
        ('{"1": [1]}', '"{\\"1\\": [1]}"'),
        ("a\\b", '"a\\\\b"'),
        ("", '""'),
        (";", '";"'),
    ],
)
def test_words_survive_systemd(word: object, expected: str) -> None:
    assert unit_word(word) == expected


def test_a_line_break_is_refused() -> None:
    with pytest.raises(ValueError, match="line break"):
        unit_word("a\nExecStartPre=/bin/evil")


def test_environment_does_not_expand_dollars() -> None:
    assert unit_env("P", "a$b 5%") == '"P=a$b 5%%"'


def test_a_command_reads_one_flag_a_line() -> None:
    argv = ["/opt/p/bin/python", "-m", "sglang.launch_server", "--tp-size", 8, "--enable-metrics", "--bs", 1, 2]
    assert unit_command(argv) == (
        "/opt/p/bin/python -m sglang.launch_server \\\n    --tp-size 8 \\\n    --enable-metrics \\\n    --bs 1 2"
    )


def test_a_treatment_adds_up_along_the_lineage():
    catalogue = {
        "a": {"description": "a", "treatment": ["speculative_*"]},
        "b": {"description": "b", "extends": "a", "treatment": ["kv_pool", "speculative_*"]},
    }
    assert modes.merge(catalogue, "b")["treatment"] == ["speculative_*", "kv_pool"]
    assert modes.check("a", {"description": "a", "treatment": "speculative_*"}) == [
        "Mode 'a': treatment is 'speculative_*', but must be a list."
    ]
