#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Bring the configuration of one Proxmox container to what is wanted."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_config
short_description: Bring the configuration of one Proxmox container to what is wanted
version_added: 0.1.0
description:
  - Runs on a Proxmox VE node as root. Reads the running section of C(/etc/pve/lxc/<vmid>.conf), compares it by meaning
    with what is wanted, and sets only what differs, with one C(pct set). Reads back and fails if the result is another.
  - Snapshot sections, comments and whatever is not named here are left alone.
  - With O(template), a guest that does not exist is created; one that exists is adopted and never recreated.
author: The Servelab developers
options:
  vmid:
    description: The number of the guest.
    type: int
    required: true
  options:
    description:
      - Options in Proxmox's names (V(hostname), V(memory), V(net0), V(features), …) with a scalar, a list, or a
        mapping of properties.
      - A V(net) without C(hwaddr) keeps the address it has. A V(rootfs) is used for creation only.
    type: dict
    default: {}
  mounts:
    description: Mount points, found again by their path in the guest; other mount points of the guest are left alone.
    type: list
    elements: dict
    default: []
    suboptions:
      source:
        description: A directory of the node, an existing volume, or C(storage:size-in-GiB) to allocate one (once).
        type: str
        required: true
      path:
        description: Where the guest sees it.
        type: path
        required: true
      read_only:
        description: Whether the guest may only read it.
        type: bool
        default: false
  gpus:
    description:
      - Which NVIDIA cards the guest gets, V(all) or a list of card numbers, resolved from the node's C(/dev) when
        the module runs.
      - Their C(dev[n]) entries are managed as a whole; without this option they are left alone.
    type: raw
  gpu_device:
    description: Properties of each device entry besides its path, e.g. C(mode), C(gid).
    type: dict
    default: {mode: "0666"}
  gpu_raw_lines:
    description:
      - Whether the cards are passed by C(lxc.*) lines with the device numbers of now, for nodes before Proxmox VE 8.1,
        which know no C(dev[n]). Such lines are added, and never taken away.
    type: bool
    default: false
  delete:
    description: Options that shall be absent.
    type: list
    elements: str
    default: []
  raw:
    description:
      - Low-level C(lxc.*) lines that shall be in the running section. A key that LXC reads once
        (C(lxc.prlimit.memlock)) ends with just this value; a repeatable one (C(lxc.mount.entry)) gains the line.
    type: list
    elements: dict
    default: []
    suboptions:
      key:
        description: The key, e.g. C(lxc.prlimit.memlock).
        type: str
        required: true
      value:
        description: Its value.
        type: str
        required: true
  template:
    description:
      - The template (C(local:vztmpl/…)) to create the guest from when it does not exist. Without it, its absence is an
        error.
    type: str
  timeout:
    description: Seconds that one call of C(pct) may take; creation unpacks a template and formats a volume.
    type: int
    default: 900
attributes:
  check_mode:
    description: Tells truthfully what would change, without changing it.
    support: full
  diff_mode:
    description: Shows the options that differ, before and after.
    support: full
"""

EXAMPLES = r"""
- name: Give the guest 64 GiB and the first two GPUs
  servelab.sglang.pct_config:
    vmid: 129
    options:
      memory: 65536
      features: {nesting: true}
    gpus: [0, 1]
"""

RETURN = r"""
created:
  description: Whether the guest was created (in check mode, would be).
  returned: always
  type: bool
exists:
  description: Whether the guest exists now.
  returned: always
  type: bool
running:
  description: Whether the guest runs.
  returned: always
  type: bool
config:
  description: The options as they are planned, what waits for a restart included.
  returned: always
  type: dict
pending:
  description: What waits for a restart of the guest; C(after) is null where the option will be removed.
  returned: always
  type: list
  elements: dict
  sample: [{"option": "dev1", "now": "/dev/nvidiactl", "after": null, "managed": true}]
restart_reasons:
  description: Sentences that say why the guest must be restarted for what is managed here; empty if it need not be.
  returned: always
  type: list
  elements: str
notices:
  description: Differences that are told but not changed.
  returned: always
  type: list
  elements: str
command:
  description: The C(pct) call that was made (in check mode, would be), or an empty list.
  returned: always
  type: list
  elements: str
