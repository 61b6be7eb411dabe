"""What a lab's removal may kill and unmount."""

from __future__ import annotations

from pathlib import PurePath

import pytest

from servelab.shared.lab_container import belongs_to, mounts_under

NAME = "servelab-e522e5-pve1"


@pytest.mark.parametrize(
    ("cgroup", "belongs"),
    [
        ("4:memory:/\n0::/lxc.payload.servelab-e522e5-pve1/system.slice/ssh.service\n", True),
        ("0::/lxc.monitor.servelab-e522e5-pve1\n", True),
        ("0::/lxc.payload.servelab-e522e5-pve1/lxc.payload.129/init.scope\n", True),
        ("0::/lxc.payload.servelab-e522e5-pve1-1\n", True),
        ("0::/user.slice/lxc.payload.servelab-e522e5-pve1\n", True),
        ("0::/lxc.payload.servelab-e522e5-pve10\n", False),
        ("0::/lxc.payload.servelab-e522e50-pve1\n", False),
        ("0::/lxc.payload.129/servelab-e522e5-pve1\n", False),
        ("0::/\n", False),
        ("", False),
    ],
)
def test_a_process_belongs_by_its_cgroup(cgroup: str, belongs: bool) -> None:
    assert belongs_to(cgroup, NAME) is belongs


def test_mounts_inside_come_innermost_first_and_neighbours_are_left_alone() -> None:
    mountinfo = """\
23 1 254:0 / / rw,relatime - ext4 /dev/vda rw
40 23 254:0 /srv /var/lib/servelab-lab/e522e5/pve1/rootfs/srv rw - ext4 /dev/vda rw
41 40 0:30 / /var/lib/servelab-lab/e522e5/pve1/rootfs/srv/with\\040space rw - tmpfs tmpfs rw
42 23 0:31 / /var/lib/servelab-lab/e522e5/pve10 rw - tmpfs tmpfs rw
43 23 0:32 / /var/lib/servelab-lab/e522e5 rw - tmpfs tmpfs rw
"""
    assert mounts_under(mountinfo, PurePath("/var/lib/servelab-lab/e522e5/pve1")) == [
        "/var/lib/servelab-lab/e522e5/pve1/rootfs/srv/with space",
        "/var/lib/servelab-lab/e522e5/pve1/rootfs/srv",
    ]
