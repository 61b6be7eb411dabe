"""A guest made by hand, as old tutorials have it, is read, told about, and brought to its description."""

from __future__ import annotations

from pathlib import Path

import pytest

PLAYBOOK = Path(__file__).parents[1] / "adopt.yml"
CONFIG = ("Create the guest, or set what differs", "handmade")
SSH = ("Make the guest reachable over ssh", "handmade")
HOST_KEY = ("Make the guest's host key known to the controller", "handmade")
DEVICES = {f"/dev/{name},mode=0666" for name in ("nvidia0", "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools")}
# With a number that this driver does not have, and a card bound where the node's may be missing.
RAW = [
    "lxc.cgroup2.devices.allow: c 195:* rwm",
    "lxc.cgroup2.devices.allow: c 511:* rwm",
    "lxc.mount.entry: /dev/nvidia0 dev/nvidia0 none bind,optional,create=file",
]


@pytest.fixture(scope="module")
def handmade(node, lab):
    """Guest 198, running, with what only a person put there: a file, a mount point, a comment, raw lines, 512 MiB."""
    network = node.check_output("ip -br -4 addr show vmbr0").split()[-1].rsplit(".", 1)[0]
    node.check_output(
        "pct create 198 local:vztmpl/debian-13-standard_13.1-1_amd64.tar.zst --hostname by-hand --unprivileged 1"
        f" --rootfs local:4 --memory 512 --features nesting=1,keyctl=1 --mp7 /srv/cache,mp=/data"
        f" --net0 name=eth0,bridge=vmbr0,ip={network}.198/24,gw={network}.1 --description 'the old server'"
    )
    for line in RAW:
        node.check_output(f"echo '{line}' >> /etc/pve/lxc/198.conf")
    node.check_output("pct start 198 && pct exec 198 -- sh -c 'echo weights > /root/model'")
    yield
    node.check_output("pct destroy 198 --force 1 --purge 1")
    (Path(lab["dir"]) / "ssh/known_hosts_handmade").unlink(missing_ok=True)


def written(node) -> list[str]:
    return node.file("/etc/pve/lxc/198.conf").content_string.splitlines()


def options(lines: list[str]) -> dict[str, str]:
    """The lines that say one thing: those of the devices, and the raw ones, are looked at by themselves."""
    split = (line.split(": ", 1) for line in lines if ": " in line)
    return {key: value for key, value in split if not key.startswith(("dev", "lxc."))}


def devices(lines: list[str]) -> set[str]:
    return {line.split(": ", 1)[1] for line in lines if line.startswith("dev")}


def born(node) -> str:
    """Changes with a guest made anew."""
    return node.check_output("stat -c '%i %W' /var/lib/lxc/198/rootfs/root/model")


@pytest.mark.usefixtures("handmade")
def test_it_is_read_told_about_brought_to_its_description_and_not_made_anew(play, node):
    before, made = written(node), born(node)

    checked = play("--check", "--diff", playbook=PLAYBOOK)
    assert checked.ok
    assert checked.changed[0] == CONFIG
    old, new = (set(text.splitlines()) for text in checked.diff)
    assert {"memory: 512", "features: nesting=1,keyctl=1"} <= old
    assert {"memory: 1024", "features: nesting=1"} <= new
    assert {line.split(": ", 1)[-1] for line in new} >= DEVICES
    assert not {line for line in old | new if line.startswith(("mp7", "net0", "hostname", "rootfs", "#"))}
    told = str([result.get("msg") for result in checked.results["Tell what differs and is left as it is"]])
    assert "rootfs" in told
    assert "The guest passes NVIDIA devices by lxc.* lines, which a changed major number breaks" in told
    assert written(node) == before

    # The features are read at a start only, and nobody said that it may be restarted.
    refused = play(playbook=PLAYBOOK, pve_container_restart_ok=False)
    assert not refused.ok
    assert (
        "Guest 198 (handmade) must be restarted before it is as described: features is nesting=1,keyctl=1"
        in refused.said
    )
    assert "pct reboot 198" in refused.said

    adopted = play(playbook=PLAYBOOK, pve_container_restart_ok=True)
    assert adopted.ok
    after = written(node)
    assert devices(after) == DEVICES
    assert options(after) == {**options(before), "memory": "1024", "features": "nesting=1"}
    assert [line for line in after if line.startswith("lxc.")] == RAW
    assert [line for line in after if line.startswith("#")] == ["#the old server"]
    assert born(node) == made
    assert node.check_output("pct exec 198 -- cat /root/model") == "weights"
    assert node.check_output("pct exec 198 -- head -c0 /dev/nvidia-uvm") == ""

    assert play(playbook=PLAYBOOK).changed == []
