"""Modes merge predictably, machines fill in their settings, and every mistake gets a sentence."""

from pathlib import Path

import pytest
import yaml

from servelab.shared import modes, modes_adaptive, modes_needs, modes_show
from servelab.shared.modes_unit import unit_command, unit_env, unit_word

SHIPPED = Path(__file__).parents[2] / "roles/sglang_server/vars/modes"
SETTINGS = {
    "model_path": "/models/kimi", "draft_model_path": "/models/draft", "served_model_name": None, "host": "127.0.0.1",
    "port": 30000, "tp_size": 8, "mem_fraction_static": 0.55, "cuda_graph_max_bs": 128, "trust_remote_code": None,
    "max_running_requests": 256, "model_revision": None, "adaptive_config": "",
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
        "probe": {"must": {"a": {"log": ["A"], "means": "no A"}, "b": {"log": ["B"], "means": "no B"}}},
        "evidence": [{"result": "1"}],
    },
    "child": {
        "description": "c",
        "extends": "base",
        "args": {"tp_size": 4, "enable_metrics": None, "page_size": 16},
        "env": {"NCCL_PROTO": None, "OMP_NUM_THREADS": 8},
        "probe": {"must": {"a": None}, "path": "P"},
    },
    "grandchild": {"description": "g", "extends": "child", "args": {"page_size": None}, "patches": []},
}


