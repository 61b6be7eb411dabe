#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Everything that lies in a lab's directory, or runs from it."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_remove
short_description: Stop a lab's containers and delete its directory
version_added: 0.1.0
description:
  - Takes away what is there, not what an inventory names, so that a smaller inventory removes a larger lab too.
  - Copes with whatever an interrupted run left, that is a container without a configuration, without a monitor process,
    or half unpacked.
options:
  lxc_path:
    description: The lab's directory, which holds its containers' directories.
    type: path
    required: true
  prefix:
    description: What all of the lab's containers' names begin with.
    type: str
    required: true
attributes:
  check_mode:
    description: Tells what would change.
    support: full
  diff_mode:
    description: What is removed is told in RV(changes).
    support: none
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Remove the lab's nodes with their guests
  servelab.sglang.lab_remove:
    lxc_path: /var/lib/servelab-lab/0a1b2c
    prefix: servelab-0a1b2c-
"""

RETURN = r"""
changes:
  description: What was done, or would be, one phrase each.
  returned: always
  type: list
  elements: str
"""

import contextlib
import os
import re
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_container import (
    kill_processes_of,
    mounts_under,
    processes_of,
    remove_cgroups_of,
)
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import with_sbin

LOCKS = Path("/run/lxc/lock")
_CONTROL_SOCKET = re.compile(r"[0-9a-f]{40}")
_CGROUP = r"lxc\.(?:payload|monitor)\.({}[a-z0-9-]+?)(?:-\d+)?$"


class Lab:
    """Collects what has to change; does it unless in check mode."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.directory = Path(module.params["lxc_path"])
        self.prefix = module.params["prefix"]
        self.changes: list[str] = []

    def changing(self, phrase: str) -> bool:
        """Note a change; whether it is to be carried out."""
        self.changes.append(phrase)
        return not self.module.check_mode

    def containers(self) -> list[str]:
        """Names by their directories, and by their cgroups: a directory may be gone while its container still runs."""
        named = {path.name for path in self.directory.glob(f"{self.prefix}*") if path.is_dir()}
        pattern = re.compile(_CGROUP.format(re.escape(self.prefix)))
        for place in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            found = [pattern.fullmatch(path.name) for path in Path(place).glob(f"lxc.*.{self.prefix}*")]
            named |= {match[1] for match in found if match}
        return sorted(named)

    def close_connections(self) -> None:
        """One that is kept open to a machine that is gone would make the next lab's first call hang."""
        for path in (self.directory / "ssh").glob("*"):
            if _CONTROL_SOCKET.fullmatch(path.name) and path.is_socket() and self.changing(f"close {path.name[:8]}"):
                # A socket without a listener behind it is as good as closed.
                self.module.run_command(["ssh", "-O", "exit", "-o", f"ControlPath={path}", "lab"])

    def stop(self, name: str) -> None:
        if not processes_of(name) or not self.changing(f"stop {name}"):
            return
        if (self.directory / name / "config").exists() and self.module.get_bin_path("lxc-stop"):
            self.module.run_command(["lxc-stop", "-P", str(self.directory), "-n", name, "-k"])
        if left := kill_processes_of(name):
            self.module.fail_json(msg=f"Processes of {name} do not end: {left}. See `ps -o pid,stat,args`.")

    def forget(self, name: str) -> None:
        """What LXC keeps about a container elsewhere."""
        if self.module.check_mode:
            return
        remove_cgroups_of(name)
        (LOCKS / str(self.directory).lstrip("/") / f".{name}").unlink(missing_ok=True)

    def delete(self) -> None:
        points = mounts_under(Path("/proc/self/mountinfo").read_text(), self.directory)
        if points and self.changing(f"unmount {', '.join(points)}"):
            for point in points:
                self.module.run_command(["umount", point], check_rc=True)
        if self.directory.exists() and self.changing(f"delete {self.directory}"):
            shutil.rmtree(self.directory)
        if self.module.check_mode:
            return
        with contextlib.suppress(OSError):  # other labs' are there
            self.directory.parent.rmdir()
        locks = LOCKS / str(self.directory).lstrip("/")
        with contextlib.suppress(OSError):
            while locks != LOCKS:
                locks.rmdir()
                locks = locks.parent


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lxc_path": {"type": "path", "required": True},
            "prefix": {"type": "str", "required": True},
        },
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    module.run_command_environ_update = {"LC_ALL": "C"}
    if os.geteuid() != 0 and not module.check_mode:
        module.fail_json(msg="A lab's container is root's business: run this as root.")
    lab = Lab(module)
    names = lab.containers()
    lab.close_connections()
    for name in names:
        lab.stop(name)
    for name in names:
        lab.forget(name)
    lab.delete()
    module.exit_json(changed=bool(lab.changes), changes=lab.changes)


if __name__ == "__main__":
    main()
