#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Look at everything on a node that decides whether its GPUs can be given away, and judge it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_audit
short_description: Judge whether a node can give its GPUs away
version_added: 0.1.0
description:
  - Reads only. Returns for each check what was found, what is right, why it matters, and the one remedy.
  - Looks at the kernel driver and its flavour, the device nodes and whether they were there before this boot's guests,
    the GPUs against the inventory, persistence, PCIe links, BAR1, topology, P2P status and mapping, IOMMU, ACS, HMM and
    ASPM.
  - Never fails because of what it finds; whoever calls it decides what a V(fail) means.
author: The Servelab developers
options:
  expected_gpus:
    description: How many GPUs the node has according to the inventory. Without it any number is right.
    type: int
  expected_uuids:
    description: The UUIDs that the node's GPUs have according to the inventory.
    type: list
    elements: str
  minimum_driver:
    description: The oldest kernel driver that will do.
    type: str
    default: 580.65.06
  timeout:
    description: Seconds to wait for each call of nvidia-smi.
    type: float
    default: 20
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Judge the node
  servelab.sglang.node_audit:
    expected_gpus: 8
  register: audit
"""

RETURN = r"""
status:
  description: The worst status of the findings, one of V(ok), V(warn), V(fail), V(unknown).
  returned: always
  type: str
findings:
  description: One entry for each check.
  returned: always
  type: list
  elements: dict
  contains:
    check: {description: What was looked at., type: str}
    status: {description: "V(ok), V(warn), V(fail) or V(unknown) (could not be looked at).", type: str}
    found: {description: What there is., type: str}
    right: {description: What there should be., type: str}
    why: {description: Why it matters., type: str}
    remedy: {description: "What to do, or null.", type: str}
table:
  description: The findings as lines for a person.
  returned: always
  type: list
  elements: str
driver_version:
  description: The version of the kernel driver, or null.
  returned: always
  type: str
gpus:
  description: The GPUs as the module M(servelab.sglang.nvidia_smi) returns them.
  returned: always
  type: list
  elements: dict
registry:
  description: The driver's C(RegistryDwords) as it was loaded with, or null.
  returned: always
  type: str
booted:
  description: When the running system was started, in seconds since 1970.
  returned: always
  type: float
hmm_disabled:
  description: Whether nvidia_uvm was loaded with C(uvm_disable_hmm=1), or null.
  returned: always
  type: bool
topology:
  description: C(islands) (lists of GPU numbers), C(nvlink), C(numa), or null without a matrix.
  returned: always
  type: dict
"""

import contextlib
import re
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.driver_version import parse_kernel_driver
from ansible_collections.servelab.sglang.plugins.module_utils.node_audit import as_dicts, audit, overall, table
from ansible_collections.servelab.sglang.plugins.module_utils.node_facts import Expected, NodeFacts, Port
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import query, run_bounded
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi_report import parse_peers, parse_report
from ansible_collections.servelab.sglang.plugins.module_utils.pci import (
    acs_redirects,
    aspm,
    ports_above,
    read_config,
)
from ansible_collections.servelab.sglang.plugins.module_utils.topology import parse_topology

NVIDIA_PCI_VENDOR = "0x10de"
KINDS = {
    stat.S_IFCHR: "character device",
    stat.S_IFREG: "regular file",
    stat.S_IFDIR: "directory",
    stat.S_IFBLK: "block device",
}


def read(path: str) -> str | None:
    try:
        return Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None


def device_nodes() -> dict[str, str]:
    """Only the names that CUDA needs: a directory such as /dev/nvidia-caps is none of them."""
    nodes = {}
    for path in Path("/dev").glob("nvidia*"):
        if re.fullmatch(r"nvidia(\d+|ctl|-uvm|-uvm-tools)", path.name):
            with contextlib.suppress(OSError):
                nodes[path.name] = KINDS.get(stat.S_IFMT(path.stat().st_mode), "special file")
    return nodes


def addresses(bus_ids: Iterable[str | None]) -> list[str]:
    """The cards' names in sysfs, but only of those that are there and NVIDIA's: a bus number alone proves nothing."""
    found = []
    for bus_id in bus_ids:
        # nvidia-smi writes the PCI domain with eight digits, sysfs with four.
        match = re.fullmatch(r"[0-9A-Fa-f]{4}([0-9A-Fa-f]{4}:.+)", bus_id or "")
        address = match[1].lower() if match else ""
        if address and (read(f"/sys/bus/pci/devices/{address}/vendor") or "").strip() == NVIDIA_PCI_VENDOR:
            found.append(address)
    return found


def iommu_types(cards: Iterable[str]) -> list[str]:
    """The types of the cards' IOMMU groups, where the kernel shows them."""
    types = [(read(f"/sys/bus/pci/devices/{card}/iommu_group/type") or "").strip() for card in cards]
    return [kind for kind in types if kind]


