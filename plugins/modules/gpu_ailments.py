#!/usr/bin/python
# Apache-2.0
"""What may be wrong with the GPUs of a node when they do not become clean."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_ailments
short_description: Read what the kernel and nvidia-smi report about sick GPUs
version_added: 0.1.0
description:
  - Xid reports in the kernel's log, memory errors that nvidia-smi counts, and dead processes that their parents do not
    collect. It explains why GPUs do not become clean; it does not say that they are.
  - Changes nothing, and therefore runs for real in check mode too.
options:
  timeout:
    description: Seconds for each command.
    type: float
    default: 20
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
- name: See what ails the cards
  servelab.sglang.gpu_ailments:
  delegate_to: "{{ pve_node }}"
"""

RETURN = r"""
xids:
  description: The last Xid reports since the boot, with C(bus_id), C(code), C(text), C(cause) and C(remedy).
  returned: always
  type: list
  elements: dict
memory_errors:
  description: Cards with memory errors, with C(bus_id), C(cause) and C(remedy).
  returned: always
  type: list
  elements: dict
zombies:
  description: Dead processes that are not collected, with C(pid), C(name), C(ppid) and C(parent).
  returned: always
  type: list
  elements: dict
log_readable:
  description: Whether the kernel's log could be read.
  returned: always
  type: bool
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_stuck import ECC_QUERY, memory_errors, xids, zombies
from ansible_collections.servelab.sglang.plugins.module_utils.nvidia_smi import run_bounded


def _output(argv: list[str], timeout: float) -> str | None:
    """What a command printed; None when it is not there, fails or hangs."""
    try:
        answer = run_bounded(argv, timeout)
    except (FileNotFoundError, PermissionError):
        return None
    return answer[1] if answer and answer[0] == 0 else None


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(argument_spec={"timeout": {"type": "float", "default": 20}}, supports_check_mode=True)
    timeout = module.params["timeout"]
    log = _output(["dmesg"], timeout)
    counters = _output(["nvidia-smi", f"--query-gpu={','.join(ECC_QUERY)}", "--format=csv,noheader,nounits"], timeout)
    module.exit_json(
        changed=False,
        xids=xids(log or ""),
        memory_errors=memory_errors(counters or ""),
        zombies=zombies(),
        log_readable=log is not None,
    )


if __name__ == "__main__":
    main()
