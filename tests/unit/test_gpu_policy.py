"""Who may be released. The rules are written out here by hand; the last test looks for a world that breaks them."""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import pytest

from servelab.shared.gpu_policy import UnknownHolders, gpu_ranges, plan, table, why_not_clean

CASES = Path(__file__).parent / "cases"
UNIT = "servelab-baseline.service"
BENCH = {UNIT: "bench"}
LISTED = "on the protect list: dcgm-exporter"


def holder(pid: int, **changes) -> dict:
    return {
        "pid": pid,
        "ns_pid": pid,
        "ns_pids": [pid],
        "ppid": 1,
        "start_time": pid * 100,
        "since": "2026-11-29T10:00:00Z",
        "vmid": None,
        "unit": None,
        "cgroup": "/",
        "user": "root",
        "name": "python3",
        "command": "python3 -m sglang.launch_server",
        "devices": ["nvidia0"],
        "gpus": [0],
        "state": "S",
        "protected": None,
    } | changes


def on_node(node_pid: int, inner: dict, vmid: int = 129, **changes) -> dict:
    """The same process as the node sees it."""
    return (
        inner
        | {
            "pid": node_pid,
            "ns_pids": [node_pid, inner["pid"]],
            "ns_pid": inner["pid"],
            "vmid": vmid,
            "cgroup": f"/lxc/{vmid}/ns{inner['cgroup']}",
        }
        | changes
    )


def view(name: str, *holders: dict, owners: dict | None = None, gpus: tuple[int, ...] = (0, 1), **changes) -> dict:
    return {
        "holders": list(holders),
        "complete": True,
        "view": name,
        "gpus": list(gpus),
        "owners": owners or {},
    } | changes


def in_unit(pid: int, unit: str = UNIT, **changes) -> dict:
    return holder(pid, unit=unit, cgroup=f"/system.slice/{unit}", **changes)


def pids(holders: list[dict]) -> list[int]:
    return [h["pid"] for h in holders]


def test_what_a_benchmark_left_behind_is_released_and_swept():
    ours = in_unit(1502)
    decided = plan(view("guest", ours, owners=BENCH), view("node", on_node(4127, ours)), 129)
    assert pids(decided["release"]) == [1502] and decided["release"][0]["node_pid"] == 4127
    assert decided["sweep"] and not decided["refuse"] and decided["blocking"] == 1
    assert decided["view"] == "node and guest"


@pytest.mark.parametrize("owner", ["prove", "stopped"])
def test_what_survived_a_proof_or_a_stopped_server_goes_too(owner):
    assert pids(plan(view("guest", in_unit(1502), owners={UNIT: owner}))["release"]) == [1502]


def test_what_our_own_supervisor_knows_needs_no_cgroup():
    kept = holder(7, unit=UNIT, supervised=True, cgroup="/user.slice/session-3.scope", stop=f"supervise.py stop {UNIT}")
    assert pids(plan(view("guest", kept, owners=BENCH))["release"]) == [7]
    # The name alone is nobody's word.
    assert pids(plan(view("guest", kept | {"supervised": False}, owners=BENCH))["refuse"]) == [7]
    (refused,) = plan(view("guest", kept, owners={UNIT: "serve"}))["refuse"]
    assert refused["action"] == f"a server in use: `supervise.py stop {UNIT}`, or set bench_stop_ok=true"


def test_processes_that_nobody_could_look_at_may_be_allowed():
    clean = {"guest": {"clean": True, "reasons": []}}
    decided = plan(view("guest", complete=False))
    assert why_not_clean(decided, clean)
    assert why_not_clean(decided, clean, unseen_ok=True) == []


@pytest.mark.parametrize("owners", [{}, {UNIT: "serve"}, {UNIT: ""}, {"servelab-eagle3.service": "bench"}])
def test_a_server_in_use_is_refused_and_named(owners):
    decided = plan(view("guest", in_unit(1502), owners=owners))
    assert not decided["release"] and pids(decided["refuse"]) == [1502] and not decided["sweep"]
    assert f"systemctl stop {UNIT}" in decided["refuse"][0]["action"]
    assert ("bench_stop_ok=true" in decided["refuse"][0]["action"]) == (owners == {UNIT: "serve"})


