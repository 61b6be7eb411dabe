from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
from two_guests import FIRST, INVENTORY, SECOND, play, write_inventory


@pytest.fixture(scope="session")
def guests() -> Iterator[None]:
    """FIRST and SECOND, for all tests that use them; nothing serves at first, and each file stops what it starts."""
    write_inventory()
    try:
        play("playbooks/lab.yml")
        play("playbooks/guest.yml", "--tags", "sglang_env", "--limit", "first")
        yield
    finally:
        play("playbooks/lab_down.yml")
        shutil.rmtree(INVENTORY)
    assert not FIRST.prefix.exists() and not SECOND.prefix.exists()
