"""Units as written by hand here, seen to serve, at rest; changes by hand are found; what cannot serve is refused."""

from __future__ import annotations

import os
import re
import subprocess

import pytest
from conftest import ROOT
from units import (
    UNITS,
    assert_cards_are_idle,
    assert_logged_without_a_secret,
    assert_no_secret_anywhere,
    assert_seen_to_answer,
    assert_valid_and_at_rest,
    directives,
    value_of,
)


@pytest.mark.parametrize("mode", ["baseline", "eagle3"])
def test_units_are_valid_and_at_rest(guest, mode):
    assert_valid_and_at_rest(guest, mode)


def test_what_is_compiled_belongs_to_one_stack(guest):
    """The unit names the stack and not the link to it, so that a running server never meets another stack's files."""
    name = guest.check_output("readlink /opt/servelab/stack").rpartition("/")[2]
    assert name.startswith("0.5.23-light-")
    environment = directives(guest, "baseline")["Environment"]
    cache = f"/var/cache/servelab/jit/{name}"
    for line in (
        f"XDG_CACHE_HOME={cache}",
        f"FLASHINFER_WORKSPACE_BASE={cache}",
        f"TRITON_CACHE_DIR={cache}/triton",
        f"TORCHINDUCTOR_CACHE_DIR={cache}/inductor",
        f"CUTE_DSL_CACHE_DIR={cache}/cute_dsl",
        f"CUDA_CACHE_PATH={cache}/cuda",
    ):
        assert [shown.strip('"') for shown in environment].count(line) == 1, line
    (path,) = [shown for shown in environment if shown.strip('"').startswith("PATH=")]
    assert f"/opt/servelab/stacks/{name}/bin:" in path
    directory = guest.file(cache)
    assert (directory.user, directory.group, directory.mode) == ("llm", "llms", 0o750)


def test_the_baseline_is_as_the_inventory_says(guest):
    unit = directives(guest, "baseline")
    assert unit["User"] == ["llm"]
    assert unit["KillMode"] == ["mixed"] and unit["Restart"] == ["no"]
    assert unit["ExecStartPre"] == [
        f"/usr/bin/test -c /dev/{name}" for name in [*(f"nvidia{n}" for n in range(8)), "nvidiactl", "nvidia-uvm"]
    ]
    (others,) = (line.split() for line in unit["Conflicts"])
    assert "servelab-eagle3.service" in others and "servelab-baseline.service" not in others
    assert unit["After"] == ["network.target", " ".join(others)]
    wanted = {
        "--model-path": "/shared/kimi-k2.5-int4",
        "--host": "127.0.0.1",
        "--port": "30000",
        "--tp-size": "8",
        # The name that 0.5.23 gave it.
        "--cuda-graph-max-bs-decode": "128",
        "--max-running-requests": "256",
    }
    assert {flag: value_of(guest, "baseline", flag) for flag in wanted} == wanted


def test_the_user_cannot_log_in_and_has_its_groups(guest):
    user = guest.user("llm")
    assert (user.group, user.home, user.shell) == ("llms", "/srv/llm", "/usr/sbin/nologin")
    assert "video" in user.groups
    assert guest.file("/srv/llm").mode == 0o750


def test_the_mode_was_seen_to_answer(guest):
    assert_seen_to_answer(guest, "baseline")


def test_keys_are_asked_for_and_lie_where_only_those_read_them_who_must(guest):
    places = {"server.yaml": ("llm", 0o400), "hf_token": ("llm", 0o400), "api_key": ("root", 0o400)}
    for name, wanted in places.items():
        file = guest.file(f"/etc/servelab/secrets/{name}")
        assert (file.user, file.mode) == wanted
    assert (guest.file("/etc/servelab/secrets").group, guest.file("/etc/servelab/secrets").mode) == ("llms", 0o750)
    assert value_of(guest, "baseline", "--config") == "/etc/servelab/secrets/server.yaml"
    assert "HF_TOKEN_PATH=/etc/servelab/secrets/hf_token" in directives(guest, "baseline")["Environment"]


def test_each_start_has_a_log_of_its_own_without_a_secret(guest):
    assert_logged_without_a_secret(guest, "baseline")


def test_no_secret_is_found_anywhere(guest):
    assert_no_secret_anywhere(guest)


def test_the_sandbox_is_as_narrow_as_is_said(guest):
    answer = guest.run("systemd-analyze security --no-pager servelab-baseline.service")
    told = re.search(r"Overall exposure level for servelab-baseline\.service: ([0-9.]+) ", answer.stdout)
    # docs/serving.md states it; what is left are the network, device nodes and executable memory.
    assert told and float(told[1]) <= 3.0


