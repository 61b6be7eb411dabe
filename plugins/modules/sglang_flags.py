#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Turn a mode's args into a command line that the installed SGLang accepts."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: sglang_flags
short_description: Check server flags against the installed SGLang and write its command line
version_added: 0.1.0
description:
  - Reads the flags of the installed release from its source, without importing it, and checks O(args) as the
    server's own parser would. Renamed flags are translated with a notice; removed and unknown ones are refused by name.
  - Changes nothing. All errors are found at once.
author: Servelab contributors (@servelab)
options:
  package_dir:
    description: The installed package, the directory named V(sglang). May hold wildcards that fit one directory.
    type: str
    required: true
  args:
    description:
      - Flag names with underscores and their values, for example C(tp_size) and V(8).
      - V(true) is a bare flag, V(false) leaves it out, null is ignored, a list gives several values, a mapping is
        written as JSON.
    type: dict
    default: {}
  env:
    description: The mode's environment variables. What does nothing in the installed release is a notice.
    type: dict
    default: {}
attributes:
  check_mode:
    description: Runs in check mode, as it changes nothing.
    support: full
  diff_mode:
    description: There is nothing to show.
    support: none
notes:
  - In check mode a package that is not there yet is no error; RV(argv) is then null.
"""

EXAMPLES = r"""
- name: Check a mode against the installed SGLang
  servelab.sglang.sglang_flags:
    package_dir: /opt/servelab/stack/lib/python3*/site-packages/sglang
    args:
      model_path: /shared/kimi-k2.5-int4
      tp_size: 8
      trust_remote_code: true
  register: flags
  failed_when: flags.errors | length > 0
"""

RETURN = r"""
argv:
  description: The words after the server's command. Complete only when RV(errors) is empty.
  returned: success
  type: list
  elements: str
errors:
  description: What the release does not accept, one sentence each.
  returned: success
  type: list
  elements: str
notices:
  description: What was translated, one sentence each.
  returned: success
  type: list
  elements: str
release:
  description: The installed release; null in check mode when SGLang is not installed yet.
  returned: success
  type: str
  sample: 0.5.23
"""

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_env import notices as env_notices
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_flags import FlagsUnreadable, read_flags, resolve
from ansible_collections.servelab.sglang.plugins.module_utils.sglang_release import (
    ReleaseError,
    find_package,
    read_version,
)


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "package_dir": {"type": "str", "required": True},
            "args": {"type": "dict", "default": {}},
            "env": {"type": "dict", "default": {}},
        },
        supports_check_mode=True,
    )
    try:
        package_dir = find_package(module.params["package_dir"])
    except ReleaseError as error:
        if not module.check_mode:
            module.fail_json(msg=str(error))
        notice = "SGLang is not installed yet; its flags were not checked."
        module.exit_json(changed=False, argv=None, errors=[], notices=[notice], release=None)
    try:
        release = read_version(package_dir)
        result = resolve(read_flags(package_dir), module.params["args"], f"SGLang {release}")
        result.notices.extend(env_notices(module.params["env"], module.params["args"], package_dir, release))
    except (ReleaseError, FlagsUnreadable, OSError) as error:
        module.fail_json(msg=str(error))
    module.exit_json(changed=False, argv=result.argv, errors=result.errors, notices=result.notices, release=release)


if __name__ == "__main__":
    main()
