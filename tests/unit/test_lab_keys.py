"""A pair of keys is whole or made anew, and known_hosts keeps what others wrote."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from servelab.shared.lab_keys import is_whole, known


@pytest.fixture
def pair(tmp_path: Path) -> Path:
    path = tmp_path / "id_ed25519"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(path)], check=True)
    return path


def test_a_pair_as_ssh_keygen_leaves_it_is_whole(pair: Path) -> None:
    assert is_whole(pair)


@pytest.mark.parametrize("half", ["id_ed25519", "id_ed25519.pub"])
@pytest.mark.parametrize("harm", [lambda path: path.unlink(), lambda path: path.write_text(path.read_text()[:20])])
def test_a_pair_that_an_interruption_halved_is_not(pair: Path, half: str, harm) -> None:
    harm(pair.with_name(half))
    assert not is_whole(pair)


def test_a_host_is_noted_once_and_its_old_key_goes() -> None:
    text = "10.1.1.129 ssh-ed25519 GUEST\n10.1.1.11 ssh-ed25519 OLD\n10.1.1.11 ssh-rsa RSA"
    new = known(text, "10.1.1.11", "ssh-ed25519 NEW pve1")
    assert new == ("10.1.1.129 ssh-ed25519 GUEST\n10.1.1.11 ssh-rsa RSA\n10.1.1.11 ssh-ed25519 NEW\n")
    assert known(new, "10.1.1.11", "ssh-ed25519 NEW pve1") == new


def test_the_first_host() -> None:
    assert known("", "10.1.1.11", "ssh-ed25519 KEY pve1\n") == "10.1.1.11 ssh-ed25519 KEY\n"
