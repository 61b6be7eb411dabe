"""Cleaning by playbooks/clean.yml where it is hard: other guests, leases, what starts itself again, leftovers, resets.

Each test brings its processes and takes them away; nobody holds the cards in between but the scenario's two monitors.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NOTES = "/run/servelab-test"
HOLDER = "/usr/local/bin/holder.py"
SHORT = {"gpu_clean_grace_s": 2, "gpu_clean_deadline_s": 30, "gpu_clean_interval_s": 1}
# A number that no process gets.
DEAD = 4194305


def clean(*options: str, **variables) -> tuple[int, str]:
    """playbooks/clean.yml on the guest; exit status, and what it said without line breaks."""
    command = ["ansible-playbook", "-i", str(ROOT / "inventory/lab"), str(ROOT / "playbooks/clean.yml")]
    command += ["--limit", "lab-gpu1", "-e", json.dumps(SHORT | variables), *options]
    env = os.environ | {"ANSIBLE_CONFIG": str(ROOT / "ansible.cfg"), "ANSIBLE_CALLBACK_RESULT_FORMAT": "json"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    said = (done.stdout + done.stderr).replace("\\n", " ").replace('\\"', '"')
    return done.returncode, re.sub(r"\s+", " ", said)


def lives(host, number: int) -> bool:
    return host.run("kill -0 %s", str(number)).rc == 0


def fault(node, name: str, state: str) -> None:
    node.run_expect([0], f"PYTHONPATH=/srv/servelab-lab python3 -P -m servelab_lab.faults {name} {state}")


def wait(condition, seconds: float = 20) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.2)


@pytest.fixture
def start(guest) -> Iterator:
    """start(name, shell command that runs in the background and writes NOTES/name.pid) → its PID in the guest."""
    names: list[str] = []

    def begin(name: str, command: str) -> int:
        names.append(name)
        guest.run_expect([0], f"rm -f {NOTES}/{name}.pid; setsid --fork sh -c '{command}' </dev/null >/dev/null 2>&1")
        wait(lambda: guest.file(f"{NOTES}/{name}.pid").exists)
        return int(guest.file(f"{NOTES}/{name}.pid").content_string)

    yield begin
    for name in names:
        guest.run(f"kill -KILL $(cat {NOTES}/{name}.pid)")


def test_another_guest_is_named_and_lives_even_by_force(node, guest):
    fault(node, "other_guest", "on")
    try:
        status, said = clean(gpu_clean_force=True)
        theirs = node.check_output("pct exec 199 -- systemctl show servelab-fault-holder -p MainPID --value")
        assert status == 2 and "nobody was signalled" in said
        # Its root is nobody whom the node has a name for.
        assert "guest 199, 100000, servelab-fault-holder.service" in said
        assert "refuse: belongs to guest 199: stop it there, or give the guests different GPUs" in said
        assert node.run(f"pct exec 199 -- kill -0 {theirs}").rc == 0
        # A guest that has other cards only is in nobody's way: card 3 is all that it has.
        status, said = clean("--check")
        assert status == 0 and "guest 199" in said
    finally:
        fault(node, "other_guest", "off")


def test_a_process_of_the_node_is_named_and_lives(node):
    fault(node, "node_process", "on")
    try:
        status, said = clean(gpu_clean_force=True)
        assert status == 2 and "refuse: runs on the node itself: stop it there" in said
        assert node.service("servelab-fault-holder").is_running
    finally:
        fault(node, "node_process", "off")


LEASE = {
    "owner": {
        "machine": "another-controller/pid:[1]",
        "pid": 77,
        "start_time": 1,
        "who": "jane@desk",
        "purpose": "run x of first",
    },
    "vmid": 130,
    "gpus": [2, 3],
    "taken": 1796000000.0,
    "ttl": 600.0,
    "schema": "servelab.lease/1",
}


def test_a_lease_from_elsewhere_stops_the_role_before_anything(node, guest, start):
    pid = start("leased", f"exec {HOLDER} leased 300 2")
    boot, up = node.check_output("cat /proc/sys/kernel/random/boot_id; cut -d. -f1 /proc/uptime").split()
    lease = "/run/servelab/leases/other.json"
    node.run_expect([0], "mkdir -p /run/servelab/leases")
    # The clock of leases counts suspended time as well, which a lab has none of.
    now = float(node.check_output('python3 -c "import time; print(time.clock_gettime(time.CLOCK_BOOTTIME))"'))
    assert now >= float(up)

    def write(**changes) -> None:
        text = json.dumps(LEASE | {"renewed": now, "boot_id": boot} | changes)
        node.run_expect([0], f"printf '%s' '{text}' > {lease}")

    try:
        write()
        status, said = clean(gpu_clean_force=True)
        assert status == 2 and "GPU 2, 3 is leased: run x of first, by jane@desk (PID 77 there), for guest 130" in said
        assert "gpu_clean_lease_break=true" in said and lives(guest, pid)
        # A check shows the holders all the same.
        status, said = clean("--check")
        assert status == 0 and "is leased" in said and "holder.py leased" in said
        # Expired, and nobody of guest 130 is on the cards: nobody needs to be asked.
        write(renewed=now - 700)
        status, said = clean(gpu_clean_force=True)
        assert status == 0 and "a lease on GPU 2, 3 was set aside, as no sign of life for" in said
        assert not lives(guest, pid)
        assert not node.file(lease).exists
    finally:
        node.run(f"rm -f {lease}")
    assert [name for name in node.file("/run/servelab/leases").listdir() if name.endswith(".json")] == []


def test_after_exec_and_by_a_bind_mounted_node_it_is_a_holder(guest, start):
    guest.run_expect([0], f"touch {NOTES}/card && mount --bind /dev/nvidia1 {NOTES}/card")
    try:
        execed = start("execed", f"echo $$ > {NOTES}/execed.pid; exec 3<>/dev/nvidia2; exec sleep 600")
        bound = start("bound", f"echo $$ > {NOTES}/bound.pid; exec 3<>{NOTES}/card; exec sleep 600")
        status, said = clean()
        assert status == 2 and "2 process(es) hold GPUs" in said and lives(guest, execed) and lives(guest, bound)
        status, said = clean(gpu_clean_force=True)
        assert status == 0 and not lives(guest, execed) and not lives(guest, bound)
    finally:
        guest.run(f"umount {NOTES}/card")


def test_what_somebody_starts_again_is_named(guest):
    guest.run_expect([0], f"systemd-run --unit=again --property=Restart=always {HOLDER} again 300 4")
    wait(lambda: guest.file(f"{NOTES}/again.pid").exists)
    try:
        status, said = clean(gpu_clean_force=True, gpu_clean_deadline_s=4)
        assert status == 2 and "started again: `systemctl stop again.service` first" in said
    finally:
        guest.run("systemctl stop again; systemctl reset-failed again")


def test_an_ssh_session_that_holds_a_card_loses_the_process_and_not_the_machine(guest, start, connections):
    one = connections["lab-gpu1"]
    command = ["ssh", "-i", one["key"], *one["args"].split(), f"{one['user']}@{one['host']}"]
    script = f"exec 3<>/dev/nvidia6; echo $$ > {NOTES}/session.pid; while :; do read -r x || sleep 1; done"
    session = subprocess.Popen([*command, script], stdin=subprocess.DEVNULL)
    try:
        wait(lambda: guest.file(f"{NOTES}/session.pid").exists)
        pid = int(guest.file(f"{NOTES}/session.pid").content_string)
        status, said = clean()
        assert status == 2 and f"`kill {pid}`" in said and lives(guest, pid)
        status, said = clean(gpu_clean_force=True)
        assert status == 0 and not lives(guest, pid)
        assert guest.service("ssh").is_running
    finally:
        session.kill()
        session.wait()


def test_leftovers_go_and_what_lives_stays(guest, start):
    left = [f"/dev/shm/sgl_shm_mq_{DEAD}_aa", "/dev/shm/sglang_loads_3f90_a8a2.shm"]
    kept = ["/dev/shm/nccl-AbC123", "/dev/shm/psm_1a2b3c4d"]
    for path in left + kept:
        guest.run_expect([0], f"head -c 4096 /dev/zero > {path} && touch -d '1 hour ago' {path}")
    start("reader", f"exec 3<{kept[0]}; echo $$ > {NOTES}/reader.pid; exec sleep 600")
    # A launcher that survived its unit, without a GPU.
    script = f"setsid sleep 600 & echo $! > {NOTES}/launcher.pid; exec sleep 600"
    guest.run_expect([0], f"echo '{script}' > {NOTES}/launch.sh; rm -f {NOTES}/launcher.pid")
    guest.run_expect([0], f"systemd-run --unit=servelab-left.service -p KillMode=process sh {NOTES}/launch.sh")
    wait(lambda: guest.file(f"{NOTES}/launcher.pid").exists)
    launcher = int(guest.file(f"{NOTES}/launcher.pid").content_string)
    guest.run_expect([0], "systemctl stop servelab-left.service")
    assert lives(guest, launcher)
    try:
        time.sleep(2)
        status, said = clean(gpu_clean_leftovers_age_s=1)
        assert status == 0, said
        assert not lives(guest, launcher)
        assert [path for path in left if guest.file(path).exists] == []
        assert [path for path in kept if not guest.file(path).exists] == []
    finally:
        guest.run(f"kill -KILL {launcher}; rm -f {' '.join(left + kept)}")


def persistent(node) -> str:
    return node.check_output("nvidia-smi --query-gpu=persistence_mode --format=csv,noheader -i 3")


def test_a_sick_card_is_told_with_its_remedy_and_reset_only_when_nobody_is_on_it(node, guest):
    fault(node, "needs_reset", "on")
    # As on most nodes: it keeps every card open, and is the one that may.
    node.run_expect([0], "ln -sf /usr/local/bin/dcgm-exporter /usr/local/bin/nvidia-persistenced")
    daemon = "systemd-run --collect --unit=persistence /usr/local/bin/nvidia-persistenced persistence 0 0,1,2,3,4,5,6,7"
    node.run_expect([0], daemon)
    try:
        status, said = clean(gpu_clean_deadline_s=2)
        assert status == 2 and "GPU 3 must be reset: gpu_clean_reset_ok=true" in said
        # The monitors may stay, but not while a card is reset.
        status, said = clean(gpu_clean_reset_ok=True, gpu_clean_deadline_s=2)
        assert status == 2 and "was refused" in said and "(dcgm-exporter) of" in said
        for host in (node, guest):
            host.run_expect([0], "systemctl stop monitor")
        # What the driver itself says to a guest, and while somebody (here: persistence mode) is on the card.
        assert "Insufficient Permissions" in guest.run_expect([4], "nvidia-smi -pm 0 -i 3").stdout
        # Its status is 255, which testinfra takes for a failure of ssh.
        refused = node.check_output("nvidia-smi --gpu-reset -i 3; echo $?")
        assert "In use by another client" in refused and refused.endswith("255")
        status, said = clean("--check", gpu_clean_reset_ok=True, gpu_clean_deadline_s=2)
        assert status == 0 and persistent(node) == "Enabled", said
        status, said = clean(gpu_clean_reset_ok=True, gpu_clean_deadline_s=2)
        assert status == 0, said
        assert persistent(node) == "Enabled"
        assert node.run("systemctl is-active persistence").rc == 0
    finally:
        node.run("systemctl stop persistence; rm /usr/local/bin/nvidia-persistenced")
        fault(node, "needs_reset", "off")
