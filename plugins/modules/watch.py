# Copyright: the Servelab developers
# SPDX-License-Identifier: Apache-2.0
"""Documentation of the action plugin of the same name; there is no module behind it."""

from __future__ import annotations

DOCUMENTATION = r"""
module: watch
short_description: Poll a probe module and show its progress
version_added: 0.1.0
description:
  - Runs a probe module again and again until it reports V(done) or V(failed) and prints every new C(progress) at once.
  - The deadline follows the progress. As long as the probe's C(marker) changes, there is none.
  - A dropped connection is no failure; the next look tries again.
author:
  - The Servelab developers
options:
  module:
    description: Fully qualified name of the probe module. It returns state, progress, marker, cause and remedy.
    type: str
    required: true
  args:
    description: Arguments of the probe module.
    type: dict
    default: {}
  interval:
    description: Seconds between two looks.
    type: float
    default: 2.0
  stall_timeout:
    description: Seconds without a new marker after which watching fails.
    type: float
    default: 900.0
  party:
    description:
      - Watches that belong together, one for each guest of a server over several, at the same time (as many forks). The
        first guest's ends the others with V(done); whoever fails ends the others with its own cause.
    type: dict
    suboptions:
      key:
        description: The same text for all that belong together, and for none else in this run of Ansible.
        type: str
        required: true
      name:
        description: What the others call this one.
        type: str
        required: true
      first:
        description: Whether this is the guest that answers.
        type: bool
        required: true
attributes:
  check_mode:
    support: full
    description: Skips with a reason, because nothing was started that could be watched.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: Wait until the baseline answers
  servelab.sglang.watch:
    module: servelab.sglang.server_probe
    args:
      unit: servelab-baseline.service
      port: 30000
    stall_timeout: 1200
"""

RETURN = r"""
state:
  description: The last state, V(done) or V(failed). All else that the probe returned stands beside it.
  returned: always, except in check mode
  type: str
by:
  description: Who of the party failed, where it was another.
  returned: on another's failure
  type: str
stalled:
  description: Whether watching ended because there was no news.
  returned: on a stall
  type: bool
"""
