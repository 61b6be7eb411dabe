#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""The ssh keys of a lab, and who is known by which."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_keys
short_description: Make ssh keys where there are none, and note host keys
version_added: 0.1.0
description:
  - A pair of which one half is missing or empty, as an interrupted run leaves it, is made anew.
options:
  keys:
    description: Pairs of type Ed25519, without a passphrase.
    type: list
    elements: dict
    required: true
    suboptions:
      path:
        description: The private key; the public one lies beside it, with C(.pub).
        type: path
        required: true
      comment:
        description: What the public key ends with.
        type: str
        required: true
      known_as:
        description: The host whose key it is; noted in O(known_hosts).
        type: str
  known_hosts:
    description: The file of known host keys. Other hosts' lines in it stay.
    type: path
    required: true
attributes:
  check_mode:
    description: Tells which keys would be made.
    support: full
  diff_mode:
    description: Keys are not shown.
    support: none
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Make the controller's key and the node's
  servelab.sglang.lab_keys:
    known_hosts: /var/lib/servelab-lab/0a1b2c/ssh/known_hosts
    keys:
      - path: /var/lib/servelab-lab/0a1b2c/ssh/id_ed25519
        comment: servelab lab 0a1b2c
      - path: /var/lib/servelab-lab/0a1b2c/servelab-0a1b2c-pve1/rootfs/etc/ssh/ssh_host_ed25519_key
        comment: pve1
        known_as: 10.200.1.11
"""

RETURN = r"""
public:
  description: The public keys in the order asked for; in check mode empty texts for those that are not made yet.
  returned: always
  type: list
  elements: str
changes:
  description: What was done, or would be, one phrase each.
  returned: always
  type: list
  elements: str
"""

from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_keys import is_whole, known, public_path


def make(module: AnsibleModule, path: Path, comment: str) -> None:
    """Made beside its place and moved there, the public half first: the private one is the sign of a whole pair."""
    half = path.with_name(f".{path.name}.half")
    for old in (half, public_path(half)):
        old.unlink(missing_ok=True)
    words = ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", comment, "-f", str(half)]
    module.run_command(words, check_rc=True)
    public_path(half).replace(public_path(path))
    half.replace(path)


def main() -> None:
    key = {
        "path": {"type": "path", "required": True, "no_log": False},
        "comment": {"type": "str", "required": True},
        "known_as": {"type": "str"},
    }
    module = AnsibleModule(
        argument_spec={
            "keys": {"type": "list", "elements": "dict", "required": True, "options": key, "no_log": False},
            "known_hosts": {"type": "path", "required": True},
        },
        supports_check_mode=True,
    )
    changes, public = [], []
    noted = Path(module.params["known_hosts"])
    before = text = noted.read_text() if noted.exists() else ""
    for wanted in module.params["keys"]:
        path = Path(wanted["path"])
        if not is_whole(path):
            changes.append(f"make {path.name} ({wanted['comment']})")
            if module.check_mode:
                public.append("")
                continue
            make(module, path, wanted["comment"])
        public.append(public_path(path).read_text().strip())
        if wanted["known_as"]:
            text = known(text, wanted["known_as"], public[-1])
    if text != before:
        changes.append(f"note host keys in {noted}")
        if not module.check_mode:
            half = noted.with_name(f".{noted.name}.half")
            half.write_text(text)
            half.chmod(0o600)
            half.replace(noted)
    module.exit_json(changed=bool(changes), changes=changes, public=public)


if __name__ == "__main__":
    main()
