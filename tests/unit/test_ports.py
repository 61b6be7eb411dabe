"""Who has the port that a server was to have."""

from __future__ import annotations

import os
import pwd
import socket

import pytest

from servelab.shared import ports


def test_a_port_of_somebody_elses_process_is_told_by_its_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an ordinary user sees a port of root's: the table names the owner, and no process can be looked at."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        monkeypatch.setattr(ports, "holds", lambda pid, inodes: False)
        assert ports.port_owner(port, {1}) == (
            f"a process of user {pwd.getpwuid(os.getuid()).pw_name}, "
            "which cannot be looked at from here: another user's or a container's"
        )
        monkeypatch.undo()
        assert ports.port_owner(port, {os.getpid()}) == "ours"
        found = ports.port_owner(port, {1})
        assert found is not None and found.startswith(f"pid {os.getpid()}: ")
    assert ports.port_owner(port, {1}) is None
