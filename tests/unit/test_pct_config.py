"""The pct planner is held against what the real pct wrote, and against the traps that a naive comparison falls into."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest

from servelab.shared.pct_config import Wanted, canonical, create_argv, explain, gpu_devices, plan, render, set_argv
from servelab.shared.pve_conf import edit_raw, parse_conf

CASES = Path(__file__).parent / "cases"
FIXTURES = Path(__file__).parent / "fixtures"
CAPTURES = [json.loads(line) for line in (FIXTURES / "pct/captures.jsonl").read_text().splitlines()]
NET = "name=eth0,bridge=vmbr0,gw=192.168.77.1,hwaddr=BC:24:11:4C:27:5A,ip=192.168.77.101/24,type=veth"
GUEST = f"""\
arch: amd64
cores: 4
dev0: /dev/nvidia0
dev1: path=/dev/nvidiactl,mode=0666
features: keyctl=0,nesting=1
hostname: gpu1
memory: 1024
mp0: /srv/models,mp=/models,ro=1
mp1: btr:101/vm-101-disk-1.raw,mp=/data,backup=1,size=1G
nameserver: 1.1.1.1 8.8.8.8
net0: {NET}
ostype: debian
rootfs: btr:101/vm-101-disk-0.raw,size=8G
startup: 3
swap: 0
tags: alpha;beta
unprivileged: 1
"""


def sets(text: str, **options: object) -> dict[str, str]:
    return plan(parse_conf(text), Wanted(options=options), text).sets


# ---- the file ----


def test_only_the_running_section_is_the_configuration() -> None:
    text = (CASES / "08-pct-conf-snapshots/129.conf").read_text()
    expected = json.loads((CASES / "08-pct-conf-snapshots/expected.json").read_text())
    conf = parse_conf(text)
    assert conf.current["memory"] == str(expected["current"]["memory"])
    assert conf.current["unprivileged"] == "1"
    devices = [conf.current[f"dev{n}"] for n in range(3)]
    assert [re.sub(r"^path=|,.*$", "", device) for device in devices] == expected["current"]["devs"]
    majors = [int(re.findall(r"c (\d+):", value)[0]) for key, value in conf.raw if key.endswith("devices.allow")]
    assert majors == expected["current"]["cgroup_majors"]
    assert list(canonical("features", conf.current["features"])) == expected["current"]["features"]
    assert conf.pending == {"memory": str(expected["pending"]["memory"])}
    assert conf.pending_delete == expected["pending"]["delete"]
    assert conf.snapshots == expected["snapshots"]
    assert "dev9" not in conf.current  # it stands in the description only
    assert conf.planned["memory"] == "131072" and "swap" not in conf.planned


def test_a_snapshot_may_be_called_pending() -> None:
    conf = parse_conf("memory: 512\n\n[pending]\nmemory: 1024\n")
    assert (conf.pending, conf.snapshots) == ({}, ["pending"])


def test_the_digest_is_the_one_that_pct_accepts() -> None:
    good = next(record for record in CAPTURES if record["name"] == "set_digest_good")
    assert parse_conf(good["before"]).digest == shlex.split(good["cmd"])[-1]


def test_a_raw_line_goes_before_the_first_section_and_nothing_else_moves() -> None:
    text = (CASES / "08-pct-conf-snapshots/129.conf").read_text()
    edited = edit_raw(text, [("lxc.prlimit.memlock", "unlimited")])
    lines = edited.splitlines()
    assert lines.index("lxc.prlimit.memlock: unlimited") == lines.index("[pve:pending]") - 2
    assert [line for line in lines if line != "lxc.prlimit.memlock: unlimited"] == text.splitlines()
    assert edit_raw(edited, [("lxc.prlimit.memlock", "unlimited")]) == edited


def test_a_key_that_lxc_reads_once_ends_with_one_value() -> None:
    text = "#note\nlxc.prlimit.memlock = 64\nlxc.prlimit.memlock: 65\n\n[snap]\nlxc.prlimit.memlock: 1\n"
    edited = edit_raw(text, [("lxc.prlimit.memlock", "unlimited")])
    assert edited == "#note\nlxc.prlimit.memlock: unlimited\n\n[snap]\nlxc.prlimit.memlock: 1\n"


def test_a_mount_of_the_same_place_is_replaced_and_others_stay() -> None:
    text = (
        "memory: 1\nlxc.mount.entry: tmpfs /dev/shm tmpfs size=8G 0 0\nlxc.mount.entry: /a a none bind 0 0\n\n"
        "[snap]\nlxc.mount.entry: tmpfs dev/shm tmpfs size=1G 0 0\n"
    )
    larger = "tmpfs dev/shm tmpfs size=64G 0 0"
    edited = edit_raw(text, [("lxc.mount.entry", larger)])
    assert edited == text.replace("tmpfs /dev/shm tmpfs size=8G 0 0", larger, 1)
    assert edit_raw(edited, [("lxc.mount.entry", larger)]) == edited


def test_a_repeatable_key_gains_a_line_and_loses_none() -> None:
    text = "memory: 512\nlxc.mount.entry: /a a none bind\n"
    assert edit_raw(text, [("lxc.mount.entry", "/b b none bind")]) == text + "lxc.mount.entry: /b b none bind\n"


# ---- what the real pct did ----


def real_sets() -> list[tuple[str, dict[str, str], list[str], str, str]]:
    """Successful single `pct set` calls: name, options, deletions, the file before and after."""
    found = []
    for record in CAPTURES:
        words = shlex.split(re.sub(r"\$'.*'", "TEXT", record["cmd"]))
        if record["rc"] != 0 or words[:2] != ["pct", "set"] or "after" not in record or record["err"]:
            continue
        options: dict[str, str] = {}
        deletions: list[str] = []
        rest = words[3:]
        while rest:
            option, equals, inline = rest.pop(0).lstrip("-").partition("=")
            value = inline if equals else rest.pop(0)
            if option == "delete":
                deletions += re.split(r"[, ]", value)
            elif option not in ("digest", "revert", "description", "tags", "lock", "env"):
                options[option.lower()] = value
        if record["name"] == "run_del_mp0":
            continue  # it leaves the value pending beside its deletion; see the test of the revert below
        found.append((record["name"], options, deletions, record["before"], record["after"]))
    return found


@pytest.mark.parametrize(("name", "options", "deletions", "before", "after"), real_sets(), ids=lambda v: str(v)[:40])
def test_what_the_real_pct_wrote_counts_as_done(
    name: str, options: dict[str, str], deletions: list[str], before: str, after: str
) -> None:
    """The same call planned against the file that the real pct left behind has nothing left to do."""
    wanted = Wanted(options=options, delete=deletions)
    again = plan(parse_conf(after), wanted, after)
    assert not again.changes, (again.sets, again.deletes)
    assert not again.errors


def test_the_captures_exercise_the_planner() -> None:
    assert len(real_sets()) > 50
    changing = [n for n, o, d, b, _a in real_sets() if plan(parse_conf(b), Wanted(options=o, delete=d), b).changes]
    assert len(changing) > 30
    assert {"set_dev0_again_identical", "noop_set", "set_rootfs_same"}.isdisjoint(changing)


# ---- the traps ----


def test_nothing_is_set_that_already_means_the_same() -> None:
    same = {
        "dev0": {"path": "/dev//nvidia0", "mode": "0660"},
        "dev1": {"mode": "0666", "path": "/dev/nvidiactl", "gid": 0},
        "features": {"nesting": True, "keyctl": False},
        "net0": {"name": "eth0", "bridge": "vmbr0", "ip": "192.168.77.101/24", "gw": "192.168.77.1"},
        "nameserver": ["1.1.1.1", "8.8.8.8"],
        "onboot": False,
        "startup": {"order": 3},
        "tags": ["Beta", "alpha", "beta"],
        "unprivileged": True,
        "memory": 1024,
    }
    assert sets(GUEST, **same) == {}


def test_a_feature_taken_away_is_a_change() -> None:
    text = GUEST.replace("keyctl=0", "keyctl=1")
    assert sets(text, features={"nesting": True}) == {"features": "nesting=1"}
    emptied = plan(parse_conf(text), Wanted(options={"features": {}}))
    assert (emptied.sets, emptied.deletes) == ({}, ["features"])  # an empty --features leaves a line behind


def test_the_mac_address_survives_a_change_of_the_net() -> None:
    changed = sets(GUEST, net0={"name": "eth0", "bridge": "vmbr1", "ip": "dhcp"})
    assert changed == {"net0": "name=eth0,bridge=vmbr1,ip=dhcp,hwaddr=BC:24:11:4C:27:5A"}


def test_an_allocated_volume_is_not_allocated_again() -> None:
    mounts = [
        {"source": "/srv/models", "path": "/models", "read_only": True},
        {"source": "btr:1", "path": "/data"},
    ]
    result = plan(parse_conf(GUEST), Wanted(mounts=mounts))
    # backup=1 goes away, as it is not wanted; the volume stays the one that is there.
    assert result.sets == {"mp1": "btr:101/vm-101-disk-1.raw,mp=/data,size=1G"}
    moved = plan(parse_conf(GUEST), Wanted(mounts=[{"source": "other:1", "path": "/data"}]))
    assert moved.sets == {} and "pct move-volume" in moved.errors[0]


def test_a_mount_keeps_its_number_and_a_new_one_takes_a_free_one() -> None:
    mounts = [{"source": "/tank", "path": "/data2"}, {"source": "/srv/other", "path": "/models", "read_only": True}]
    result = plan(parse_conf(GUEST), Wanted(mounts=mounts))
    assert result.sets == {"mp2": "/tank,mp=/data2", "mp0": "/srv/other,mp=/models,ro=1"}


def test_the_root_volume_is_never_touched() -> None:
    assert plan(parse_conf(GUEST), Wanted(options={"rootfs": "btr:8"})).notices == []
    grown = plan(parse_conf(GUEST), Wanted(options={"rootfs": "btr:80"}))
    assert grown.sets == {} and "pct resize" in grown.notices[0]


def test_what_is_fixed_at_creation_is_refused_with_the_remedy() -> None:
    result = plan(parse_conf(GUEST), Wanted(options={"unprivileged": False, "memory": 2048}))
    assert len(result.errors) == 1 and "Proxmox fixes it at creation" in result.errors[0]


def test_a_pending_value_counts_and_its_deletion_reverts_it_first() -> None:
    text = GUEST + "\n[pve:pending]\ndev1: /dev/nvidiactl,mode=0600\n"
    assert sets(text, dev1={"path": "/dev/nvidiactl", "mode": "0600"}) == {}
    assert sets(text, dev1={"path": "/dev/nvidiactl", "mode": "0666"}) == {"dev1": "/dev/nvidiactl,mode=0666"}
    gone = plan(parse_conf(text), Wanted(delete=["dev1"]))
    assert (gone.revert, gone.deletes) == (["dev1"], ["dev1"])


def test_a_pending_deletion_is_not_asked_for_again() -> None:
    text = GUEST + "\n[pve:pending]\ndelete: dev1,swap\n"
    assert not plan(parse_conf(text), Wanted(delete=["dev1"])).changes
    assert sets(text, swap=0) == {"swap": "0"}


def test_what_pct_does_not_keep_as_an_option_is_refused() -> None:
    result = plan(parse_conf(GUEST), Wanted(options={"env": "A=1"}))
    assert result.sets == {} and "lxc.environment.runtime" in result.errors[0]


# ---- devices ----

NODE = [f"/dev/nvidia{n}" for n in (0, 1, 2, 3, 10)] + ["/dev/nvidiactl", "/dev/nvidia-uvm", "/dev/nvidia-uvm-tools"]


def test_all_means_the_cards_that_the_node_has_now_in_their_order() -> None:
    devices, errors = gpu_devices(NODE, "all", {"mode": "0666"})
    assert errors == []
    assert [device["path"] for device in devices] == NODE
    assert devices[0] == {"path": "/dev/nvidia0", "mode": "0666"}


def test_a_missing_card_and_a_missing_uvm_are_named_with_their_remedies() -> None:
    _devices, errors = gpu_devices(["/dev/nvidia0", "/dev/nvidiactl", "/dev/nvidia-uvm-tools"], [0, 9], {})
    assert len(errors) == 2
    assert "/dev/nvidia9" in errors[0] and "has cards 0" in errors[0]
    assert "/dev/nvidia-uvm " in errors[1] and "nvidia-modprobe" in errors[1]


def test_devices_are_managed_as_a_whole_but_other_kinds_are_left_alone() -> None:
    text = (
        "arch: amd64\ndev0: /dev/nvidia7,mode=0666\ndev1: /dev/dri/renderD128\ndev3: /dev/nvidia-uvm,mode=0666\n"
        "dev10: /dev/nvidia-uvm,mode=0666\n"
    )
    devices, _errors = gpu_devices(NODE, [2], {"mode": "0666"})
    result = plan(parse_conf(text), Wanted(devices=devices))
    assert result.deletes == ["dev0", "dev10"]  # another card, and a path given twice
    assert result.sets == {
        "dev2": "/dev/nvidia2,mode=0666",
        "dev4": "/dev/nvidiactl,mode=0666",
        "dev5": "/dev/nvidia-uvm-tools,mode=0666",
    }
    assert set_argv(129, result, "abc") == [
        "set", "129", "--dev2", "/dev/nvidia2,mode=0666", "--dev4", "/dev/nvidiactl,mode=0666",
        "--dev5", "/dev/nvidia-uvm-tools,mode=0666", "--delete", "dev0,dev10", "--digest", "abc",
    ]  # fmt: skip


def test_a_device_whose_removal_waits_for_a_restart_is_still_managed() -> None:
    text = "arch: amd64\ndev0: /dev/nvidia7\ndev1: /dev/dri/renderD128\n\n[pve:pending]\ndelete: dev0,dev1\n"
    result = plan(parse_conf(text), Wanted(devices=[]))
    assert not result.changes
    assert result.managed == {"dev0"}


def test_creation_names_everything() -> None:
    wanted = Wanted(
        options={"hostname": "gpu", "unprivileged": True, "onboot": False, "rootfs": "local:8", "features": {}},
        mounts=[{"source": "/shared", "path": "/shared", "read_only": False}],
        devices=[{"path": "/dev/nvidia0", "mode": "0666"}],
    )
    assert create_argv(129, "local:vztmpl/debian.tar.zst", wanted) == [
        "create", "129", "local:vztmpl/debian.tar.zst", "--hostname", "gpu", "--unprivileged", "1", "--onboot", "0",
        "--rootfs", "local:8", "--mp0", "/shared,mp=/shared", "--dev0", "/dev/nvidia0,mode=0666",
    ]  # fmt: skip


def test_a_value_that_a_property_string_cannot_carry_is_refused() -> None:
    with pytest.raises(ValueError, match="comma"):
        render("mp0", {"volume": "/srv/a,b", "mp": "/x"})


# ---- refusals ----


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("set_dev_mode3digit", "dev1.mode: value does not match the regex pattern."),
        ("set_dev_not_under_dev", "dev1.path: invalid format - /tmp/foo is not a valid device path."),
        ("set_mem_low", "memory: value must have a minimum value of 16."),
        ("set_unknown_option", "Unknown option: foo."),
    ],
)
def test_a_refusal_becomes_one_sentence(name: str, said: str) -> None:
    record = next(record for record in CAPTURES if record["name"] == name)
    assert explain(record["err"], 101) == said


def test_of_the_lines_that_lxc_logs_the_first_is_the_cause() -> None:
    log = (
        "lxc-start 129 20261129165246.804 ERROR    conf - ../src/lxc/conf.c:setup_resource_limits:3096 - Operation "
        "not permitted - Failed to set limit memlock\n"
        "lxc-start 129 20261129165246.804 ERROR    start - ../src/lxc/start.c:lxc_spawn:1865 - Failed to setup "
        "resource limits\nstartup for container '129' failed\n"
    )
    sentence = explain(log, 129)
    assert sentence.startswith("LXC: Operation not permitted - Failed to set limit memlock; startup for container")
    assert "at most the node's own" in sentence and "lxc_spawn" not in sentence


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("set_dev_missing_node", "nvidia-modprobe"),
        ("set_locked", "pct unlock 101"),
        ("set_digest_stale", "run again"),
        ("set_lock_timeout", "another job"),
        ("create_storage_missing", "pvesm status"),
        ("set_net1_nobridge", "bridges that exist"),
        ("create_vm_exists", "another vmid"),
    ],
)
def test_a_known_refusal_comes_with_its_remedy(name: str, remedy: str) -> None:
    record = next(record for record in CAPTURES if record["name"] == name)
    sentence = explain(record["err"], 101)
    assert remedy in sentence and "\n" not in sentence and "OPTIONS" not in sentence
