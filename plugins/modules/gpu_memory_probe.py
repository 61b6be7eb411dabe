#!/usr/bin/python
# Apache-2.0
"""One look at memory that is being given back."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_memory_probe
short_description: One look at the memory of GPUs that are being emptied
version_added: 0.1.0
description:
  - Asks nvidia-smi as P(servelab.sglang.nvidia_smi#module) does, and says in a sentence which cards still use memory.
  - Meant to be polled by P(servelab.sglang.watch#module). It changes nothing.
options:
  threshold_mib:
    description: A card that uses at most this much memory (MiB) is empty.
    type: int
    required: true
  uuids:
    description: The cards that matter. All when it is not given.
    type: list
    elements: str
  timeout:
    description: Seconds to wait for nvidia-smi.
    type: float
    default: 20
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Looks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Wait until the memory is free
  servelab.sglang.watch:
    module: servelab.sglang.gpu_memory_probe
    args: {threshold_mib: 64}
    stall_timeout: 60
"""

RETURN = r"""
state:
  description: V(done) when the cards are empty, or when nvidia-smi says why it cannot tell; else V(working).
  returned: always
  type: str
progress:
  description: Which cards still use how much.
  returned: always
  type: str
marker:
  description: Changes with the memory in use.
  returned: always
  type: str
gpus:
  description: As RV(servelab.sglang.nvidia_smi#module:gpus).
  returned: always
  type: list
  elements: dict
diagnosis:
  description: As RV(servelab.sglang.nvidia_smi#module:diagnosis).
  returned: always
  type: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import memory_verdict, query


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "threshold_mib": {"type": "int", "required": True},
            "uuids": {"type": "list", "elements": "str"},
            "timeout": {"type": "float", "default": 20},
        },
        supports_check_mode=True,
    )
    report = query(module.params["timeout"])
    seen: dict[str, Any] = {
        "gpus": report.gpus,
        "diagnosis": report.diagnosis.as_dict() if report.diagnosis else None,
    }
    verdict = memory_verdict(seen, module.params["threshold_mib"], module.params["uuids"])
    # Where nvidia-smi says that it cannot know, waiting does not help: whoever asked decides.
    done = verdict["clean"] is True or report.diagnosis is not None
    module.exit_json(
        changed=False,
        state="done" if done else "working",
        progress="" if done else "; ".join(verdict["reasons"]),
        marker=str([gpu["memory_used_mib"] for gpu in verdict["gpus"]]),
        **seen,
    )


if __name__ == "__main__":
    main()
