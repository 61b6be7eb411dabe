#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Documentation of the action plugin of the same name, which does the work on the controller."""

from __future__ import annotations

DOCUMENTATION = r"""
module: inventory_check
short_description: Check the whole inventory before any machine is touched
version_added: 0.1.0
description:
  - Looks at the variables of every host of the groups C(pve_nodes) and C(gpu_guests), and fails with all
    problems at once, one sentence each with the host, the value, the rule and the remedy.
  - Runs on the controller and connects to nothing.
author: The Servelab developers
options: {}
attributes:
  check_mode:
    description: Changes nothing, so it does the same in check mode.
    support: full
  diff_mode:
    description: Changes nothing.
    support: none
"""

EXAMPLES = r"""
- name: Check the inventory
  servelab.sglang.inventory_check:
"""

RETURN = r"""
problems:
  description: One sentence for each problem.
  returned: always
  type: list
  elements: str
parts:
  description:
    - The nodes and guests in parts of which none needs another. A node is in one part with its guests, and guests with
      those that their C(sglang_server_nodes) names.
  returned: success
  type: list
  elements: list
machines:
  description: All hosts of the inventory.
  returned: success
  type: list
  elements: str
"""