"""

import contextlib
import fcntl
import os
import stat
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.pct_config import (
    GPU_NODE,
    Plan,
    Wanted,
    create_argv,
    explain,
    gpu_devices,
    plan,
    set_argv,
)
from ansible_collections.servelab.sglang.plugins.module_utils.pct_run import Answer, PctMissing, run_pct
from ansible_collections.servelab.sglang.plugins.module_utils.pve_cluster import ha_state, unwritable
from ansible_collections.servelab.sglang.plugins.module_utils.pve_conf import GuestConf, edit_raw, parse_conf
from ansible_collections.servelab.sglang.plugins.module_utils.raw_devices import raw_device_lines, raw_device_notices

PVE = Path("/etc/pve")
LOCKS = Path("/run/lock/lxc")


class Guest:
    """The guest as the node shows it: its file, and pct."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.vmid: int = module.params["vmid"]
        self.path = PVE / "lxc" / f"{self.vmid}.conf"

    def pct(self, *args: str) -> Answer:
        try:
            return run_pct(*args, timeout=self.module.params["timeout"])
        except PctMissing as missing:
            self.module.fail_json(msg=str(missing))
            raise

    def read(self) -> str | None:
        try:
            return self.path.read_text(encoding="utf-8", errors="surrogateescape")
        except FileNotFoundError:
            return None

    def elsewhere(self) -> str | None:
        """A sentence if the number belongs to a VM or to another node of the cluster."""
        for path in sorted(PVE.glob(f"nodes/*/*/{self.vmid}.conf")):
            node, kind = path.parts[-3], path.parts[-2]
            if path.exists() and not (self.path.exists() and path.samefile(self.path)):
                what = "VM" if kind == "qemu-server" else "container"
                return (
                    f"vmid {self.vmid} is a {what} on the node {node}; choose a free number, or correct pve_node if "
                    "that is the guest."
                )
        return None

    def running(self) -> bool:
        return self.pct("status", str(self.vmid)).out.strip() == "status: running"

    def write_raw(self, text: str, wanted: list[tuple[str, str]]) -> None:
        """Edit the running section in place of the file, under Proxmox's own lock.

        The new text is written beside the file and renamed, without chmod or chown, which /etc/pve refuses.
        """
        with self._lock():
            if self.read() != text:
                self.module.fail_json(
                    msg=f"{self.path} was changed by someone else meanwhile; nothing was written to it, run again."
                )
            beside = self.path.with_name(f"{self.path.name}.tmp.{os.getpid()}")
            try:
                with beside.open("x", encoding="utf-8", errors="surrogateescape") as handle:
                    handle.write(edit_raw(text, wanted))
                beside.rename(self.path)
            except OSError as error:
                with contextlib.suppress(OSError):
                    beside.unlink()
                self.module.fail_json(msg=f"{self.path} could not be written: {explain(str(error), self.vmid)}")

    @contextlib.contextmanager
    def _lock(self, patience_s: float = 10.0) -> Iterator[None]:
        LOCKS.mkdir(parents=True, exist_ok=True)
        with (LOCKS / f"pve-config-{self.vmid}.lock").open("a") as handle:
            deadline = time.monotonic() + patience_s
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        self.module.fail_json(
                            msg=f"Another job holds the lock of guest {self.vmid}; run again when it is done."
                        )
                    time.sleep(0.2)
            yield


def character_devices() -> dict[str, int]:
    """NVIDIA nodes that are character devices → their major number. A regular file (create=file) is not one."""
    found = {}
    for path in sorted(Path("/dev").glob("nvidia*")):
        if GPU_NODE.match(str(path)):
            with contextlib.suppress(OSError):
                state = path.stat()
                if stat.S_ISCHR(state.st_mode):
                    found[str(path)] = os.major(state.st_rdev)
    return found


