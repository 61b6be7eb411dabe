#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Ask a server twice for the same greedy completion: an answer that is not itself again is wrong."""

from __future__ import annotations

DOCUMENTATION = r"""
module: correctness_probe
short_description: Compare two greedy answers of a server to one prompt
version_added: 0.1.0
description:
  - Two greedy completions of one prompt must have the same text and as many tokens as were asked for.
  - This proves that nothing is grossly wrong, such as an all-reduce that returns garbage. It does not prove that the
    answer is right, so the best status is V(unverified).
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
  model:
    description: Name of the model to ask for.
    type: str
  prompt:
    description: The prompt.
    type: str
    default: "List the first ten prime numbers, separated by commas: 2, 3, 5,"
  tokens:
    description: Tokens to ask for.
    type: int
    default: 32
  timeout:
    description: Seconds for one completion.
    type: int
    default: 120
attributes:
  check_mode:
    support: full
    description: Asks in check mode, too.
  diff_mode:
    support: none
    description: Changes nothing.
"""

EXAMPLES = r"""
- name: See that the server agrees with itself
  servelab.sglang.correctness_probe:
    port: 30000
"""

RETURN = r"""
status:
  description: V(unverified) where nothing is wrong as far as this can see, else V(wrong).
  returned: always
  type: str
reason:
  description: One sentence.
  returned: always
  type: str
text:
  description: The first answer, cut to 300 characters.
  returned: always
  type: str
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.readiness import self_consistency
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import complete


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "model": {"type": "str"},
            "prompt": {"type": "str", "default": "List the first ten prime numbers, separated by commas: 2, 3, 5,"},
            "tokens": {"type": "int", "default": 32},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    asked = module.params
    url = f"http://{asked['host']}:{asked['port']}"
    answers = [complete(url, asked["model"], asked["prompt"], asked["tokens"], asked["timeout"]) for _ in range(2)]
    status, reason = self_consistency(answers[0], answers[1], asked["tokens"])
    body = answers[0].body
    text = str(body["choices"][0].get("text"))[:300] if isinstance(body, dict) and body.get("choices") else ""
    module.exit_json(changed=False, status=status, reason=reason, text=text)


if __name__ == "__main__":
    main()
