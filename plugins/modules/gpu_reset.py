#!/usr/bin/python
# Apache-2.0
"""Reset GPUs that nobody holds."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_reset
short_description: Reset the given GPUs of a node, unless somebody holds them
version_added: 0.1.0
description:
  - Runs C(nvidia-smi --gpu-reset) for one card after the other. A reset ends whatever runs on a card, so it is refused
    while any process of the node or of any guest, a monitor included, has one of O(minors) open, or while a process may
    not be looked at.
  - Persistence mode keeps a card in use, so that the driver refuses. It is switched off for the card, and on again
    afterwards; nvidia-persistenced is no holder here.
  - Belongs on the node, or on a machine without one. In a guest the driver refuses it.
options:
  uuids:
    description: The cards, by UUID.
    type: list
    elements: str
    required: true
  minors:
    description: Numbers N of all /dev/nvidiaN that the cards are among. Nobody may have any of them open.
    type: list
    elements: int
    required: true
  timeout:
    description: Seconds for each reset.
    type: float
    default: 120
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Says whether the cards would be reset.
  diff_mode:
    support: none
    description: A reset is no setting.
"""

EXAMPLES = r"""
- name: Reset the card that has lost its memory
  servelab.sglang.gpu_reset:
    uuids: ["{{ sick.uuid }}"]
    minors: [3]
  delegate_to: "{{ pve_node }}"
"""

RETURN = r"""
results:
  description: One entry for each card, C(uuid), C(outcome) (reset, would be reset, refused or failed) and C(detail).
  returned: always
  type: list
  elements: dict
"""

from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_holders import scan
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_reset import reset, why_not


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "uuids": {"type": "list", "elements": "str", "required": True},
            "minors": {"type": "list", "elements": "int", "required": True},
            "timeout": {"type": "float", "default": 120},
        },
        supports_check_mode=True,
    )
    results: list[dict[str, Any]] = []
    for uuid in module.params["uuids"]:
        # Anew for each: somebody may have come meanwhile.
        if why := why_not(scan(view="node"), module.params["minors"]):
            outcome, detail = "refused", why
        elif module.check_mode:
            outcome, detail = "would be reset", ""
        else:
            outcome, detail = reset(uuid, module.params["timeout"])
        results.append({"uuid": uuid, "outcome": outcome, "detail": detail})
    module.exit_json(changed=any(row["outcome"] in ("reset", "would be reset") for row in results), results=results)


if __name__ == "__main__":
    main()
