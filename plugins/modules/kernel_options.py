#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Have options on a node's kernel command line, and take them back."""

from __future__ import annotations

DOCUMENTATION = r"""
module: kernel_options
short_description: Have options on a node's kernel command line
version_added: 0.1.0
description:
  - For GRUB a file of its own under C(/etc/default/grub.d) is kept, for systemd-boot (C(proxmox-boot-tool)) the line of
    C(/etc/kernel/cmdline) is edited; a node that has both gets both. Then the boot loader's own tool is called.
  - Options that an earlier call added and that are not wanted any more are taken back; those of others stay.
  - Never reboots; RV(waiting) tells what the running kernel lacks.
author: The Servelab developers
options:
  options:
    description: The words that shall be there, such as V(iommu=pt). An empty list takes back all that were added.
    type: list
    elements: str
    default: []
attributes:
  check_mode:
    description: Tells what would change, without changing it.
    support: full
  diff_mode:
    description: Shows the files before and after.
    support: full
"""

EXAMPLES = r"""
- name: Let the cards reach each other without translation
  servelab.sglang.kernel_options:
    options: [iommu=pt, pcie_aspm=off]
  register: kernel
"""

RETURN = r"""
waiting:
  description: Options that the running kernel was not started with.
  returned: always
  type: list
  elements: str
loaders:
  description: The boot loaders that were found, V(grub) and V(proxmox-boot-tool).
  returned: always
  type: list
  elements: str
command:
  description: The tool that was called (in check mode, would be), or an empty list.
  returned: always
  type: list
  elements: str
"""

import contextlib
import json
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.kernel_options import (
    conflicts,
    edit_line,
    grub_file,
    missing,
    option_errors,
)

GRUB = Path("/etc/default/grub")
OURS = Path("/etc/default/grub.d/zz-servelab.cfg")
CMDLINE = Path("/etc/kernel/cmdline")
# Which words of that line are ours; beside nothing that a kernel's hook would read.
OWNED = Path("/etc/servelab/kernel-options.json")
BOOT_UUIDS = Path("/etc/kernel/proxmox-boot-uuids")


def read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8")
    except OSError:
        return None


def owned() -> list[str]:
    with contextlib.suppress(ValueError, TypeError):
        return [str(word) for word in json.loads(read(OWNED) or "[]")]
    return []


def write(path: Path, text: str | None) -> None:
    if text is None:
        path.unlink(missing_ok=True)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.servelab")
    beside.write_text(text, encoding="utf-8")
    beside.chmod(0o644)
    beside.replace(path)


def refresh_command(module: AnsibleModule, grub: bool) -> list[str]:
    """proxmox-boot-tool calls GRUB's own tool where it keeps the boot partitions."""
    paths = ["/sbin", "/usr/sbin", "/usr/local/sbin"]
    if BOOT_UUIDS.exists():
        return [module.get_bin_path("proxmox-boot-tool", required=True, opt_dirs=paths), "refresh"]
    tool = module.get_bin_path("update-grub", required=grub, opt_dirs=paths)
    return [tool] if tool else []


def main() -> None:
    module = AnsibleModule(
        argument_spec={"options": {"type": "list", "elements": "str", "default": []}}, supports_check_mode=True
    )
    options = list(dict.fromkeys(module.params["options"]))
    running = read(Path("/proc/cmdline")) or ""
    grub, line = GRUB.exists(), read(CMDLINE)
    errors = option_errors(options)
    if options and not grub and line is None:
        errors.append(
            "This node has neither /etc/default/grub nor /etc/kernel/cmdline, so nobody knows how it boots; add "
            f"{' '.join(options)} to its kernel command line by hand."
        )
    before: dict[Path, str | None] = {}
    after: dict[Path, str | None] = {}
    if grub or OURS.exists():
        errors += conflicts(options, " ".join(grub_options(read(GRUB) or "")))
        before[OURS], after[OURS] = read(OURS), grub_file(options)
    if line is not None:
        ours = owned()
        errors += conflicts(options, line, ours)
        before[CMDLINE], before[OWNED] = line, read(OWNED)
        after[CMDLINE], now_ours = edit_line(line, options, ours)
        after[OWNED] = json.dumps(now_ours) + "\n" if now_ours else None
    if errors:
        module.fail_json(msg=" ".join(dict.fromkeys(errors)), errors=errors)
    differ = [path for path in before if before[path] != after[path]]
    command = refresh_command(module, grub) if differ else []
    if differ and not module.check_mode:
        for path in differ:
            write(path, after[path])
        if command:
            rc, out, err = module.run_command(command)
            if rc != 0:
                # What the boot loader refused must not lie there until the next kernel's installation finds it.
                for path in differ:
                    write(path, before[path])
                said = " ".join((err or out).split())[-300:]
                module.fail_json(msg=f"{' '.join(command)} failed, so the command line was left as it was: {said}")
    module.exit_json(
        changed=bool(differ),
        waiting=missing(options, running),
        loaders=[name for name, here in (("grub", grub), ("proxmox-boot-tool", BOOT_UUIDS.exists())) if here],
        command=command,
        diff=[
            {
                "before_header": str(path),
                "after_header": str(path),
                "before": before[path] or "",
                "after": after[path] or "",
            }
            for path in differ
        ],
    )


def grub_options(text: str) -> list[str]:
    """What GRUB's file gives to every kernel, without its quotes."""
    given = []
    for row in text.splitlines():
        name, equals, value = row.strip().partition("=")
        if equals and name in ("GRUB_CMDLINE_LINUX_DEFAULT", "GRUB_CMDLINE_LINUX"):
            given.append(value.strip().strip("\"'"))
    return given


if __name__ == "__main__":
    main()