@pytest.mark.parametrize("unit", ["ssh.service", "session-3.scope", "user@1000.service", None])
def test_nobody_is_told_to_stop_ssh_for_one_process(unit):
    decided = plan(view("guest", in_unit(1502, unit) if unit else holder(1502)))
    assert "`kill 1502`" in decided["refuse"][0]["action"] and "systemctl" not in decided["refuse"][0]["action"]


def test_force_releases_in_the_own_guest_only():
    mine, theirs = holder(1502), on_node(4555, holder(233), vmid=131)
    decided = plan(view("guest", mine), view("node", on_node(4127, mine), theirs), 129, force=True)
    assert pids(decided["release"]) == [1502]
    (refused,) = decided["refuse"]
    assert refused["node_pid"] == 4555 and "guest 131" in refused["action"]


def test_another_guest_on_other_gpus_does_not_matter():
    theirs = on_node(4555, holder(233, gpus=[5], devices=["nvidia5", "nvidiactl"]), vmid=131)
    decided = plan(view("guest"), view("node", theirs), 129, force=True)
    assert decided["blocking"] == 0 and pids(decided["tolerate"]) == [None]


def test_a_process_of_the_node_is_never_released():
    decided = plan(view("guest"), view("node", holder(900)), 129, force=True)
    assert decided["blocking"] == 1 and decided["refuse"][0]["action"] == "runs on the node itself: stop it there"


def test_a_monitor_may_stay_and_then_nothing_is_swept():
    ours, monitor = in_unit(1502), holder(2201, protected=LISTED)
    decided = plan(view("guest", ours, monitor, owners=BENCH))
    assert pids(decided["release"]) == [1502] and pids(decided["tolerate"]) == [2201]
    assert decided["sweep"] is False and decided["blocking"] == 1


def test_this_connection_is_refused_even_with_force_and_in_our_unit():
    decided = plan(view("guest", in_unit(1502, protected="part of this connection"), owners=BENCH), force=True)
    assert not decided["release"] and "close the device" in decided["refuse"][0]["action"]


def test_protection_known_to_one_view_counts_in_both():
    inside = holder(77)
    decided = plan(view("guest", inside), view("node", on_node(4000, inside, protected=LISTED)), 129, force=True)
    assert not decided["release"] and pids(decided["tolerate"]) == [77]


def test_what_only_the_node_sees_is_released_there():
    hidden = on_node(4200, in_unit(50))
    decided = plan(view("guest", owners=BENCH), view("node", hidden), 129)
    assert not decided["release"] and pids(decided["release_on_node"]) == [4200] and decided["blocking"] == 1


def test_a_reused_pid_is_not_the_same_process():
    inside = in_unit(50)
    decided = plan(view("guest", inside, owners=BENCH), view("node", on_node(4200, inside, start_time=1)), 129)
    assert decided["release"][0]["node_pid"] is None
    assert pids(decided["release_on_node"]) == [4200]


@pytest.mark.parametrize(
    "cgroup",
    [
        f"/user.slice/user-1000.slice/user@1000.service/app.slice/{UNIT}",
        f"/user.slice/user-1000.slice/user@1000.service/system.slice/{UNIT}",
        f"/user.slice/user-1000.slice/user@1000.service/servelab.slice/{UNIT}",
        f"/system.slice/docker-1.scope/system.slice/{UNIT}",
    ],
)
def test_a_units_name_in_anothers_slice_is_not_the_unit(cgroup):
    impostor = holder(60, unit=UNIT, cgroup=cgroup)
    assert not plan(view("guest", impostor, owners=BENCH))["release"]


@pytest.mark.parametrize("slice_name", ["system.slice", "servelab.slice"])
@pytest.mark.parametrize("below", ["", "/worker"])
def test_our_units_are_ours_in_either_slice_and_from_either_side(slice_name, below):
    ours = holder(60, unit=UNIT, cgroup=f"/{slice_name}/{UNIT}{below}")
    assert pids(plan(view("guest", ours, owners=BENCH))["release"]) == [60]
    decided = plan(view("guest", owners=BENCH), view("node", on_node(4200, ours)), 129)
    assert pids(decided["release_on_node"]) == [4200]


def test_a_wrong_vmid_releases_nothing_of_the_neighbour_on_the_node():
    theirs = on_node(4555, in_unit(233), vmid=131)
    decided = plan(view("guest", owners=BENCH), view("node", theirs), 129)
    assert not decided["release_on_node"] and decided["blocking"] == 1