def test_the_sandbox_holds_and_leaves_the_server_what_it_writes(guest):
    """Of the server itself, because systemd passes over what a container does not let it do."""
    stack = guest.check_output("readlink -f /opt/servelab/stack").rpartition("/")[2]
    try:
        guest.check_output("systemctl start servelab-baseline")
        pid = guest.check_output("systemctl show servelab-baseline --property=MainPID --value")
        status = dict(line.split(":\t", 1) for line in guest.file(f"/proc/{pid}/status").content_string.splitlines())
        assert (status["CapBnd"], status["NoNewPrivs"], status["Seccomp"]) == ("0" * 16, "1", "2")
        inside = f"nsenter --target {pid} --mount"
        for place in ("/srv/llm", "/var/log/servelab/baseline", f"/var/cache/servelab/jit/{stack}", "/dev/shm", "/tmp"):
            guest.check_output(f"{inside} sh -c 'echo x > {place}/written && rm {place}/written'")
        for place in ("/etc", "/usr", "/root", "/var/lib/servelab", "/opt/servelab/stack"):
            assert "Read-only file system" in guest.run(f"{inside} touch {place}/written").stderr, place
    finally:
        guest.check_output("systemctl stop servelab-baseline")


def test_a_guest_that_refuses_namespaces_is_told_so_and_not_of_device_nodes(guest):
    """systemd ends both alike where a directory is not there, and then not even the checks before the start run."""
    extra = f"{UNITS}/servelab-baseline.service.d"
    guest.check_output(f"mkdir {extra} && printf '[Service]\nReadWritePaths=/nowhere\n' > {extra}/nowhere.conf")
    try:
        guest.run("systemctl daemon-reload && systemctl start servelab-baseline")
        look = ["ansible", "lab-gpu1", "-m", "servelab.sglang.server_probe", "-a", "unit=servelab-baseline port=30000"]
        env = os.environ | {"ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
        told = subprocess.run(look, cwd=ROOT, env=env, capture_output=True, text=True, check=False).stdout
        assert "systemd could not make the namespaces" in told
        assert "Give the guest Proxmox's feature nesting, or set sglang_server_sandbox to false." in told
    finally:
        guest.check_output(f"rm -r {extra} && systemctl daemon-reload && systemctl reset-failed servelab-baseline")


def test_nothing_is_left_on_the_cards(guest):
    assert_cards_are_idle(guest)


def test_unit_and_record_edited_by_hand_are_found_and_alone_written_again(play, guest):
    unit, record = f"{UNITS}/servelab-eagle3.service", "/etc/servelab/modes/baseline.json"
    right = [guest.file(name).content_string for name in (unit, record)]
    guest.check_output(f"sed -i 's/^LimitNOFILE=.*/LimitNOFILE=1024/' {unit}")
    guest.check_output(f"sed -i 's/simserver/simserver2/' {record}")
    repair = [("Write the merged mode for provenance", "lab-gpu1"), ("Write the unit of the mode", "lab-gpu1")]
    checked = play("--check", "--diff")
    assert [one for one in checked.changed if not one[0].startswith("Let systemd")] == repair
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert {line.strip(' ",').replace("simserver2", "simserver") for line in old - new} == {
        "LimitNOFILE=1024",
        "/opt/servelab-lab/bin/simserver",
    }
    assert {line.strip(' ",') for line in new - old} == {"LimitNOFILE=1048576", "/opt/servelab-lab/bin/simserver"}
    assert "LimitNOFILE=1024\n" in guest.file(unit).content_string
    played = play()
    assert [one for one in played.changed if not one[0].startswith("Let systemd")] == repair
    assert [guest.file(name).content_string for name in (unit, record)] == right


def test_wrong_settings_are_told_at_once_and_before_anything_changes(play, guest):
    before = guest.file(f"{UNITS}/servelab-baseline.service").content_string
    played = play(
        sglang_server_host="0.0.0.0",
        sglang_server_api_key="",
        sglang_server_admin_api_key="",
        sglang_server_port=80,
        sglang_server_trust_remote_code=True,
        sglang_server_user="root",
        sglang_server_modes=["baseline", "eagle4"],
    )
    assert not played.ok
    assert "sglang_server_host is 0.0.0.0, which others can reach: that needs sglang_server_api_key" in played.said
    assert "An ssh tunnel to 127.0.0.1 needs neither." in played.said
    assert "sglang_server_port is 80, but must lie between 1024 and 65535." in played.said
    assert "sglang_server_trust_remote_code runs code that came with the model" in played.said
    assert "eagle4" in played.said
    assert played.changed == []
    assert guest.file(f"{UNITS}/servelab-baseline.service").content_string == before


def test_a_flag_that_the_release_does_not_have_is_refused(play):
    played = play(sglang_server_extra_args={"random_sed": 4})
    assert not played.ok
    assert "Mode baseline: random_sed is not a flag of SGLang 0.5.23; the nearest one is random_seed." in played.said
    assert played.changed == []
