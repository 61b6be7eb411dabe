#!/usr/bin/python
# Copyright: the Servelab developers
# SPDX-License-Identifier: Apache-2.0
"""One look at a running load client."""

from __future__ import annotations

DOCUMENTATION = r"""
module: load_probe
short_description: One look at a running load client
version_added: 0.1.0
description:
  - Reads the progress file of C(servelab load) and the state of the unit that runs it, and says how it stands.
  - Meant to be polled by P(servelab.sglang.watch#module). It changes nothing.
author:
  - The Servelab developers
extends_documentation_fragment: servelab.sglang.supervisor
options:
  unit:
    description: Name of the unit that runs the client. It may be transient and already forgotten.
    type: str
    required: true
  progress_file:
    description: Path of the client's progress file. It need not exist yet.
    type: path
    required: true
attributes:
  check_mode:
    support: full
    description: Looks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Watch the load client until it is done
  servelab.sglang.watch:
    module: servelab.sglang.load_probe
    args:
      unit: servelab-load.service
      progress_file: /var/lib/servelab/runs/20260101T120000Z-baseline/progress.json
    interval: 2
    stall_timeout: 600
"""

RETURN = r"""
state:
  description: V(working), V(done) or V(failed). Done with levels that are not valid is V(done); see RV(valid).
  returned: always
  type: str
phase:
  description: What the client is doing.
  returned: always
  type: str
progress:
  description: A sentence for a person.
  returned: always
  type: str
marker:
  description: Changes exactly when there is progress.
  returned: always
  type: str
cause:
  description: Why the client failed, null while it did not.
  returned: always
  type: str
remedy:
  description: What to do about it.
  returned: always
  type: str
valid:
  description: Whether every level is valid, null before the client is done.
  returned: always
  type: bool
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.load_progress import judge, read_progress
from ansible_collections.servelab.sglang.plugins.module_utils.supervision import SUPERVISOR_OPTIONS, supervisor


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "unit": {"type": "str", "required": True},
            "progress_file": {"type": "path", "required": True},
            **SUPERVISOR_OPTIONS,
        },
        supports_check_mode=True,
    )
    # The unit first: a client that ends between the two looks has then written its last word before the second.
    unit = supervisor(module.params["supervisor"], module.params["prefix"]).show(module.params["unit"])
    try:
        text = Path(module.params["progress_file"]).read_text(encoding="utf-8")
    except FileNotFoundError:
        text = None
    except OSError as problem:
        module.fail_json(msg=f"The progress file {module.params['progress_file']} cannot be read: {problem.strerror}")
    module.exit_json(changed=False, **judge(module.params["unit"], unit, read_progress(text)))


if __name__ == "__main__":
    main()