def test_the_node_decides_whether_the_view_is_complete():
    assert plan(view("guest", complete=False))["complete"] is False
    assert plan(view("guest", complete=False), view("node"), 129)["complete"] is True
    assert plan(view("guest"), view("node", complete=False), 129)["complete"] is False


def test_a_skipped_scan_is_not_nobody():
    skipped = json.loads((CASES / "19-check-mode-probe" / "registered.json").read_text())
    with pytest.raises(UnknownHolders, match="on the guest are unknown"):
        plan(skipped)
    with pytest.raises(UnknownHolders, match="on the node are unknown"):
        plan(view("guest"), skipped, 129)
    with pytest.raises(UnknownHolders, match="vmid"):
        plan(view("guest"), view("node"), None)


def test_the_table_says_who_which_gpu_since_when_and_what_to_do():
    mine, theirs = in_unit(1502, gpus=[0, 1, 2, 3]), on_node(4555, holder(233), vmid=131)
    decided = plan(view("guest", mine, owners={UNIT: "serve"}), view("node", on_node(4127, mine), theirs), 129)
    lines = table(decided, 129).splitlines()
    assert lines[0].split() == ["PID", "PID", "ON", "NODE", "WHO", "GPUS", "SINCE", "(UTC)", "STATE", "COMMAND"]
    assert lines[1].split() == ["-", "4555", "guest", "131,", "root", "0", *lines[1].split()[6:]]
    row = next(line for line in lines if line.startswith("1502"))
    assert "4127" in row and f"guest 129, root, {UNIT}" in row and "0-3" in row and "2026-11-29 10:00:00" in row
    assert "bench_stop_ok=true" in lines[lines.index(row) + 1]
    assert table(plan(view("guest"))) == "nobody holds a GPU"


CLEAN = {"clean": True, "reasons": [], "gpus": []}
FULL = {"clean": False, "reasons": ["GPU 6 has 904 MiB in use, more than 64 MiB"], "gpus": []}
UNKNOWN = {"clean": None, "reasons": ["nvidia-smi was not asked, so memory use is unknown"], "gpus": []}


def test_clean_needs_no_holder_a_complete_view_and_known_memory():
    nobody = plan(view("guest"), view("node"), 129)
    assert why_not_clean(nobody, {"guest": CLEAN, "node": CLEAN}) == []
    assert why_not_clean(nobody, {"guest": UNKNOWN}) == [
        "on the guest: nvidia-smi was not asked, so memory use is unknown"
    ]
    dark = view("guest", complete=False, unreadable=[{"pid": 1, "name": "strange-init"}])
    (reason,) = why_not_clean(plan(dark), {"guest": CLEAN})
    assert reason.startswith("some processes could not be looked at, as PID 1 (strange-init), so nobody can say")
    assert "gpu_clean_protect" in reason and "pve_node" in reason
    (reason,) = why_not_clean(plan(view("guest", in_unit(5), owners=BENCH)), {"guest": CLEAN})
    assert reason == "1 process(es) hold the GPUs"


def test_memory_without_a_holder_names_who_may_use_it():
    monitored = plan(view("guest", holder(9, name="netdata", protected=LISTED)))
    reasons = why_not_clean(monitored, {"guest": FULL})
    assert reasons[0] == "on the guest: GPU 6 has 904 MiB in use, more than 64 MiB"
    assert "(netdata)" in reasons[1] and "gpu_clean_unprotect" in reasons[1]
    assert why_not_clean(plan(view("guest")), {"guest": FULL})[1].startswith("nobody holds the GPUs, so the driver")


def test_what_ails_a_card_is_said_only_where_something_is_wrong():
    ailments = {
        "xids": [{"bus_id": "0000:c1:00", "cause": "Xid 79: lost", "text": "GPU has fallen", "remedy": "reboot"}],
        "memory_errors": [{"bus_id": "41:00", "cause": "3 errors", "remedy": "reset"}],
        "zombies": [{"pid": 9, "name": "sglang", "ppid": 7, "parent": "bash"}],
        "log_readable": False,
    }
    nobody = plan(view("guest"))
    assert why_not_clean(nobody, {"guest": CLEAN}, ailments=ailments) == []
    reasons = why_not_clean(nobody, {"guest": FULL}, ailments=ailments)
    assert "gpu_clean_reset_ok=true" in reasons[1]
    assert reasons[2:] == [
        "GPU at 0000:c1:00: Xid 79: lost (GPU has fallen): reboot",
        "GPU at 41:00: 3 errors: reset",
        "PID 9 (sglang) is dead, and its parent PID 7 (bash) lives and does not collect it: stop the parent",
        "the kernel's log could not be read, so whether the driver reported Xid is unknown",
    ]


