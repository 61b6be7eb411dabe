"""The lab that an inventory means: from checkout and name to addresses, and to scripts/lab, which has no Ansible."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from servelab.shared.lab_identity import connection_variables, lab_variables

ROOT = Path(__file__).resolve().parents[2]


def test_checkout_and_name_make_the_lab() -> None:
    # printf '/home/me/servelab:demo' | md5sum: 9cc302 54e4 54…; 0x54e4 % 50 + 200 = 232, 0x54 = 84
    assert lab_variables(Path("/home/me/servelab"), "demo") == {
        "lab_name": "demo",
        "lab_id": "9cc302",
        "lab_network": "10.232.84",
        "lab_dir": "/var/lib/servelab-lab/9cc302",
    }


def test_names_and_checkouts_are_labs_of_their_own() -> None:
    labs = [lab_variables(Path(where), name)["lab_id"] for where in ("/a", "/b") for name in ("demo", "test", "test-2")]
    assert len(set(labs)) == 6


def test_a_machine_is_reached_with_the_labs_key_and_known_hosts_alone() -> None:
    reached = connection_variables({"lab_network": "10.201.7", "lab_dir": "/l"}, 129)
    assert reached["ansible_host"] == "10.201.7.129"
    assert reached["ansible_ssh_private_key_file"] == "/l/ssh/id_ed25519"
    for option in ("UserKnownHostsFile=/l/ssh/known_hosts", "StrictHostKeyChecking=yes", "IdentitiesOnly=yes"):
        assert f"-o {option}" in reached["ansible_ssh_common_args"]


def inventory(name: str, lab: str | None) -> dict[str, dict[str, object]]:
    environment = {key: value for key, value in os.environ.items() if key != "SERVELAB_LAB"}
    environment |= {"SERVELAB_LAB": lab} if lab else {}
    command = ["ansible-inventory", "-i", f"inventory/{name}", "--list"]
    answer = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    hosts: dict[str, dict[str, object]] = json.loads(answer.stdout)["_meta"]["hostvars"]
    return hosts


@pytest.mark.parametrize("name", ["lab", "lab-nodes", "lab-router", "lab-large"])
def test_every_inventory_of_the_lab_means_the_same_one(name: str) -> None:
    hosts = inventory(name, "one")
    assert {host["lab_id"] for host in hosts.values()} == {lab_variables(ROOT, "one")["lab_id"]}
    network = lab_variables(ROOT, "one")["lab_network"]
    assert hosts["lab-pve1"]["ansible_host"] == f"{network}.11"
    assert hosts["lab-gpu1"]["ansible_host"] == f"{network}.129"
    assert "ansible_host" not in hosts["localhost"]


@pytest.mark.parametrize("lab", [None, "one"])
def test_the_script_means_the_same_lab(lab: str | None) -> None:
    # As in scripts/lab, which must not wait for Ansible.
    words = next(line for line in (ROOT / "scripts/lab").read_text().splitlines() if line.startswith("id="))
    environment = {"PATH": os.environ["PATH"]} | ({"SERVELAB_LAB": lab} if lab else {})
    script = f'checkout={ROOT}; {words}; echo "$id"'
    said = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=True)
    assert said.stdout.strip() == inventory("lab", lab)["localhost"]["lab_id"]
