"""Filters over the locks of stacks."""

from __future__ import annotations

from typing import Any

from ansible.errors import AnsibleFilterError
from ansible_collections.servelab.sglang.plugins.module_utils import stack_install, stack_lock


def lock_head(text: str) -> dict[str, Any]:
    """What a lock says of itself: name, python, cuda, extra_indexes, bytes and packages, torch (or None), versions."""
    try:
        lock = stack_lock.parse(text)
    except stack_lock.LockError as error:
        raise AnsibleFilterError(str(error)) from error
    torch = lock.pins.get("torch")
    return {
        "name": lock.one("name"),
        "python": lock.one("python"),
        "cuda": lock.one("cuda"),
        "extra_indexes": lock.head.get("extra-index", []),
        "bytes": int(lock.one("bytes") or 0),
        "packages": len(lock.pins),
        "torch": torch.version if torch else None,
        "versions": {name: pin.version for name, pin in lock.pins.items()},
    }


def lock_only(text: str, names: list[str]) -> str:
    """The lock with only these packages."""
    try:
        return stack_lock.subset(text, names)
    except stack_lock.LockError as error:
        raise AnsibleFilterError(str(error)) from error


class FilterModule:
    """The filters of this file."""

    def filters(self) -> dict[str, Any]:
        """Name → function."""
        return {
            "locks_known": stack_install.locks_known,
            "lock_head": lock_head,
            "lock_only": lock_only,
            "lock_refusals": stack_install.lock_refusals,
            "release_refusal": stack_install.release_refusal,
            "install_failure": stack_install.install_failure,
        }
