# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Which lab an inventory means, as plain values.

They could be templates in group_vars. But Ansible evaluates a host's connection variables anew for each task, in a
process that knows nothing of the last one: two thirds of all templates that a run compiled were these.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ansible.plugins.inventory import BaseInventoryPlugin
from ansible.template import trust_as_template
from ansible_collections.servelab.sglang.plugins.module_utils.lab_identity import connection_variables, lab_variables

DOCUMENTATION = r"""
---
name: lab
short_description: Name the lab that belongs to this checkout
version_added: 0.1.0
description:
  - Gives all hosts C(lab_name), C(lab_id), C(lab_network) and C(lab_dir), which follow from checkout and name. Two
    checkouts, or two names, are two labs. The checkout is two directories above the file's own.
  - Gives hosts with a C(lab_number) what Ansible needs to reach them. They stand in files that are read before this
    one, in the order of their names.
options:
  plugin:
    description: What marks a file as this plugin's.
    type: str
    required: true
    choices: [servelab.sglang.lab]
  name:
    description: Which lab of the checkout.
    type: str
    default: demo
    env:
      - name: SERVELAB_LAB
author:
  - The Servelab developers
"""

EXAMPLES = r"""
# inventory/lab/lab.yml
plugin: servelab.sglang.lab
"""


class InventoryModule(BaseInventoryPlugin):  # type: ignore[misc]
    """Puts `lab_variables` on the group all, and `connection_variables` on hosts with a `lab_number`."""

    NAME = "servelab.sglang.lab"

    def verify_file(self, path: str) -> bool:
        return bool(super().verify_file(path)) and Path(path).name == "lab.yml"

    def parse(self, inventory: Any, loader: Any, path: str, cache: bool = True) -> None:
        super().parse(inventory, loader, path, cache)
        self._read_config_data(path)
        # The file may be a link; the directory it is in is what counts.
        checkout = Path(path).absolute().parent.parent.parent.resolve()
        lab = lab_variables(checkout, self.get_option("name"))
        # As trusted as what stands in the files beside it, or ansible-inventory marks each value.
        for key, value in lab.items():
            self.inventory.set_variable("all", key, trust_as_template(value))
        for host in self.inventory.hosts.values():
            if (number := host.vars.get("lab_number")) is not None:
                for key, value in connection_variables(lab, number).items():
                    self.inventory.set_variable(host.name, key, trust_as_template(value))
