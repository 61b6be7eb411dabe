"""Hand-made containers that pass GPUs by low-level lxc.* lines: what is wrong with those now.

Such lines name a device's major number, which the driver gets anew at every boot, and bind the node with
`create=file`, which makes a regular file where the node has none. dev[n] entries have neither fault.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from .pve_conf import RawLine

__all__ = ["raw_device_lines", "raw_device_notices"]

# "a" allows every device, with or without numbers behind it.
_ALLOW = re.compile(r"^(?:c (\d+|\*):|a(?: |$))")


def raw_device_lines(paths: Sequence[str], majors: Mapping[str, int]) -> list[RawLine]:
    """The lxc.* lines that pass these devices on a node that knows no dev[n] (before Proxmox VE 8.1).

    majors: path → major number now; a device that is not there is left out. Another boot may change the numbers of
    nvidia-uvm: then the lines of the new ones are added at the next run.
    """
    there = [path for path in paths if path in majors]
    allowed = sorted({majors[path] for path in there})
    lines = [("lxc.cgroup2.devices.allow", f"c {major}:* rwm") for major in allowed]
    # create=file makes the place of the bind; with `optional`, a start without the device would leave a regular file,
    # so without it that start fails, and says why.
    return lines + [("lxc.mount.entry", f"{path} {path.lstrip('/')} none bind,create=file") for path in there]


def raw_device_notices(raw: Sequence[RawLine], majors: Mapping[str, int], given: Sequence[str] = ()) -> list[str]:
    """Sentences about the lxc.* lines of a guest that pass NVIDIA devices. Empty if there are none.

    majors: path → major number, of the NVIDIA character devices that the node has now;
    given: paths that the guest gets by dev[n] entries anyway.
    """
    bound = [
        value.split()[0]
        for key, value in raw
        if key == "lxc.mount.entry" and value.startswith(("/dev/nvidia", "dev/nvidia"))
    ]
    if not bound:
        return []
    allowed = {
        match[1] or "*" for key, value in raw if key.endswith("devices.allow") and (match := _ALLOW.match(value))
    }
    notices = []
    if "*" not in allowed:
        numbers = ", ".join(sorted(allowed)) or "nothing"
        notices += [
            f"the cgroup allows {numbers}, but {path} has the major number {majors[path]} now"
            for path in bound
            if path in majors and str(majors[path]) not in allowed
        ]
    notices += [f"{path} is bound, but the node has no such device now" for path in bound if path not in majors]
    notices += [f"{path} is not passed" for path in majors if path not in bound and path not in given]
    if not notices and not given:
        return []
    advice = (
        "The guest passes NVIDIA devices by lxc.* lines, which a changed major number breaks"
        + (f": {'; '.join(notices)}" if notices else "")
        + ". Take those lines out of its configuration file, as dev[n] entries (pve_container_guest.gpus) replace "
        "them, and have nvidia-uvm loaded before the guests start."
    )
    return [advice]
