"""Servers over time: restarted where that is allowed, started at boot, and what people are told when one fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from units import UNITS, assert_cards_are_idle

HERE = Path(__file__).resolve().parent.parent
# The modes of the inventory, beside the one of converge.yml.
SHIPPED = HERE / "shipped.yml"


def test_a_server_that_runs_with_older_settings_is_restarted_only_where_that_is_allowed(play, guest):
    """Also by a run that writes nothing, because an earlier one wrote it. One that is measured is left alone."""
    show = "systemctl show servelab-baseline --property=InvocationID --value"
    note = "/run/servelab/baseline.owner"
    assert play(playbook=SHIPPED).ok
    try:
        guest.check_output(f"mkdir -p /run/servelab && echo bench > {note}; systemctl start servelab-baseline")
        started = guest.check_output(show)
        guest.check_output(f"touch {UNITS}/servelab-baseline.service")
        measured = play(playbook=SHIPPED, sglang_server_restart_ok=True)
        (said,) = measured.results["Say that the running server still is the old one"]
        assert said["msg"].endswith("It is being measured or proved, which nobody may spoil: a playbook started it.")
        assert measured.changed == [] and guest.check_output(show) == started
        guest.check_output(f"echo serve > {note}")
        told = play(playbook=SHIPPED)
        (said,) = told.results["Say that the running server still is the old one"]
        assert said["msg"].startswith("servelab-baseline runs with older settings than its files have")
        assert "sglang_server_restart_ok=true" in said["msg"]
        assert told.changed == [] and guest.check_output(show) == started
        restarted = play(playbook=SHIPPED, sglang_server_restart_ok=True)
        assert restarted.changed == [
            ("Restart the running server with its new settings", "lab-gpu1"),
            ("Note again who started it", "lab-gpu1"),
        ]
        assert guest.check_output(show) != started
        assert guest.check_output(f"cat {note}") == "serve"
    finally:
        guest.check_output("systemctl stop servelab-baseline; systemctl reset-failed servelab-baseline || true")


def test_one_mode_is_started_at_boot_and_no_other(play, guest):
    wanted, modes = "/etc/systemd/system/multi-user.target.wants", ("eagle3", "baseline")
    try:
        for mode, states in (("eagle3", ["enabled", "static"]), ("baseline", ["static", "enabled"])):
            assert play(playbook=SHIPPED, boot=mode).ok
            asked = [guest.run(f"systemctl is-enabled servelab-{name}").stdout.strip() for name in modes]
            assert asked == states
            assert [name for name in guest.file(wanted).listdir() if "servelab" in name] == [f"servelab-{mode}.service"]
    finally:
        assert play(playbook=SHIPPED, boot="").ok
    assert [name for name in guest.file(wanted).listdir() if "servelab" in name] == []


def test_a_mode_that_cannot_start_says_why_and_leaves_nothing(play, guest):
    try:
        # The proof of another setup does not count.
        played = play(playbook=SHIPPED, sglang_server_prove=["baseline"], sglang_server_device_nodes=["/dev/nvidia9"])
    finally:
        repaired = play(playbook=SHIPPED)
    assert not played.ok
    assert "Mode baseline does not serve." in played.said
    assert "/dev/nvidia9 is missing or is not a character device" in played.said
    assert " Remedy: " in played.said
    assert repaired.ok
    assert not guest.service("servelab-baseline").is_running


@pytest.fixture(scope="module")
def said(play) -> dict[str, str]:
    """What people are told when a server meets each of its failures."""
    played = play(playbook=HERE / "faults.yml")
    assert played.ok, played.said
    return {fault: " ".join(text.split()) for fault, text in played.results["Tell what was said"][0]["said"].items()}


@pytest.mark.parametrize(
    ("fault", "cause", "remedy"),
    [
        (
            "oom_kv_pool",
            "out of GPU memory while the KV cache was allocated",
            "Lower sglang_server_mem_fraction_static",
        ),
        (
            "oom_graph_capture",
            "out of GPU memory while CUDA graphs were captured.",
            "or capture less",
        ),
        (
            "unsupported_architecture",
            "requires SM90 or SM10X NVIDIA GPUs",
            "Choose another way for these cards",
        ),
        ("assertion", "Flashinfer MoE A2A is only supported with flashinfer_cutlass moe runner backend", "Remedy: "),
        ("hang_nccl_init", "No news for 1", "NCCL_P2P_DISABLE=1"),
        (
            "death_on_first_request",
            "kernel needs more shared memory than sm_120 has.",
            "Choose another attention backend",
        ),
        ("garbage_output", "wrong: Wrong output: every answer is one token repeated ('!!!!", ""),
        ("fell_back_to_nccl", "the custom all-reduce could not be set up", ""),
    ],
)
def test_a_failure_of_the_server_is_told_with_cause_and_remedy(said, fault, cause, remedy):
    assert cause in said[fault]
    assert remedy in said[fault]


def test_failures_leave_nothing_running(said, guest):
    assert guest.run("systemctl list-units --no-legend --state=active,failed 'servelab-*.service'").stdout == ""
    assert_cards_are_idle(guest)
