#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""The LXC container that plays the node."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_container
short_description: Unpack and start the LXC container that plays a node
version_added: 0.1.0
description:
  - The container lies under a directory of the lab, not under C(/var/lib/lxc), and so is never in the way of others.
  - Whatever an interrupted run left is coped with, that is a container without a configuration, without a monitor
    process, or half unpacked. M(servelab.sglang.lab_remove) takes it away.
options:
  lxc_path:
    description: The directory that holds the container's directory.
    type: path
    required: true
  name:
    description: The container's name.
    type: str
    required: true
  image:
    description:
      - The root file system as C(.tar.zst).
      - A container that exists keeps the root file system it has.
    type: path
    required: true
  config:
    description:
      - Lines of the LXC configuration; the name and the place of the root file system are added.
      - A running container whose configuration changes is restarted.
    type: list
    elements: str
    required: true
  place:
    description:
      - Large files of this machine that the container is to have, as a path in it and the file.
      - They are hard links where that is possible, and copied where it is not.
    type: dict
    default: {}
  state:
    description:
      - V(created) unpacks and configures; a running container with another configuration is stopped.
      - V(started) starts it too.
    type: str
    choices: [created, started]
    default: started
attributes:
  check_mode:
    description: Tells what would change.
    support: full
  diff_mode:
    description: Shows the configuration before and after.
    support: full
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Start the node
  servelab.sglang.lab_container:
    lxc_path: /var/lib/servelab-lab/0a1b2c
    name: servelab-0a1b2c-pve1
    image: /var/cache/servelab-lab/images/node-trixie-0123456789ab.tar.zst
    config: ["lxc.uts.name = pve1"]
"""

RETURN = r"""
changes:
  description: What was done, or would be, one phrase each.
  returned: always
  type: list
  elements: str
exists:
  description: Whether the root file system is there; in check mode it may not be.
  returned: always
  type: bool
rootfs:
  description: The root file system's directory.
  returned: always
  type: str
image:
  description: The file name of the image that the container was made from; empty when it is not known.
  returned: always
  type: str
"""

import os
import shutil
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_container import kill_processes_of
from ansible_collections.servelab.sglang.plugins.module_utils.lab_files import EscapeError, place
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import with_sbin


class Container:
    """Collects what has to change; does it unless in check mode."""

    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.lxc_path, self.name = Path(module.params["lxc_path"]), module.params["name"]
        self.directory = self.lxc_path / self.name
        self.rootfs = self.directory / "rootfs"
        self.config = self.directory / "config"
        self.origin = self.directory / "image"
        self.log = self.lxc_path / f"{self.name}.log"
        self.changes: list[str] = []
        self.diff: dict[str, str] = {}

    def lxc(self, tool: str, *words: str) -> tuple[int, str, str]:
        code, out, err = self.module.run_command([tool, "-P", str(self.lxc_path), "-n", self.name, *words])
        return code, out, err

    def changing(self, phrase: str) -> bool:
        """Note a change; whether it is to be carried out."""
        self.changes.append(phrase)
        return not self.module.check_mode

    def running(self) -> bool:
        if not self.config.exists():
            return False
        return self.lxc("lxc-info", "-s", "-H")[1].strip() not in ("", "STOPPED")

    def create(self, image: Path, config: str) -> None:
        if not self.rootfs.exists() and self.changing(f"unpack {image.name}"):
            half = self.directory / "rootfs.half"
            shutil.rmtree(half, ignore_errors=True)
            half.mkdir(parents=True, mode=0o755)
            unpack = ["tar", "--zstd", "--numeric-owner", "--xattrs", "-xpf", str(image), "-C", str(half)]
            self.module.run_command(unpack, check_rc=True)
            self.origin.write_text(image.name + "\n")
            half.rename(self.rootfs)
        before = self.config.read_text() if self.config.exists() else ""
        if before != config:
            self.diff = {
                "before_header": str(self.config),
                "after_header": str(self.config),
                "before": before,
                "after": config,
            }
            if self.running() and self.changing("stop it for the new configuration"):
                self.lxc("lxc-stop", "-t", "30")
            if self.changing("write the configuration"):
                half_config = self.config.with_suffix(".half")
                half_config.write_text(config)
                half_config.rename(self.config)

    def start(self) -> None:
        if self.running() or not self.changing("start it"):
            return
        # A supervisor that was killed leaves its container behind, and a second one on the same files would spoil both.
        if left := kill_processes_of(self.name):
            self.module.fail_json(msg=f"Processes of {self.name} do not end: {left}. See `ps -o pid,stat,args`.")
        code, _, err = self.lxc("lxc-start", "-d", "-o", str(self.log), "-l", "WARN")
        if code != 0:
            told = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
            why = "; ".join(line for line in told[-12:] if " ERROR " in line) or err.strip()
            self.module.fail_json(msg=f"LXC could not start {self.name}: {why}. More is in {self.log}.")

    def place(self, files: dict[str, str]) -> None:
        for path, source in files.items():
            try:
                # In check mode there may be neither the image nor the container.
                if place(self.rootfs, path, Path(source), pretend=self.module.check_mode):
                    self.changes.append(f"put {Path(source).name} to {path}")
            except EscapeError as error:
                self.module.fail_json(msg=str(error))


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "lxc_path": {"type": "path", "required": True},
            "name": {"type": "str", "required": True},
            "image": {"type": "path", "required": True},
            "config": {"type": "list", "elements": "str", "required": True},
            "place": {"type": "dict", "default": {}},
            "state": {"type": "str", "choices": ["created", "started"], "default": "started"},
        },
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    module.run_command_environ_update = {"LC_ALL": "C"}
    if os.geteuid() != 0 and not module.check_mode:
        module.fail_json(msg="A lab's container is root's business: run this as root.")
    container = Container(module)
    lines = [f"lxc.rootfs.path = dir:{container.rootfs}", *module.params["config"]]
    container.create(Path(module.params["image"]), "\n".join(lines) + "\n")
    container.place(module.params["place"])
    if module.params["state"] == "started":
        container.start()
    origin = container.origin.read_text().strip() if container.origin.exists() else ""
    image = Path(module.params["image"]).name
    if module.params["state"] == "started" and origin not in ("", image):
        module.warn(
            f"{container.name} was made from {origin} and today's image is {image}. It is kept as it is; "
            "take the lab down and up again for the new one."
        )
    module.exit_json(
        changed=bool(container.changes),
        changes=container.changes,
        exists=container.rootfs.exists(),
        rootfs=str(container.rootfs),
        image=origin,
        diff=container.diff,
    )


if __name__ == "__main__":
    main()
