"""From the inventory's description to Proxmox's options."""

from __future__ import annotations

from pathlib import Path

import yaml

from servelab.shared.pct_config import Wanted, create_argv
from servelab.shared.pct_guest import GUEST_KEYS, NET_KEYS, guest_options, raw_lines

ROOT = Path(__file__).parents[2]


def test_the_description_becomes_options_in_proxmox_names() -> None:
    guest = {
        "vmid": 129,
        "hostname": "gpu1",
        "memory": 65536,
        "cores": None,
        "net": [
            {"name": "eth0", "bridge": "vmbr0", "ip": "dhcp", "hwaddr": None},
            {"name": "eth1", "bridge": "vmbr1", "firewall": True},
        ],
        "gpus": "all",
        "mounts": [],
        "nameserver": ["192.168.1.1", "192.168.1.2"],
    }
    options = guest_options(guest)
    assert create_argv(129, "t", Wanted(options=options)) == [
        "create", "129", "t", "--hostname", "gpu1", "--memory", "65536", "--nameserver", "192.168.1.1 192.168.1.2",
        "--unprivileged", "1", "--net0", "name=eth0,bridge=vmbr0,ip=dhcp", "--net1",
        "name=eth1,bridge=vmbr1,firewall=1",
    ]  # fmt: skip


def test_a_lock_limit_is_managed_only_where_asked() -> None:
    assert raw_lines({"vmid": 1}) == []
    assert raw_lines({"memlock": "unlimited"}) == [{"key": "lxc.prlimit.memlock", "value": "unlimited"}]


def test_shared_memory_and_huge_pages_are_mounts_that_lxc_makes() -> None:
    lines = raw_lines({"shm_size": "64G", "hugepages": "/dev/hugepages"})
    assert [line["key"] for line in lines] == ["lxc.mount.entry"] * 2
    assert lines[0]["value"].split()[:3] == ["tmpfs", "dev/shm", "tmpfs"] and "size=64G" in lines[0]["value"]
    assert lines[1]["value"] == "/dev/hugepages dev/hugepages none bind,create=dir 0 0"


def test_the_rules_know_the_same_keys_as_the_role() -> None:
    specs = yaml.safe_load((ROOT / "roles/pve_container/meta/argument_specs.yml").read_text())
    guest = specs["argument_specs"]["main"]["options"]["pve_container_guest"]["options"]
    assert set(guest) == set(GUEST_KEYS)
    assert set(guest["net"]["options"]) == set(NET_KEYS)
