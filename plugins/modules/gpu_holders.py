#!/usr/bin/python
# Apache-2.0
"""Find out who holds the GPUs of one machine."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: gpu_holders
short_description: Find out which processes hold a GPU
version_added: 0.1.0
description:
  - Looks at every open file and mapping of every process, and reports those whose device number is that of an NVIDIA
    device node. On a node this finds holders inside guests too, which C(fuser) does not.
  - A process that may not be looked at makes the view incomplete. An incomplete view never means that nobody is there.
  - Changes nothing, and therefore runs for real in check mode too. Needs root to see the processes of others.
options:
  view:
    description:
      - What this machine can see. A V(node) sees the processes of all its guests; a V(guest) only its own.
      - V(auto) is V(guest) in a container, else V(node).
    type: str
    choices: [auto, node, guest]
    default: auto
  protect:
    description:
      - Names of programs (shell patterns) that must not be signalled. Compared with the name of the process, of its
        program file and of its first word. The default is the list of the role P(servelab.sglang.gpu_clean#role).
    type: list
    elements: str
  unprotect:
    description: Names (shell patterns) that are treated as ordinary although O(protect) lists them.
    type: list
    elements: str
    default: []
  device_dir:
    description: Where the device nodes are.
    type: path
    default: /dev
  owners_dir:
    description:
      - Where files C(MODE.owner) say who started the unit C(servelab-MODE.service).
      - Default is C(run/servelab) below O(prefix).
    type: path
extends_documentation_fragment: servelab.sglang.supervisor
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
- name: See who holds the GPUs of all guests
  servelab.sglang.gpu_holders:
    view: node
  delegate_to: "{{ pve_node }}"
  register: on_node
"""

RETURN = r"""
holders:
  description: One entry for each process that holds at least one NVIDIA device node.
  returned: always
  type: list
  elements: dict
  contains:
    pid: {description: Its number on this machine., type: int}
    ns_pid: {description: Its number in its own PID namespace., type: int}
    ns_pids: {description: "Its numbers from this machine's namespace inwards.", type: list}
    ppid: {description: Number of its parent., type: int}
    parent: {description: C(pid) and C(name) of its parent., type: dict}
    start_time: {description: Start in clock ticks since boot., type: int}
    since: {description: Start as UTC time., type: str}
    vmid: {description: "Guest it belongs to, from its cgroup; null when it belongs to this machine itself.", type: int}
    unit: {description: The unit it belongs to., type: str}
    stop: {description: What a person types to stop that unit., type: str}
    supervised: {description: Whether the supervisor of O(supervisor=process) says so., type: bool}
    cgroup: {description: Its cgroup., type: str}
    user: {description: Its user., type: str}
    name: {description: Its short name., type: str}
    command: {description: Its command line without secrets., type: str}
    devices: {description: Names of the device nodes it holds., type: list}
    gpus: {description: "Numbers N of the nodes /dev/nvidiaN it holds.", type: list}
    state: {description: "Its state: R, S, D (in the driver), Z (zombie), …", type: str}
    protected: {description: Why it must not be signalled; null when it may., type: str}
complete:
  description: Whether every process could be looked at.
  returned: always
  type: bool
unreadable:
  description:
    - C(pid) and C(name) of the processes that could not be looked at. Those on the protect list are not among them, as
      they may hold a GPU.
  returned: always
  type: list
  elements: dict
view:
  description: node or guest.
  returned: always
  type: str
partial:
  description: Whether others that this machine cannot see may hold the GPUs too (a guest).
  returned: always
  type: bool
nodes:
  description: Paths of the NVIDIA device nodes.
  returned: always
  type: list
  elements: str
gpus:
  description: Numbers N of the nodes /dev/nvidiaN.
  returned: always
  type: list
  elements: int
not_devices:
  description: Paths that have a device node's name and are none.
  returned: always
  type: list
  elements: str
owners:
  description: Who started each unit. C(stopped) when a holder survived a unit that is not running.
  returned: always
  type: dict
  sample: {"servelab-baseline.service": "bench"}
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.gpu_holders import PROTECT, attribute, scan, unit_owners
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "view": {"type": "str", "choices": ["auto", "node", "guest"], "default": "auto"},
            "protect": {"type": "list", "elements": "str"},
            "unprotect": {"type": "list", "elements": "str", "default": []},
            "device_dir": {"type": "path", "default": "/dev"},
            "owners_dir": {"type": "path"},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    wanted = module.params
    protect = PROTECT if wanted["protect"] is None else wanted["protect"]
    prefix = wanted["prefix"].rstrip("/")
    keeper = supervisor(wanted["supervisor"], prefix)
    seen = scan(device_dir=wanted["device_dir"], view=wanted["view"], protect=protect, unprotect=wanted["unprotect"])
    attribute(seen["holders"], keeper)
    owners = unit_owners(wanted["owners_dir"] or f"{prefix}/run/servelab", seen["holders"], keeper)
    module.exit_json(changed=False, owners=owners, **seen)


if __name__ == "__main__":
    main()