def wanted_state(module: AnsibleModule) -> Wanted:
    devices = None
    if module.params["gpus"] is not None:
        gpus = module.params["gpus"]
        if not isinstance(gpus, str):
            try:
                gpus = [int(card) for card in gpus]
            except (TypeError, ValueError):
                module.fail_json(msg=f"gpus is {gpus!r}; it must be 'all' or a list of card numbers such as [0, 2].")
        properties = {key: str(value) for key, value in module.params["gpu_device"].items() if value is not None}
        devices, errors = gpu_devices(character_devices(), gpus, properties)
        if errors:
            module.fail_json(msg=" ".join(errors))
    raw = [(line["key"], line["value"]) for line in module.params["raw"]]
    if devices and module.params["gpu_raw_lines"]:
        raw += raw_device_lines([device["path"] for device in devices], character_devices())
        devices = []
    return Wanted(
        options=module.params["options"],
        mounts=module.params["mounts"],
        devices=devices,
        delete=module.params["delete"],
        raw=raw,
    )


def difference(before: GuestConf, change: Plan, vmid: int) -> dict[str, str]:
    """Only the options that differ: a whole configuration would bury them, and may hold what is nobody's business."""
    planned = before.planned
    touched = sorted({*change.sets, *change.deletes, *change.revert})
    old = [f"{option}: {planned[option]}" for option in touched if option in planned]
    new = [f"{option}: {change.sets[option]}" for option in touched if option in change.sets]
    for key, value in change.raw:
        if (key, value) not in before.raw:
            old += [f"{k}: {v}" for k, v in before.raw if k == key and k.startswith("lxc.prlimit.")]
            new.append(f"{key}: {value}")
    return {
        "before_header": f"guest {vmid}",
        "after_header": f"guest {vmid}",
        "before": "".join(f"{line}\n" for line in old),
        "after": "".join(f"{line}\n" for line in new),
    }


def pending_of(conf: GuestConf, managed: set[str]) -> list[dict[str, Any]]:
    """What waits for a restart. A pending value equal to the current one waits for nothing."""
    entries = []
    for option in sorted({*conf.pending, *conf.pending_delete}):
        now, after = conf.current.get(option), conf.planned.get(option)
        if now != after:
            entries.append({"option": option, "now": now, "after": after, "managed": option in managed})
    return entries


def reasons(entries: list[dict[str, Any]], running: bool, raw: list[tuple[str, str]]) -> list[str]:
    if not running:
        return []
    managed = [entry for entry in entries if entry["managed"]]
    said = [
        f"{entry['option']} is {entry['now'] or 'absent'} and becomes {entry['after']}."
        for entry in managed
        if entry["after"] is not None
    ]
    if gone := [entry["option"] for entry in managed if entry["after"] is None]:
        said.append(f"{', '.join(gone)} will be absent.")
    return said + [f"{key} = {value} is read when the guest starts." for key, value in raw]


def converge(module: AnsibleModule, guest: Guest, wanted: Wanted, text: str) -> dict[str, Any]:
    conf = parse_conf(text)
    change = plan(conf, wanted, text)
    if change.errors:
        module.fail_json(msg=" ".join(change.errors), errors=change.errors)
    if change.changes and (sentence := unwritable(PVE)):
        module.fail_json(msg=sentence)
    ha = ha_state(guest.vmid, PVE)
    if change.changes and "lock" in conf.current:
        module.fail_json(msg=explain(f"CT is locked ({conf.current['lock']})", guest.vmid))
    sets = bool(change.sets or change.deletes)
    result: dict[str, Any] = {
        "changed": change.changes,
        "created": False,
        "exists": True,
        "running": guest.running(),
        "notices": change.notices
        + ([ha.notice] if ha else [])
        + raw_device_notices(conf.raw, character_devices(), [device["path"] for device in wanted.devices or ()]),
        "command": ["pct", *set_argv(guest.vmid, change)] if sets else [],
        "diff": difference(conf, change, guest.vmid),
    }
    if change.changes and not module.check_mode:
        apply(module, guest, change, sets)
        text = guest.read() or ""
        conf = parse_conf(text)
        verify(module, guest, wanted, text)
    elif change.changes:
        # Predicted: whatever Proxmox does not hot-plug will wait for a restart; only the real set tells.
        conf = GuestConf({**conf.planned, **change.sets}, conf.raw, {}, [], conf.snapshots, conf.digest)
    result["config"] = conf.planned
    result["pending"] = pending_of(conf, change.managed)
    result["restart_reasons"] = reasons(result["pending"], result["running"], change.raw)
    return result


