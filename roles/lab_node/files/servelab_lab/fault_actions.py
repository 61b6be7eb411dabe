"""Failures that are things of the node: a lock, a process, another guest. Each has on, off and is_on."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from .faults import CARD, SwitchError
from .gpu.cards import SOCKET
from .gpu.client import DriverError, look
from .pct.errors import PctError
from .pct.life import unlock
from .pct.lxc import Lxc
from .pct.node import Node

OTHER_GUEST = 199
HELD_MIB = 40960
_UNIT = "servelab-fault-holder"
_TEMPLATES = Path("/var/lib/vz/template/cache")


def _done(*words: str) -> bool:
    """Whether a command succeeds; it says nothing."""
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0


def _do(*words: str) -> None:
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SwitchError(f"`{' '.join(words)}` failed: {(done.stderr or done.stdout).strip()}")


def _hold(doubles: str) -> list[str]:
    """The words that hold the card in a unit of their own."""
    python = ["python3", "-P", "-m", "servelab_lab.gpu.claim", f"{CARD}={HELD_MIB}"]
    return ["systemd-run", "--quiet", "--collect", f"--unit={_UNIT}", f"--setenv=PYTHONPATH={doubles}", *python]


def _wait_until_held() -> None:
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        try:
            if any(p.card == CARD and p.mib == HELD_MIB for gpu in look(Path(SOCKET)).gpus for p in gpu.processes):
                return
        except DriverError:
            return  # another fault is on: nobody can look
        time.sleep(0.1)
    raise SwitchError(f"Nobody holds card {CARD} after 20 s.")


# The first guest is locked


def _first_guest() -> tuple[Node, int]:
    node = Node(Lxc())
    vmids = [vmid for vmid in node.vmids() if vmid != OTHER_GUEST]
    if not vmids:
        raise SwitchError("There is no guest to lock: run playbooks/provision.yml first.")
    return node, vmids[0]


def guest_locked_is_on() -> bool:
    node = Node(Lxc())
    return any("lock" in node.load(vmid, quiet=True).settings for vmid in node.vmids())


def guest_locked_on() -> None:
    node, vmid = _first_guest()
    with node.locked(vmid):
        config = node.load(vmid)
        config.settings["lock"] = "backup"
        node.save(vmid, config)


def guest_locked_off() -> None:
    node = Node(Lxc())
    for vmid in node.vmids():
        if "lock" in node.load(vmid, quiet=True).settings:
            unlock(node, vmid)


# A process on the node


def node_process_is_on() -> bool:
    return _done("systemctl", "is-active", "--quiet", _UNIT)


def node_process_on() -> None:
    _do(*_hold(sys.path[0] if sys.path[0].startswith("/") else "/srv/servelab-lab"))
    _wait_until_held()


def node_process_off() -> None:
    _do("systemctl", "stop", _UNIT)


# Another guest


def other_guest_is_on() -> bool:
    return OTHER_GUEST in Node(Lxc()).vmids()


def other_guest_on() -> None:
    templates = sorted(_TEMPLATES.glob("debian-*.tar.zst"))
    if not templates:
        raise SwitchError(f"There is no guest template in {_TEMPLATES}: run playbooks/lab.yml first.")
    vmid = str(OTHER_GUEST)
    _do(
        *("pct", "create", vmid, f"local:vztmpl/{templates[-1].name}", "--hostname", "other", "--rootfs", "local:4"),
        *("--memory", "1024", "--unprivileged", "1", "--features", "nesting=1"),
        *("--mp0", "/srv/servelab-lab,mp=/opt/servelab-lab,ro=1"),
        *("--dev0", f"/dev/nvidia{CARD},mode=0666", "--dev1", "/dev/nvidiactl,mode=0666"),
    )
    try:
        _do("pct", "start", vmid)
        deadline = time.monotonic() + 30
        # It takes a moment until its systemd can be asked.
        while not _done("pct", "exec", vmid, "--", *_hold("/opt/servelab-lab")):
            if time.monotonic() > deadline:
                raise SwitchError(f"Guest {vmid} runs, but nothing can be started in it.")
            time.sleep(0.2)
        _wait_until_held()
    except (SwitchError, PctError):
        other_guest_off()
        raise


def other_guest_off() -> None:
    _do("pct", "destroy", str(OTHER_GUEST), "--force", "1")