def test_a_child_changes_in_place_adds_last_and_removes_by_null() -> None:
    mode = modes.merge(FAMILY, "child")
    assert mode["lineage"] == ["base", "child"]
    assert list(mode["args"].items()) == [("tp_size", 4), ("port", "${port}"), ("page_size", 16)]
    assert mode["env"] == {"NCCL_ALGO": "Ring", "OMP_NUM_THREADS": 8}
    assert mode["patches"] == ["x"]
    assert mode["probe"] == {"must": {"b": {"log": ["B"], "means": "no B"}}, "path": "P"}
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
        shipped(),
        "eagle3",
        SETTINGS,
        {"page_size": 64, "enable_metrics": None, "enable_cache_report": None},
        {"NCCL_DEBUG": "WARN"},
    )
    assert mode["args"] == {
        "model_path": "/models/kimi",
        "host": "127.0.0.1",
        "port": 30000,
        "tp_size": 8,
        "mem_fraction_static": 0.55,
        "cuda_graph_max_bs": 128,
        "max_running_requests": 256,
        "disable_custom_all_reduce": True,
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
        assert all(item["result"] and item["conditions"] for item in mode["evidence"])


def test_two_parents_merge_in_their_order_and_a_common_one_counts_once() -> None:
    catalogue = {
        "root": {"description": "r", "args": {"a": 1, "b": 1}, "env": {"E": "root"}, "patches": ["p"]},
        "left": {"description": "l", "extends": "root", "args": {"a": 2, "c": 2}, "patches": ["q"]},
        "right": {"description": "r", "extends": "root", "args": {"c": 3, "b": None}, "env": {"E": "right"}},
        "both": {"description": "b", "extends": ["left", "right"]},
    }
    mode = modes.merge(catalogue, "both")
    assert mode["lineage"] == ["root", "left", "right", "both"]
    assert mode["args"] == {"a": 2, "c": 3}
    assert mode["env"] == {"E": "right"}
    assert mode["patches"] == ["p", "q"]


def test_eagle3_custom_ar_is_exactly_both_and_brings_no_setting_of_its_own() -> None:
    catalogue = shipped()
    assert set(catalogue["eagle3_custom_ar"]) == {"description", "extends", "evidence"}
    mode = modes.render(catalogue, "eagle3_custom_ar", {**SETTINGS, "mem_fraction_static": None})
    assert mode["args"] == {
        "model_path": "/models/kimi", "host": "127.0.0.1", "port": 30000, "tp_size": 8, "cuda_graph_max_bs": 128,
        "max_running_requests": 256, "enable_metrics": True, "enable_cache_report": True,
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "/models/draft", "speculative_num_steps": 2, "speculative_eagle_topk": 1,
        "speculative_num_draft_tokens": 3, "mem_fraction_static": "0.55", "enable_p2p_check": True,
    }  # fmt: skip
    assert mode["env"] == {
        "NCCL_ALGO": "Ring", "NCCL_PROTO": "LL", "SGLANG_FORCE_CUSTOM_AR_PCIE": "1",
        "SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2": "0", "SGLANG_CUSTOM_ALLREDUCE_ALGO": "1stage",
    }  # fmt: skip
    assert mode["patches"] == ["custom_allreduce"]


def test_a_machines_own_fraction_wins_over_a_modes() -> None:
    assert modes.render(shipped(), "custom_ar_pcie", SETTINGS)["args"]["mem_fraction_static"] == 0.55
    settings = {**SETTINGS, "mem_fraction_static": 0.8}
    assert modes.render(shipped(), "custom_ar_pcie", settings)["args"]["mem_fraction_static"] == 0.8


def test_throughput_leaves_algorithm_and_protocol_to_nccl() -> None:
    assert modes.render(shipped(), "nccl_throughput", SETTINGS)["env"] == {
        "NCCL_P2P_DISABLE": "1", "NCCL_MIN_NCHANNELS": "16", "NCCL_MAX_NCHANNELS": "32", "NCCL_BUFFSIZE": "33554432",
    }  # fmt: skip


def test_an_adaptive_mode_without_a_configuration_says_where_one_comes_from() -> None:
    with pytest.raises(modes.ModeError) as error:
        modes.render(shipped(), "eagle3_adaptive", SETTINGS)
    assert str(error.value) == (
        "Mode 'eagle3_adaptive': speculative_adaptive_config needs sglang_server_adaptive_config, which is not set for "
        "this machine; it is made from a measured crossover. Measure baseline and eagle3 as a campaign, and name the "
        "configuration that the report recommends."
    )


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
        ({"a": {"description": "d", "requires": {"torch": ">=2"}}}, "a", "requires has an unknown key 'torch'"),
        ({"a": {"description": "d", "requires": {"sglang": "0.5.10"}}}, "a", "'0.5.10' is not a version requirement"),
        ({"a": {"description": "d", "requires": {"architectures": ["12.0"]}}}, "a", "'12.0' is not an architecture"),
        ({"a": {"description": "d", "requires": {"world_sizes": ["8"]}}}, "a", "'8' is not a number of ranks"),
        ({"a": {"description": "d", "requires": {"toolchain": "nvcc"}}}, "a", "requires.toolchain is 'nvcc', but must"),
        ({"a": {"description": "d", "patches": ["custom_ar"]}}, "a", "patches names 'custom_ar'; the known patches"),
        ({"a": {"description": "d", "probe": {"log": []}}}, "a", "probe has an unknown key 'log'"),
        ({"a": {"description": "d", "probe": {"must": {"x": {"log": "A", "means": "m"}}}}}, "a",
         "probe.must.x must have a list log"),
        ({"a": None}, "a", "Mode 'a' is not a mapping; its file needs at least a description."),
        ({"a": {"description": "d", "extends": 5}}, "a", "extends is 5, but must be a text or list"),
        ({"a": {"description": "d", "extends": [1]}}, "a", "extends is [1], but must be a mode's name or a list"),
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
    assert modes_needs.satisfies(version, spec) is fits


# -- for people ---------------------------------------------------------------------------------------------------

LEDGER = """\
{"mode": "baseline", "status": "ok", "best_tok_s": 88, "time": "2026-11-01T10:00:00Z", "sglang_version": "0.5.20"}
{"mode": "baseline", "status": "ok", "best_tok_s": 89.5, "time": "2026-11-02T10:00:00Z", "sglang_version": "0.5.23",
not json
{"mode": "eagle3", "status": "failed", "reason": "out of GPU memory. Lower it.", "time": "2026-11-03T10:00:00Z",
 "best_tok_s": null}
""".replace(",\n ", ", ").replace('"0.5.23",\n', '"0.5.23", "simulated": {"profile": "story", "time_scale": 5}}\n')


def test_the_last_result_of_a_mode() -> None:
    runs = modes_show.ledger_lines(LEDGER)
    assert len(runs) == 3
    assert modes_show.last_result("baseline", runs) == "89.5 tok/s, simulated story, 0.5.23, 2026-11-02"
    assert modes_show.last_result("eagle3", runs) == "failed, out of GPU memory, 2026-11-03"
    assert modes_show.last_result("ngram", runs) == "never run"


def test_the_table_has_every_mode_with_its_needs() -> None:
    lines = modes_show.table(shipped(), modes_show.ledger_lines(LEDGER))
    assert lines[0].split() == ["mode", "what", "needs", "last", "result"]
    assert [line.split()[0] for line in lines[2:]] == sorted(shipped())
    row = next(line for line in lines if line.startswith("pcie_ipc"))
    assert " ".join(row.split()).endswith("SGLang >=0.5.22, 2, 4 or 8 ranks, nvcc, g++ and ninja never run")
    assert next(line for line in lines if line.startswith("b12x")).split()[-3:] == ["refused", "never", "run"]


def test_what_makes_one_mode_another() -> None:
    assert modes_show.difference(shipped(), "nccl_throughput", "baseline") == [
        "- env.NCCL_ALGO: Ring",
        "- env.NCCL_PROTO: LL",
        "+ env.NCCL_P2P_DISABLE: 1",
        "+ env.NCCL_MIN_NCHANNELS: 16",
        "+ env.NCCL_MAX_NCHANNELS: 32",
        "+ env.NCCL_BUFFSIZE: 33554432",
        "+ treatment: NCCL_*",
        "+ treatment: kv_pool",
    ]
    assert modes_show.difference(shipped(), "baseline_graph512", "baseline")[:2] == [
        "~ args.cuda_graph_max_bs: ${cuda_graph_max_bs?} → 512",
        "~ args.max_running_requests: ${max_running_requests?} → 512",
    ]
    assert modes_show.difference(shipped(), "eagle3", "eagle3") == [
        "eagle3 and eagle3 are the same but for their names."
    ]


# -- the adaptive configuration -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("document", "sentences"),
    [
        ({"1": {"candidate_steps": [0, 2]}, "40": {"candidate_steps": [0]}, "ema_alpha": 0.2}, []),
        ([], ["it must map batch sizes"]),
        ({"ema_alpha": 0.2}, ["it names no batch size"]),
        ({"1": {"candidate_steps": [1, 3]}},
         ["speculative_num_steps is 2, but must be one of its candidate steps (1, 3)"]),
        ({"1": {"candidate_steps": [2]}, "8": {"candidate_steps": []}, "16": {"candidate_steps": [-1]}, "32": [0]},
         ["batch size 8 needs", "batch size 16 needs", "batch size 32 needs"]),
    ],
)  # fmt: skip
def test_an_adaptive_configuration_is_checked_before_a_start(document: object, sentences: list[str]) -> None:
    found = modes_adaptive.errors(document, {"speculative_num_steps": 2, "speculative_eagle_topk": 1})
    assert len(found) == len(sentences)
    assert all(text.startswith(sentence) for text, sentence in zip(found, sentences, strict=True)), found


def test_only_chains_adapt() -> None:
    document = {"1": {"candidate_steps": [2]}}
    assert modes_adaptive.errors(document, {"speculative_num_steps": 2, "speculative_eagle_topk": 4}) == [
        "speculative_eagle_topk is 4, and SGLang adapts chains only; set it to 1."
    ]


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
