"""Options on a Proxmox node's kernel command line, for both of its boot loaders, so that they can be taken back.

GRUB reads /etc/default/grub.d/*.cfg after /etc/default/grub: a file of our own adds to what is there, and goes without
a trace. systemd-boot (proxmox-boot-tool) has the one line of /etc/kernel/cmdline: there the words are edited, and which
of them are ours is kept beside.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

__all__ = ["conflicts", "edit_line", "grub_file", "missing", "option_errors"]

_WORD = re.compile(r"^[A-Za-z0-9_.-]+(=[A-Za-z0-9_.,:;@/+-]*)?$")
# Options of which the kernel takes many, each with another value.
_MANY = {"console", "pci", "module_blacklist", "vfio-pci.ids", "mitigations"}
_HEADER = "# Written by Servelab (role pve_gpu_host, pve_gpu_host_kernel_options). It goes when the list is empty.\n"


def option_errors(options: Sequence[str]) -> list[str]:
    """Sentences about words that are no options of the kernel, or that contradict each other."""
    errors = [
        f"{word!r} is no option of the kernel; write one word each, such as iommu=pt."
        for word in options
        if not _WORD.match(word)
    ]
    values: dict[str, str] = {}
    for word in options:
        name = word.partition("=")[0]
        if name in values and values[name] != word and name not in _MANY:
            errors.append(f"{values[name]} and {word} contradict each other; keep one.")
        values[name] = word
    return errors


def missing(options: Sequence[str], cmdline: str) -> list[str]:
    """The options that are not in force: not a word of the running kernel's command line."""
    running = cmdline.split()
    return [word for word in options if word not in running]


def conflicts(options: Sequence[str], line: str, ours: Sequence[str] = ()) -> list[str]:
    """Sentences about words of a command line that say the opposite of an option; the kernel would take one of them."""
    said = []
    for word in options:
        name = word.partition("=")[0]
        if name in _MANY:
            continue
        said += [
            f"{other} is on the command line already, and {word} is wanted; remove the first there by hand."
            for other in line.split()
            if other.partition("=")[0] == name and other != word and other not in ours
        ]
    return said


def grub_file(options: Sequence[str]) -> str | None:
    """The text of our own file under /etc/default/grub.d, None where there should be none."""
    if not options:
        return None
    words = shlex.quote(" ".join(options)).strip("'")
    return f'{_HEADER}GRUB_CMDLINE_LINUX_DEFAULT="$GRUB_CMDLINE_LINUX_DEFAULT {words}"\n'


def edit_line(text: str, options: Sequence[str], ours: Sequence[str]) -> tuple[str, list[str]]:
    """Edit the text of /etc/kernel/cmdline. ours: words that an earlier run added.

    Returns the new text and which words are ours now: those that somebody else had put there stay theirs.
    """
    words = text.split()
    kept = [word for word in words if word not in ours or word in options]
    added = [word for word in options if word not in kept]
    owned = [word for word in options if word in added or word in ours]
    if kept == words and not added:
        return text, owned
    return " ".join([*kept, *added]) + "\n", owned