def apply(module: AnsibleModule, guest: Guest, change: Plan, sets: bool) -> None:
    vmid = str(guest.vmid)
    if change.revert:
        run(module, guest, "set", vmid, "--revert", ",".join(change.revert))
    if sets:
        # After a revert the file is another one, so the digest is taken from what is there now.
        digest = parse_conf(guest.read() or "").digest
        run(module, guest, *set_argv(guest.vmid, change, digest))
    if change.raw:
        guest.write_raw(guest.read() or "", change.raw)


def run(module: AnsibleModule, guest: Guest, *args: str) -> None:
    """Run a changing pct call. A refusal may still have written something, so the file is compared."""
    before = guest.read()
    answer = guest.pct(*args)
    if answer.rc == 0:
        return
    after = guest.read()
    partly = (
        "Nothing was written."
        if after == before
        else f"Proxmox wrote a part of it all the same: look at `pct config {guest.vmid}` and run again."
    )
    module.fail_json(
        msg=f"pct {args[0]} {guest.vmid} was refused: {explain(answer.said, guest.vmid)} {partly}",
        command=["pct", *args],
        rc=answer.rc,
        changed=after != before,
    )


def verify(module: AnsibleModule, guest: Guest, wanted: Wanted, text: str) -> None:
    left = plan(parse_conf(text), wanted, text)
    if left.changes:
        still = ", ".join([*left.sets, *left.deletes, *(key for key, _value in left.raw)])
        module.fail_json(
            msg=f"pct reported success, but guest {guest.vmid} still differs in: {still}. "
            f"Compare `pct config {guest.vmid}` with the inventory."
        )


def create(module: AnsibleModule, guest: Guest, wanted: Wanted) -> dict[str, Any]:
    if sentence := guest.elsewhere() or unwritable(PVE):
        module.fail_json(msg=sentence)
    template = module.params["template"]
    if not template:
        module.fail_json(
            msg=f"Guest {guest.vmid} does not exist on this node and no template is given; name one, or correct vmid."
        )
    try:
        argv = create_argv(guest.vmid, template, wanted)
    except ValueError as error:
        module.fail_json(msg=str(error))
    predicted = plan(GuestConf(), wanted)
    diff = difference(GuestConf(), predicted, guest.vmid)
    diff["after"] += "".join(f"{key}: {value}\n" for key, value in wanted.raw if f"{key}: " not in diff["after"])
    result: dict[str, Any] = {
        "changed": True,
        "created": True,
        "exists": False,
        "running": False,
        "notices": [],
        "command": ["pct", *argv],
        "diff": diff,
        "config": predicted.sets,
        "pending": [],
        "restart_reasons": [],
    }
    if module.check_mode:
        return result
    run(module, guest, *argv)
    if wanted.raw:
        guest.write_raw(guest.read() or "", list(wanted.raw))
    text = guest.read() or ""
    verify(module, guest, wanted, text)
    return {**result, "exists": True, "running": guest.running(), "config": parse_conf(text).planned}


def main() -> None:
    mounts = {
        "source": {"type": "str", "required": True},
        "path": {"type": "path", "required": True},
        "read_only": {"type": "bool", "default": False},
    }
    raw = {"key": {"type": "str", "required": True}, "value": {"type": "str", "required": True}}
    module = AnsibleModule(
        argument_spec={
            "vmid": {"type": "int", "required": True},
            "options": {"type": "dict", "default": {}},
            "mounts": {"type": "list", "elements": "dict", "default": [], "options": mounts},
            "gpus": {"type": "raw"},
            "gpu_device": {"type": "dict", "default": {"mode": "0666"}},
            "gpu_raw_lines": {"type": "bool", "default": False},
            "delete": {"type": "list", "elements": "str", "default": []},
            "raw": {"type": "list", "elements": "dict", "default": [], "options": raw},
            "template": {"type": "str"},
            "timeout": {"type": "int", "default": 900},
        },
        supports_check_mode=True,
    )
    guest = Guest(module)
    wanted = wanted_state(module)
    text = guest.read()
    result = create(module, guest, wanted) if text is None else converge(module, guest, wanted, text)
    module.exit_json(**result)


if __name__ == "__main__":
    main()
