"""Units as written by hand here, seen to serve, at rest; changes by hand are found; what cannot serve is refused."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
UNITS = "/etc/systemd/system"
# The play of converge.yml that is as the inventory says, without the one that is quite different.
OWN = ("--tags", "own")


def directives(host, mode: str) -> dict[str, list[str]]:
    """The lines of a unit: {directive: values in order}."""
    found: dict[str, list[str]] = {}
    for line in host.file(f"{UNITS}/servelab-{mode}.service").content_string.splitlines():
        if "=" in line and not line.startswith("#"):
            name, value = line.split("=", 1)
            found.setdefault(name, []).append(value)
    return found


def flags(host, mode: str) -> list[str]:
    command = json.loads(host.file(f"/etc/servelab/modes/{mode}.json").content_string)["command"]
    return [word for word in command if word.startswith("--")]


def value_of(host, mode: str, flag: str) -> str | None:
    command = json.loads(host.file(f"/etc/servelab/modes/{mode}.json").content_string)["command"]
    for position, word in enumerate(command):
        if word == flag:
            return command[position + 1]
        if word.startswith(f"{flag}="):
            return word.split("=", 1)[1]
    return None


@pytest.mark.parametrize("mode", ["baseline", "eagle3", "wide"])
def test_units_are_valid_and_at_rest(guest, mode):
    assert guest.check_output(f"systemd-analyze verify servelab-{mode}.service 2>&1") == ""
    assert not guest.service(f"servelab-{mode}").is_running
    # No [Install] section: it cannot be started at boot by mistake.
    assert guest.run(f"systemctl is-enabled servelab-{mode}").stdout.strip() == "static"


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


def test_the_other_unit_is_as_described(guest):
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


def test_the_other_flags_are_as_described(guest):
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


def test_the_user_cannot_log_in_and_has_its_groups(guest):
    user = guest.user("llm")
    assert (user.group, user.home, user.shell) == ("llms", "/srv/llm", "/usr/sbin/nologin")
    assert "video" in user.groups
    assert guest.file("/srv/llm").mode == 0o750


@pytest.mark.parametrize("mode", ["baseline", "wide"])
def test_the_mode_was_seen_to_answer(guest, mode):
    assert guest.file(f"/var/lib/servelab/proofs/{mode}.json").exists
    journal = guest.check_output(f"journalctl --unit servelab-{mode} --output cat")
    assert "simulated" in journal
    assert "POST /v1/completions HTTP/1.1" in journal


# What converge.yml gives; it stands in a file of its own so that this search does not find itself.
SECRETS = ("SENTINELapikey4711", "SENTINELadminkey4711", "hf_SENTINELtoken4711")


def test_keys_are_asked_for_and_lie_where_only_those_read_them_who_must(guest):
    places = {"server.yaml": ("llm", 0o400), "hf_token": ("llm", 0o400), "api_key": ("root", 0o400)}
    for name, wanted in places.items():
        file = guest.file(f"/etc/servelab/secrets/{name}")
        assert (file.user, file.mode) == wanted
    assert (guest.file("/etc/servelab/secrets").group, guest.file("/etc/servelab/secrets").mode) == ("llms", 0o750)
    assert value_of(guest, "wide", "--config") == "/etc/servelab/secrets/server.yaml"
    assert "HF_TOKEN_PATH=/etc/servelab/secrets/hf_token" in directives(guest, "wide")["Environment"]


def test_each_start_has_a_log_of_its_own_without_a_secret(guest):
    logs = guest.file("/var/log/servelab/wide").listdir()
    fields = guest.check_output("journalctl -u servelab-wide -o json --output-fields=_SYSTEMD_INVOCATION_ID")
    starts = {json.loads(line).get("_SYSTEMD_INVOCATION_ID") for line in fields.splitlines()}
    assert logs and {name.removesuffix(".log") for name in logs} <= starts
    content = guest.file(f"/var/log/servelab/wide/{logs[0]}").content_string
    assert "'api_key': '[redacted]'" in content or "api_key='[redacted]'" in content


def test_no_secret_is_found_anywhere(guest):
    """On the whole guest: files, journal, what systemd shows, every command line and every environment."""
    for secret in SECRETS:
        found = guest.run(
            "grep -rlaI --exclude-dir=secrets -e %s /etc /opt /root /run /srv /tmp /var 2>/dev/null",
            secret,
        ).stdout.split()
        assert found == []
        assert guest.run("journalctl --all | grep -c -e %s", secret).stdout.strip() == "0"
        shown = "systemctl show 'servelab-*' ; cat /etc/systemd/system/servelab-*; systemctl show-environment"
        assert guest.run(f"({shown}) | grep -c -e %s", secret).stdout.strip() == "0"


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
    used = guest.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    # 4 MiB is what such a card reports when it is idle.
    assert [int(mib) for mib in used] == [4] * 8


def test_unit_and_record_edited_by_hand_are_found_and_alone_written_again(play, guest):
    unit, record = f"{UNITS}/servelab-eagle3.service", "/etc/servelab/modes/baseline.json"
    right = [guest.file(name).content_string for name in (unit, record)]
    guest.check_output(f"sed -i 's/^LimitNOFILE=.*/LimitNOFILE=1024/' {unit}")
    guest.check_output(f"sed -i 's/simserver/simserver2/' {record}")
    repair = [("Write the merged mode for provenance", "lab-gpu1"), ("Write the unit of the mode", "lab-gpu1")]
    checked = play(*OWN, "--check", "--diff")
    assert [one for one in checked.changed if not one[0].startswith("Let systemd")] == repair
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert {line.strip(' ",').replace("simserver2", "simserver") for line in old - new} == {
        "LimitNOFILE=1024",
        "/opt/servelab-lab/bin/simserver",
    }
    assert {line.strip(' ",') for line in new - old} == {"LimitNOFILE=1048576", "/opt/servelab-lab/bin/simserver"}
    assert "LimitNOFILE=1024\n" in guest.file(unit).content_string
    played = play(*OWN)
    assert [one for one in played.changed if not one[0].startswith("Let systemd")] == repair
    assert [guest.file(name).content_string for name in (unit, record)] == right


def test_a_server_that_runs_with_older_settings_is_restarted_only_where_that_is_allowed(play, guest):
    """Also by a run that writes nothing, because an earlier one wrote it. One that is measured is left alone."""
    show = "systemctl show servelab-baseline --property=InvocationID --value"
    note = "/run/servelab/baseline.owner"
    try:
        guest.check_output(f"mkdir -p /run/servelab && echo bench > {note}; systemctl start servelab-baseline")
        started = guest.check_output(show)
        guest.check_output(f"touch {UNITS}/servelab-baseline.service")
        measured = play(*OWN, sglang_server_restart_ok=True)
        (said,) = measured.results["Say that the running server still is the old one"]
        assert said["msg"].endswith("It is being measured or proved, which nobody may spoil: a playbook started it.")
        assert measured.changed == [] and guest.check_output(show) == started
        guest.check_output(f"echo serve > {note}")
        told = play(*OWN)
        (said,) = told.results["Say that the running server still is the old one"]
        assert said["msg"].startswith("servelab-baseline runs with older settings than its files have")
        assert "sglang_server_restart_ok=true" in said["msg"]
        assert told.changed == [] and guest.check_output(show) == started
        restarted = play(*OWN, sglang_server_restart_ok=True)
        assert restarted.changed == [
            ("Restart the running server with its new settings", "lab-gpu1"),
            ("Note again who started it", "lab-gpu1"),
        ]
        assert guest.check_output(show) != started
        assert guest.check_output(f"cat {note}") == "serve"
    finally:
        guest.check_output("systemctl stop servelab-baseline; systemctl reset-failed servelab-baseline || true")


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


def test_a_mode_that_cannot_start_says_why_and_leaves_nothing(play, guest):
    try:
        # The proof of another setup does not count.
        played = play(sglang_server_device_nodes=["/dev/nvidia9"])
    finally:
        repaired = play(*OWN)
    assert not played.ok
    assert "Mode baseline does not serve." in played.said
    assert "/dev/nvidia9 is missing or is not a character device" in played.said
    assert " Remedy: " in played.said
    assert repaired.ok
    assert not guest.service("servelab-baseline").is_running


def test_one_mode_is_started_at_boot_and_no_other(play, guest):
    boot = Path(__file__).resolve().parent.parent / "boot.yml"
    wanted, modes = "/etc/systemd/system/multi-user.target.wants", ("eagle3", "baseline")
    try:
        for mode, states in (("eagle3", ["enabled", "static"]), ("baseline", ["static", "enabled"])):
            assert play(playbook=boot, boot=mode).ok
            asked = [guest.run(f"systemctl is-enabled servelab-{name}").stdout.strip() for name in modes]
            assert asked == states
            assert [name for name in guest.file(wanted).listdir() if "servelab" in name] == [f"servelab-{mode}.service"]
    finally:
        assert play(playbook=boot, boot="").ok
    assert [name for name in guest.file(wanted).listdir() if "servelab" in name] == []


@pytest.fixture(scope="module")
def said(play) -> dict[str, str]:
    """What people are told when a server meets each of its failures."""
    played = play(playbook=Path(__file__).resolve().parent.parent / "faults.yml")
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
    used = guest.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    assert [int(mib) for mib in used] == [4] * 8
