# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Which lab belongs to a checkout and a name, and how its machines are reached. scripts/lab derives the id too."""

from __future__ import annotations

import hashlib
from pathlib import Path


def lab_variables(checkout: Path, name: str) -> dict[str, str]:
    """What follows from checkout and name; the network is the first three parts of its addresses."""
    hashed = hashlib.md5(f"{checkout}:{name}".encode(), usedforsecurity=False).hexdigest()
    return {
        "lab_name": name,
        "lab_id": hashed[:6],
        # Seldom used addresses, different for every lab: 10.200.0 to 10.249.255.
        "lab_network": f"10.{200 + int(hashed[6:10], 16) % 50}.{int(hashed[10:12], 16)}",
        "lab_dir": f"/var/lib/servelab-lab/{hashed[:6]}",
    }


def connection_variables(lab: dict[str, str], number: int) -> dict[str, str]:
    """How a machine of the lab is reached, whose address ends with `number`."""
    ssh = f"{lab['lab_dir']}/ssh"
    return {
        "ansible_host": f"{lab['lab_network']}.{number}",
        "ansible_user": "root",
        "ansible_ssh_private_key_file": f"{ssh}/id_ed25519",
        "ansible_ssh_common_args": (
            f"-o UserKnownHostsFile={ssh}/known_hosts -o StrictHostKeyChecking=yes -o IdentitiesOnly=yes "
            f"-o ControlPath={ssh}/%C -o ServerAliveInterval=5 -o ServerAliveCountMax=3"
        ),
        "ansible_python_interpreter": "/usr/bin/python3",
    }
