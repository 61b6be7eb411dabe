"""A node that accepts connections and says nothing, beside the lab's: its guest is given up, the lab's goes on."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

PROVISION = Path(__file__).resolve().parents[3] / "playbooks/provision.yml"


@pytest.fixture
def dead(tmp_path):
    """An inventory with such a node and a guest on it."""
    with socket.create_server(("127.0.0.1", 0)) as mute:
        way = {"ansible_host": "127.0.0.1", "ansible_port": mute.getsockname()[1]}
        described = {
            "pve_node": "dead-node",
            "lab_number": 177,
            "pve_container_ssh_public_keys": ["ssh-ed25519 AAAA x"],
        }
        inventory = tmp_path / "dead.yml"
        inventory.write_text(
            yaml.safe_dump(
                {
                    "pve_nodes": {"hosts": {"dead-node": way}},
                    "gpu_guests": {"hosts": {"dead-guest": {**way, **described}}},
                }
            )
        )
        yield inventory


def test_a_dead_node_holds_up_nobody_elses_guest(play, dead):
    done = play("-i", str(dead), playbook=PROVISION)
    assert not done.ok and "timed out during banner exchange" in done.said
    assert done.changed == []
    seen = {name: len(results) for name, results in done.results.items()}
    # The lab's guest was looked at to the end, where the dead one never came.
    assert seen["Create the guest, or set what differs"] == 2
    assert seen["Make the guest reachable over ssh"] == seen["Wait until the guest answers over ssh"] == 1
