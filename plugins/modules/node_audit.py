#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Look at everything on a node that decides whether its GPUs can be given away, and judge it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: node_audit
short_description: Judge a node's driver, device nodes, GPUs, topology and IOMMU
version_added: 0.1.0
description:
  - Reads only. Returns for each check what was found, what is right, why it matters, and the one remedy.
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
topology:
  description: C(islands) (lists of GPU numbers), C(nvlink), C(numa), or null without a matrix.
  returned: always
  type: dict
"""

import contextlib
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.driver_version import parse_kernel_driver
from ansible_collections.servelab.sglang.plugins.module_utils.node_audit import (
    Expected,
    NodeFacts,
    as_dicts,
    audit,
    overall,
    table,
)
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import query, run_bounded
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


def iommu_types(bus_ids: Iterable[str | None]) -> list[str]:
    """The types of the cards' IOMMU groups, where the kernel shows them."""
    types = []
    for bus_id in bus_ids:
        # nvidia-smi writes the PCI domain with eight digits, sysfs with four.
        match = re.fullmatch(r"[0-9A-Fa-f]{4}([0-9A-Fa-f]{4}:.+)", bus_id or "")
        device = f"/sys/bus/pci/devices/{match[1].lower()}" if match else None
        if device and (read(f"{device}/vendor") or "").strip() == NVIDIA_PCI_VENDOR:
            types.append((read(f"{device}/iommu_group/type") or "").strip())
    return [kind for kind in types if kind]


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
    facts = NodeFacts(
        driver=read("/proc/driver/nvidia/version"),
        nodes=device_nodes(),
        gpus=report.gpus,
        diagnosis=report.diagnosis.as_dict() if report.diagnosis else None,
        topology=matrix[1] if matrix else None,
        cmdline=read("/proc/cmdline"),
        iommu_types=iommu_types(gpu.get("bus_id") for gpu in report.gpus),
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
        topology=shown,
    )


if __name__ == "__main__":
    main()
