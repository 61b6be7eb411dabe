#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""How this machine reaches package registries."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_registries
short_description: Read how this machine reaches package registries
version_added: 0.1.0
description:
  - What lets this machine reach Debian and PyPI (mirrors, pip's settings, proxies, name servers, further certificate
    authorities), so that a container on it can be given the same. Changes nothing.
  - Addresses may carry credentials, hence C(no_log) on the task that uses this.
options: {}
attributes:
  check_mode:
    description: Looks only, in check mode too.
    support: full
  diff_mode:
    description: There is nothing to differ.
    support: none
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Read how this machine reaches package registries
  servelab.sglang.lab_registries:
  register: host
  no_log: true
"""

RETURN = r"""
nameservers:
  description: Name servers that are reachable from a container; empty when there is none.
  returned: always
  type: list
  elements: str
pip:
  description: Settings in pip.conf's names; without directories and file indexes.
  returned: always
  type: dict
proxies:
  description: Proxy variables in lower case; empty without a proxy.
  returned: always
  type: dict
debian:
  description: The archives' addresses, V(main) and V(security).
  returned: always
  type: dict
certificates:
  description: Certificate authorities (PEM) that an administrator added to this machine.
  returned: always
  type: list
  elements: str
"""

import os
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import (
    certificates,
    debian_mirrors,
    nameservers,
    pip_settings,
    proxies,
    read_all,
)

HOME = Path.home()
# pip's own order: a later file wins.
PIP_FILES = [
    Path("/etc/xdg/pip/pip.conf"),
    Path("/etc/pip.conf"),
    HOME / ".pip/pip.conf",
    HOME / ".config/pip/pip.conf",
]
# Where an administrator puts authorities on Debian and its kin, and on Fedora and its kin.
CA_DIRECTORIES = [Path("/usr/local/share/ca-certificates"), Path("/etc/pki/ca-trust/source/anchors")]


def main() -> None:
    module = AnsibleModule(argument_spec={}, supports_check_mode=True)
    os_release = "".join(read_all([Path("/etc/os-release")]))
    apt = Path("/etc/apt")
    resolv_conf, uplink = Path("/etc/resolv.conf"), Path("/run/systemd/resolve/resolv.conf")
    module.exit_json(
        changed=False,
        nameservers=nameservers("".join(read_all([resolv_conf])), "".join(read_all([uplink]))),
        pip=pip_settings(read_all(PIP_FILES), os.environ),
        proxies=proxies(os.environ),
        debian=debian_mirrors(
            read_all(
                [
                    apt / "sources.list",
                    *sorted((apt / "sources.list.d").glob("*.list")),
                    *sorted((apt / "sources.list.d").glob("*.sources")),
                ]
            ),
            is_debian="ID=debian" in os_release.splitlines(),
        ),
        certificates=certificates(
            read_all(path for directory in CA_DIRECTORIES for path in sorted(directory.glob("**/*")) if path.is_file())
        ),
    )


if __name__ == "__main__":
    main()
