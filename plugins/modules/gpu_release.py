#!/usr/bin/python
# Apache-2.0
"""Make the given holders of GPUs go."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_release
short_description: Make exactly the given processes release the GPUs
version_added: 0.1.0
description:
  - Sends SIGTERM to the given processes, waits, and sends SIGKILL to those that are still there.
  - Each process is pinned through a pidfd and compared with the time at which it was seen to start, so that a reused
    number never hits another process.
  - Never signals a process with C(protected) set, one of this very connection, or the machine's first process.
options:
  holders:
    description: The processes, as RV(servelab.sglang.gpu_holders#module:holders) of the same machine returned them.
    type: list
    elements: dict
    required: true
  grace:
    description: Seconds between SIGTERM and SIGKILL.
    type: float
    default: 10
  kill_wait:
    description: Seconds to wait after SIGKILL.
    type: float
    default: 5
  vmid:
    description: On a node, the only guest whose processes may be signalled (verified by their cgroup).
    type: int
  cgroup_prefixes:
    description: When given, only processes in these cgroups or below them may be signalled.
    type: list
    elements: str
    default: []
  nodes:
    description:
      - Device nodes to sweep with C(fuser -k). C(fuser) has no exclude list, so give them only when everybody who holds
        them may be killed. This is checked again before each sweep; when somebody else is there, or C(fuser) is
        missing, the processes are signalled one by one.
    type: list
    elements: path
    default: []
author:
  - The Servelab developers
attributes:
  check_mode:
    support: full
    description: Says who would be released.
  diff_mode:
    support: none
    description: The result lists every process and its outcome.
"""

EXAMPLES = r"""
- name: Release what is left of the benchmark's server
  servelab.sglang.gpu_release:
    holders: "{{ seen.holders | selectattr('unit', 'equalto', 'servelab-baseline.service') }}"
    grace: 15
"""

RETURN = r"""
results:
  description: One entry for each process given.
  returned: always
  type: list
  elements: dict
  contains:
    pid: {description: Its number., type: int}
    command: {description: Its command line without secrets., type: str}
    outcome:
      description: "One of exited, killed, gone before, refused, still there, would be released (check mode)."
      type: str
    detail: {description: The reason of a refusal, or the state of one that is still there., type: str}
notes:
  description: What was done by fuser, and why it was not used when it was not.
  returned: always
  type: list
  elements: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_release import release


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "holders": {"type": "list", "elements": "dict", "required": True},
            "grace": {"type": "float", "default": 10},
            "kill_wait": {"type": "float", "default": 5},
            "vmid": {"type": "int"},
            "cgroup_prefixes": {"type": "list", "elements": "str", "default": []},
            "nodes": {"type": "list", "elements": "path", "default": []},
        },
        supports_check_mode=True,
    )
    wanted = module.params
    for holder in wanted["holders"]:
        if not holder.get("pid") or holder.get("start_time") is None:
            module.fail_json(
                msg=f"holders: {holder!r} has no pid or no start_time; give entries as gpu_holders returned them"
            )
    done = release(
        wanted["holders"],
        grace=wanted["grace"],
        kill_wait=wanted["kill_wait"],
        vmid=wanted["vmid"],
        cgroup_prefixes=wanted["cgroup_prefixes"],
        nodes=wanted["nodes"],
        dry_run=module.check_mode,
    )
    module.exit_json(changed=done["signalled"] > 0, results=done["results"], notes=done["notes"])


if __name__ == "__main__":
    main()
