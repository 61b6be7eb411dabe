"""The lab's way out on hosts that are in its way: one that forwards nothing by default, and one without IPv6.

Played in network namespaces of their own: `host` has the lab's bridge, `node` hangs on it, `world` is what the host
reaches. Nothing of this machine's network is touched.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
NAMED = Path("/run/netns")
BRIDGE, ADDRESS = "slabfffffe", "10.251.7.1/24"
SERVE = """
import socket
server = socket.create_server(("192.0.2.2", 8000))
while True:
    connection, (address, _) = server.accept()
    connection.sendall(address.encode())
    connection.close()
"""
ASK = 'import socket; print(socket.create_connection(("192.0.2.2", 8000), timeout=2).recv(99).decode())'


class Hosts:
    """Three network namespaces."""

    def __init__(self) -> None:
        self.name = {each: f"servelab-test-{os.getpid()}-{each}" for each in ("host", "node", "world")}

    def run(self, where: str, *words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = ["ip", "netns", "exec", self.name[where], *words]
        return subprocess.run(command, capture_output=True, text=True, check=check, timeout=60)

    def lab_network(self, state: str) -> str:
        """Run the module as the role does, with a /run of its own: it keeps a note there."""
        arguments = f"name={BRIDGE} address={ADDRESS} comment=servelab-fffffe state={state}"
        ansible = f"ansible localhost -c local -m servelab.sglang.lab_network -a '{arguments}'"
        script = f"mkdir -p /run/servelab-lab && mount -t tmpfs none /run/servelab-lab && cd {ROOT} && exec {ansible}"
        return self.run("host", "sh", "-ec", script).stdout

    def asked(self) -> str:
        """What the world answers the node: whom it saw. Empty when it cannot be reached."""
        return self.run("node", "python3", "-c", ASK, check=False).stdout.strip()


def is_mount(path: Path) -> bool:
    """Also where a directory is mounted on itself, which Path.is_mount() does not see."""
    return subprocess.run(["mountpoint", "--quiet", path], check=False).returncode == 0


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    made = Hosts()
    mounted = is_mount(NAMED)
    try:
        for name in made.name.values():
            subprocess.run(["ip", "netns", "add", name], check=True)
        node, world = made.name["node"], made.name["world"]
        for inside, other in (("uplink", world), ("port", node)):
            made.run("host", "ip", "link", "add", inside, "type", "veth", "peer", "name", "eth0", "netns", other)
        made.run("world", "sh", "-ec", "ip addr add 192.0.2.2/24 dev eth0; ip link set eth0 up; ip link set lo up")
        made.run("host", "sh", "-ec", "ip addr add 192.0.2.1/24 dev uplink; ip link set uplink up; ip link set lo up")
        made.run("host", "sh", "-ec", "echo 0 > /proc/sys/net/ipv4/ip_forward; iptables -P FORWARD DROP")
        server = subprocess.Popen(["ip", "netns", "exec", world, "python3", "-c", SERVE])
        yield made
        server.kill()
        server.wait()
    finally:
        for name in made.name.values():
            subprocess.run(["ip", "netns", "del", name], check=False)
        # The first name of all makes a mount there, which the last one leaves.
        if not mounted and is_mount(NAMED) and not any(NAMED.iterdir()):
            subprocess.run(["umount", NAMED], check=True)
            NAMED.rmdir()


def plug_in(hosts: Hosts) -> None:
    hosts.run("host", "ip", "link", "set", "port", "up", "master", BRIDGE)
    hosts.run(
        "node",
        "sh",
        "-ec",
        "ip addr add 10.251.7.11/24 dev eth0; ip link set eth0 up; ip route add default via 10.251.7.1",
    )


@pytest.mark.parametrize("ipv6", ["with IPv6", "without IPv6"])
def test_the_lab_gets_out_where_nothing_is_forwarded_and_leaves_no_rule(hosts, ipv6):
    if ipv6 == "without IPv6":
        for where in hosts.name:
            hosts.run(where, "sh", "-ec", "echo 1 > /proc/sys/net/ipv6/conf/all/disable_ipv6")
    before = hosts.run("host", "iptables-save").stdout
    assert hosts.asked() == ""
    assert "CHANGED" in hosts.lab_network("present")
    assert "SUCCESS" in hosts.lab_network("present")
    plug_in(hosts)
    deadline = time.monotonic() + 5
    while not (seen := hosts.asked()) and time.monotonic() < deadline:
        time.sleep(0.2)
    # Masqueraded: the world knows the host only.
    assert seen == "192.0.2.1"
    # What is not the lab's is still not forwarded.
    assert "-P FORWARD DROP" in hosts.run("host", "iptables", "-S", "FORWARD").stdout
    assert "CHANGED" in hosts.lab_network("absent")
    assert BRIDGE not in hosts.run("host", "ip", "link").stdout
    rules = [line for line in hosts.run("host", "iptables-save").stdout.splitlines() if line.startswith("-A")]
    assert rules == [line for line in before.splitlines() if line.startswith("-A")]