def test_one_that_is_started_again_is_a_reason_of_its_own():
    again = holder(20, command="ollama runner", unit="ollama.service", parent={"pid": 1, "name": "systemd"})
    released = [{"pid": 10, "command": "ollama runner", "outcome": "killed"}]
    reasons = why_not_clean(plan(view("guest", again), force=True), {"guest": CLEAN}, released)
    assert (
        reasons[0] == "1 process(es) hold the GPUs" and "started again: `systemctl stop ollama.service`" in reasons[1]
    )


def test_the_mps_daemon_has_its_own_remedy():
    daemon = holder(30, name="nvidia-cuda-mps", user="jane")
    (refused,) = plan(view("guest", daemon))["refuse"]
    assert "`echo quit | nvidia-cuda-mps-control` as jane" in refused["action"]
    assert pids(plan(view("guest", daemon), force=True)["release"]) == [30]


def test_ranges():
    assert [gpu_ranges(gpus) for gpus in ([], [3], [0, 1, 2, 5], [7, 6])] == ["-", "3", "0-2,5", "6-7"]


def test_no_world_yields_a_kill_of_a_protected_or_foreign_process():
    rng = random.Random(20261129)
    protections = [
        None,
        None,
        LISTED,
        "on the protect list: Xorg",
        "part of this connection",
        "the machine's first process",
    ]
    units = [None, UNIT, "servelab-eagle3.service", "ollama.service"]
    systems = ["system.slice", "servelab.slice"]
    slices = [*systems, "user.slice/user@1.service", "user.slice/user@1.service/system.slice", "x/servelab.slice"]
    released = there = 0
    for _ in range(4000):
        numbers = itertools.count(2)
        owners = {
            unit: rng.choice(["bench", "prove", "stopped", "serve", ""])
            for unit in units
            if unit and rng.random() < 0.7
        }
        inside, outside = [], []
        for _ in range(rng.randrange(6)):
            unit = rng.choice(units)
            cgroup = f"/{rng.choice(slices)}/{unit}" if unit else "/x"
            one = holder(next(numbers), unit=unit, cgroup=cgroup, gpus=rng.sample(range(4), rng.randrange(3)))
            one["protected"] = rng.choice(protections)
            vmid = rng.choice([129, 129, 130, None])
            if vmid == 129 and rng.random() < 0.8:
                inside.append(one)
            if rng.random() < 0.8:
                seen = on_node(
                    next(numbers) + 5000, one, 129 if vmid == 129 else 130, protected=rng.choice(protections)
                )
                outside.append(seen if vmid else seen | {"vmid": None, "cgroup": cgroup, "ns_pids": [seen["pid"]]})
        force, with_node = rng.random() < 0.5, rng.random() < 0.8
        guest, node = view("guest", *inside, owners=owners), view("node", *outside)
        decided = plan(guest, node, 129, force) if with_node else plan(guest, None, 129, force)
        in_guest = {h["pid"]: h for h in inside}
        on_the_node = {h["pid"]: h for h in outside}
        for victim in decided["release"]:
            assert in_guest[victim["pid"]]["protected"] is None and victim["protected"] is None
            assert force or (
                owners.get(victim["unit"]) in ("bench", "prove", "stopped")
                and victim["cgroup"] in [f"/{one}/{victim['unit']}" for one in systems]
            )
        for victim in decided["release_on_node"]:
            assert with_node and on_the_node[victim["pid"]]["protected"] is None
            assert on_the_node[victim["pid"]]["vmid"] == 129
            assert force or (
                owners.get(victim["unit"]) in ("bench", "prove", "stopped")
                and victim["cgroup"] in [f"/lxc/129/ns/{one}/{victim['unit']}" for one in systems]
            )
            there += 1
        if decided["sweep"]:
            assert {h["pid"] for h in inside} == set(pids(decided["release"]))
        released += len(decided["release"])
    assert released > 300 and there > 100  # the worlds are not all empty