def ports(names: Iterable[str]) -> list[Port]:
    return [Port(name, acs_redirects(read_config(name)), aspm(read_config(name))) for name in dict.fromkeys(names)]


def registry() -> str | None:
    """The driver's RegistryDwords as it was loaded with, without the quotes."""
    text = read("/proc/driver/nvidia/params")
    if text is None:
        return None
    match = re.search(r'^RegistryDwords:\s*"?(.*?)"?\s*$', text, re.M)
    return match[1] if match else ""


def hmm_disabled() -> bool | None:
    text = (read("/sys/module/nvidia_uvm/parameters/uvm_disable_hmm") or "").strip()
    return {"Y": True, "1": True, "N": False, "0": False}.get(text)


def stamp(*asked: str) -> float | None:
    """A time that systemd knows, in seconds since 1970.

    Asked for as monotonic, as the clock may be set during a boot; a file's time is of the real clock, right by now.
    """
    try:
        answer = run_bounded(["systemctl", "show", "-P", *asked], 10)
    except OSError:
        return None
    microseconds = int(answer[1].strip()) if answer and answer[1].strip().isdigit() else 0
    started = time.time() - time.clock_gettime(time.CLOCK_MONOTONIC)
    return started + microseconds / 1e6 if microseconds else None


def booted() -> float:
    """Of the system and not of the kernel: a node may be a container (the lab), and modules are loaded after both."""
    return stamp("UserspaceTimestampMonotonic") or time.time() - time.clock_gettime(time.CLOCK_BOOTTIME)


def after_guests(nodes: Iterable[str]) -> dict[str, float] | None:
    """Node → seconds between the start of this boot's guests and its making; None where no guests were started."""
    guests = stamp("InactiveExitTimestampMonotonic", "pve-guests.service")
    if guests is None:
        return None
    made = {}
    for name in nodes:
        with contextlib.suppress(OSError):
            made[name] = round(Path(f"/dev/{name}").stat().st_ctime - guests, 1)
    return made


def matrices(timeout: float) -> dict[str, dict[tuple[int, int], str]]:
    found = {}
    for capability in ("r", "w"):
        answer = run_bounded(["nvidia-smi", "topo", "-p2p", capability], timeout)
        if answer and answer[0] == 0:
            found[capability] = parse_peers(answer[1])
    return found


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "expected_gpus": {"type": "int"},
            "expected_uuids": {"type": "list", "elements": "str"},
            "minimum_driver": {"type": "str", "default": "580.65.06"},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    timeout: float = module.params["timeout"]
    report = query(timeout)
    matrix = run_bounded(["nvidia-smi", "topo", "-m"], timeout) if report.gpus else None
    full = run_bounded(["nvidia-smi", "-q"], timeout) if report.gpus else None
    nodes = device_nodes()
    cards = addresses(gpu.get("bus_id") for gpu in report.gpus)
    facts = NodeFacts(
        driver=read("/proc/driver/nvidia/version"),
        nodes=nodes,
        gpus=report.gpus,
        diagnosis=report.diagnosis.as_dict() if report.diagnosis else None,
        details=parse_report(full[1]) if full and full[0] == 0 else [],
        topology=matrix[1] if matrix else None,
        peers=matrices(timeout) if report.gpus else {},
        cmdline=read("/proc/cmdline"),
        iommu_types=iommu_types(cards),
        ports=ports(port for card in cards for port in ports_above(card)),
        cards=ports(cards),
        aspm_policy=read("/sys/module/pcie_aspm/parameters/policy"),
        hmm_disabled=hmm_disabled(),
        registry=registry(),
        boot=after_guests(nodes),
    )
    expected = Expected(
        module.params["expected_gpus"], module.params["expected_uuids"], module.params["minimum_driver"]
    )
    findings = audit(facts, expected)
    driver = parse_kernel_driver(facts.driver or "")
    topology = parse_topology(facts.topology or "")
    shown: dict[str, Any] | None = None
    if topology.gpus:
        numa = {str(gpu): node for gpu, node in topology.numa.items()}
        shown = {"islands": topology.islands, "nvlink": topology.nvlink, "numa": numa}
    module.exit_json(
        changed=False,
        status=overall(findings),
        findings=as_dicts(findings),
        table=table(findings),
        driver_version=driver.version if driver else None,
        gpus=list(report.gpus),
        registry=facts.registry,
        hmm_disabled=facts.hmm_disabled,
        booted=booted(),
        topology=shown,
    )


if __name__ == "__main__":
    main()
