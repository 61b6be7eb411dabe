#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Whether the servers of a router answer on the router's machine."""

from __future__ import annotations

DOCUMENTATION = r"""
module: router_replicas
short_description: Ask the servers of a router from its machine
version_added: 0.1.0
description:
  - Asks each server for its models, with the key that the router will show, and says what is wrong with any of them.
  - All of them must serve the same, because the router takes them for interchangeable.
author:
  - The Servelab developers
options:
  replicas:
    description: The servers, each with C(name) and C(url).
    type: list
    elements: dict
    required: true
  api_key:
    description: The key to show.
    type: str
    default: ""
  timeout:
    description: Seconds for an answer.
    type: int
    default: 10
attributes:
  check_mode:
    support: full
    description: Asks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Ask two servers
  servelab.sglang.router_replicas:
    replicas:
      - {name: gpu1, url: "http://10.0.0.1:30000"}
      - {name: gpu2, url: "http://10.0.0.2:30000"}
"""

RETURN = r"""
problems:
  description: A sentence for everything that is wrong.
  returned: always
  type: list
  elements: str
model:
  description: The model that all serve, null where nobody answers.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import ask, use_key
from ansible_collections.servelab.sglang.plugins.module_utils.router import models_of, problems


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "replicas": {"type": "list", "elements": "dict", "required": True},
            "api_key": {"type": "str", "default": "", "no_log": True},
            "timeout": {"type": "int", "default": 10},
        },
        supports_check_mode=True,
    )
    use_key(module.params["api_key"])
    found = module.params["replicas"]
    answers = [ask(f"{one['url']}/v1/models", module.params["timeout"]) for one in found]
    names = [name for answer in answers for name in models_of(answer)]
    module.exit_json(changed=False, problems=problems(found, answers), model=names[0] if names else None)


if __name__ == "__main__":
    main()
