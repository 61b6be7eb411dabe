#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Ask whether CUDA starts on this machine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: cuda_init
short_description: See whether CUDA starts on this machine
version_added: 0.1.0
description:
  - Calls C(cuInit) of the driver's C(libcuda.so.1) in a process of its own, with a time limit, and explains the answer.
  - Needs no toolkit. Never fails because of the answer; whoever calls it decides.
author: The Servelab developers
options:
  timeout:
    description: Seconds that CUDA may take to start. Without persistence it wakes every card.
    type: float
    default: 60
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: See whether CUDA starts
  servelab.sglang.cuda_init:
  register: cuda
  failed_when: cuda.state == 'failed'
"""

RETURN = r"""
state:
  description: V(ok), V(no_gpu) (CUDA says that there is none) or V(failed).
  returned: always
  type: str
code:
  description: The CUresult, or null where C(cuInit) was not reached.
  returned: always
  type: int
name:
  description: Its name.
  returned: always
  type: str
count:
  description: How many GPUs CUDA sees.
  returned: always
  type: int
cause:
  description: Why it does not start, a phrase, or empty.
  returned: always
  type: str
remedy:
  description: What to do, or empty.
  returned: always
  type: str
"""

from dataclasses import asdict

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.cuda_init import start_cuda


def main() -> None:
    module = AnsibleModule(argument_spec={"timeout": {"type": "float", "default": 60}}, supports_check_mode=True)
    module.exit_json(changed=False, **asdict(start_cuda(module.params["timeout"])))


if __name__ == "__main__":
    main()
