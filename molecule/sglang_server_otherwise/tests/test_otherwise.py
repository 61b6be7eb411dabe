"""A mode of one's own with most variables changed: its unit as written by hand here, seen to serve, at rest."""

from __future__ import annotations

from units import (
    UNITS,
    assert_cards_are_idle,
    assert_logged_without_a_secret,
    assert_no_secret_anywhere,
    assert_seen_to_answer,
    assert_valid_and_at_rest,
    directives,
    flags,
    value_of,
)


def test_the_unit_is_valid_and_at_rest(guest):
    assert_valid_and_at_rest(guest, "wide")


def test_the_unit_is_as_described(guest):
    unit = directives(guest, "wide")
    assert (unit["User"], unit["Group"], unit["WorkingDirectory"]) == (["llm"], ["llms"], ["/srv/llm"])
    assert unit["TimeoutStopSec"] == ["33"]
    assert unit["ExecStartPre"] == [f"/usr/bin/test -c /dev/{name}" for name in ["nvidia4", "nvidia5", "nvidiactl"]]
    # % begins a specifier of systemd.
    assert unit["Description"][0].endswith("EAGLE-3 with a wider tree, 100%% ours")
    environment = unit["Environment"]
    assert "HOME=/srv/llm" in environment and "CUDA_HOME=/srv/other/cuda" in environment
    assert "NCCL_PROTO" in "".join(environment) and "LL128" in "".join(environment)
    assert not [line for line in environment if line.startswith("NCCL_ALGO")]
    assert unit["ExecStart"] == ["/usr/bin/python3 /opt/servelab/run/run_server.py \\"]
    text = guest.file(f"{UNITS}/servelab-wide.service").content_string
    assert (
        "    --keep 7 \\\n    --secrets /etc/servelab/secrets/server.yaml \\\n    --logs /var/log/servelab/wide \\\n"
        "    -- /usr/bin/env OTHER=1 /opt/servelab-lab/bin/simserver \\\n    --model-path example/kimi"
    ) in text


def test_the_environment_arrives_as_written(guest):
    shown = guest.check_output("systemctl show servelab-wide --property=Environment")
    assert '"NCCL_DEBUG_FILE=/tmp/a b%h"' in shown
    assert "OMP_NUM_THREADS=4" in shown


def test_the_flags_are_as_described(guest):
    wanted = {
        "--model-path": "example/kimi",
        "--revision": "0123abc",
        "--served-model-name": "kimi",
        "--host": "localhost",
        "--port": "31234",
        "--tp-size": "4",
        "--mem-fraction-static": "0.81",
        "--max-running-requests": "32",
        "--random-seed": "7",
        "--log-level": "debug",
        "--speculative-draft-model-path": "/srv/other/draft",
        "--speculative-num-steps": "2",
        "--speculative-eagle-topk": "4",
        "--speculative-num-draft-tokens": "8",
        "--enable-metrics": None,
        "--cuda-graph-max-bs-decode": None,
    }
    assert {flag: value_of(guest, "wide", flag) for flag in wanted} == wanted
    assert "--trust-remote-code" in flags(guest, "wide")
    assert "--enable-metrics" not in flags(guest, "wide")


def test_the_mode_was_seen_to_answer(guest):
    assert_seen_to_answer(guest, "wide")
    assert_cards_are_idle(guest)


def test_its_keys_are_in_their_files_and_nowhere_else(guest):
    assert value_of(guest, "wide", "--config") == "/etc/servelab/secrets/server.yaml"
    assert "HF_TOKEN_PATH=/etc/servelab/secrets/hf_token" in directives(guest, "wide")["Environment"]
    assert_logged_without_a_secret(guest, "wide")
    assert_no_secret_anywhere(guest)
