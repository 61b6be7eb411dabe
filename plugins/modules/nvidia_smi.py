#!/usr/bin/python
# Apache-2.0
"""Ask nvidia-smi about the GPUs of one machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: nvidia_smi
short_description: Ask nvidia-smi about every GPU, with a time limit
version_added: 0.1.0
description:
  - Runs C(nvidia-smi --query-gpu) and returns one entry for each GPU.
  - A value that nvidia-smi cannot tell is null, never 0.
  - When nvidia-smi prints a sentence in place of a table, when the time limit passes, or when there is no nvidia-smi,
    the module does not fail, and RV(diagnosis) names the cause and the remedy.
  - Changes nothing, and therefore runs for real in check mode too.
options:
  timeout:
    description: Seconds to wait for nvidia-smi. A hanging driver hangs nvidia-smi with it.
    type: float
    default: 20
  executable:
    description: Name or path of nvidia-smi.
    type: str
    default: nvidia-smi
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Runs the same in check mode.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: See how much memory is in use
  servelab.sglang.nvidia_smi:
    timeout: 10
  register: gpus
"""

RETURN = r"""
gpus:
  description: One entry for each GPU, in nvidia-smi's order. Each value but C(health) may be null.
  returned: always
  type: list
  elements: dict
  contains:
    index: {description: nvidia-smi's number of the card on this machine., type: int}
    uuid: {description: The same on node and guest., type: str}
    bus_id: {description: PCI address., type: str}
    name: {description: Product name., type: str}
    driver_version: {description: Version of the driver., type: str}
    memory_total_mib: {description: Memory of the card in MiB., type: int}
    memory_used_mib: {description: Memory in use in MiB., type: int}
    utilization_percent: {description: Share of time in which the card worked., type: int}
    temperature_c: {description: Degrees Celsius., type: int}
    power_w: {description: Power draw in watts., type: float}
    mig: {description: Whether MIG is enabled., type: bool}
    compute_mode: {description: Default or Exclusive_Process or Prohibited., type: str}
    pcie_link_gen: {description: PCIe generation now (falls when idle)., type: int}
    pcie_link_width: {description: PCIe lanes now., type: int}
    power_limit_w: {description: The power limit that is in force., type: float}
    clock_sm_mhz: {description: Clock of the multiprocessors now., type: int}
    clock_max_sm_mhz: {description: The highest that it may be., type: int}
    clock_memory_mhz: {description: Clock of the memory now., type: int}
    clock_max_memory_mhz: {description: The highest that it may be., type: int}
    throttle_reasons:
      description: "What holds the clocks down now, as C(gpu_idle), C(sw_power_cap) or C(hw_thermal_slowdown)."
      type: list
      elements: str
    health: {description: "One of ok, needs-reset, lost, error.", type: str}
diagnosis:
  description: Null, or why the table is missing or incomplete, as C(name), C(cause) and C(remedy).
  returned: always
  type: dict
  sample: {"name": "timeout", "cause": "nvidia-smi did not answer within 20 s", "remedy": "the driver hangs …"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import query


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "timeout": {"type": "float", "default": 20},
            "executable": {"type": "str", "default": "nvidia-smi"},
        },
        supports_check_mode=True,
    )
    report = query(module.params["timeout"], module.params["executable"])
    module.exit_json(
        changed=False,
        gpus=report.gpus,
        diagnosis=report.diagnosis.as_dict() if report.diagnosis else None,
    )


if __name__ == "__main__":
    main()
