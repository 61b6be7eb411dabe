#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Hold a server's greedy answers against those that the baseline gave on the same stack and model."""

from __future__ import annotations

DOCUMENTATION = r"""
module: correctness_probe
short_description: Compare a server's greedy answers with the recorded ones of the baseline
version_added: 0.1.0
description:
  - Asks for greedy answers to fixed prompts with log-probabilities, one after the other and all at once, and compares
    them with those of earlier starts of the baseline on the same model and stack. What may differ is what those starts
    differ by among themselves.
  - Without a record only gross errors are seen (one token repeated, a model that is sure of nothing, answers that are
    others when asked again, known answers that come out wrong), and the best status is V(unverified).
author:
  - The Servelab developers
options:
  host:
    description: Address on which the server listens.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which the server listens.
    type: int
    required: true
  record_dir:
    description: Where the answers of the baseline are kept, a file per model and stack.
    type: path
    default: /var/lib/servelab/correctness
  stack:
    description: The stack that serves; a link is followed.
    type: path
    default: /opt/servelab/stack
  record:
    description:
      - Keep these answers as one more start of the baseline, unless they are wrong. The five newest starts are kept.
      - In check mode nothing is kept.
    type: bool
    default: false
  start:
    description: What tells this start of the server from others, such as systemd's invocation id.
    type: str
    default: ""
  known_answers:
    description: Prompts whose right continuation is known, each with C(input_ids) and C(output_ids).
    type: list
    elements: dict
    default: []
  tokens:
    description: Tokens to ask for.
    type: int
    default: 24
  timeout:
    description: Seconds for one completion.
    type: int
    default: 120
  prefix:
    description: Directory below which C(etc/servelab/secrets/api_key) is, where the server asks for a key.
    type: path
    default: ""
attributes:
  check_mode:
    support: full
    description: Asks in check mode, too, and records nothing.
  diff_mode:
    support: none
    description: There is nothing to show.
"""

EXAMPLES = r"""
- name: See that a patched all-reduce adds up
  servelab.sglang.correctness_probe:
    port: 30000

- name: Keep what this start of the baseline says
  servelab.sglang.correctness_probe:
    port: 30000
    record: true
    start: 0123456789abcdef0123456789abcdef
"""

RETURN = r"""
status:
  description: V(verified) within what restarts of the baseline differ by, V(unverified), or V(wrong).
  returned: always
  type: str
reason:
  description: One sentence.
  returned: always
  type: str
figures:
  description: Share of equal tokens, KL divergence in nats and the tolerances; empty without a record.
  returned: always
  type: dict
record:
  description: The file of this model and stack.
  returned: always
  type: str
text:
  description: The first answer, cut to 300 characters.
  returned: always
  type: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.correctness_probe import probe
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import use_key_of


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "record_dir": {"type": "path", "default": "/var/lib/servelab/correctness"},
            "stack": {"type": "path", "default": "/opt/servelab/stack"},
            "record": {"type": "bool", "default": False},
            "start": {"type": "str", "default": ""},
            "known_answers": {"type": "list", "elements": "dict", "default": []},
            "tokens": {"type": "int", "default": 24},
            "timeout": {"type": "int", "default": 120},
            "prefix": {"type": "path", "default": ""},
        },
        supports_check_mode=True,
    )
    asked = module.params
    use_key_of(asked["prefix"])
    answer = probe(
        f"http://{asked['host']}:{asked['port']}",
        Path(asked["record_dir"]),
        asked["stack"],
        record=asked["record"],
        keep=not module.check_mode,
        start=asked["start"],
        known_answers=asked["known_answers"],
        tokens=asked["tokens"],
        timeout=asked["timeout"],
    )
    module.exit_json(**answer)


if __name__ == "__main__":
    main()
