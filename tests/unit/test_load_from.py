"""Which machine makes the load, and whether it reaches the server."""

import pytest

from servelab.shared.load_from import errors, url

FAR = {"ansible_host": "10.0.0.9"}
OPEN = {"ansible_host": "10.0.0.5", "sglang_server_host": "10.0.0.5", "sglang_server_port": 30001}


@pytest.mark.parametrize(
    ("guest", "maker", "expected"),
    [
        ({}, "guest", "http://127.0.0.1:30000"),
        (OPEN, "guest", "http://10.0.0.5:30001"),
        (OPEN, "far", "http://10.0.0.5:30001"),
        (OPEN | {"sglang_server_host": "0.0.0.0"}, "guest", "http://127.0.0.1:30001"),
        (OPEN | {"sglang_server_host": "0.0.0.0"}, "far", "http://10.0.0.5:30001"),
        (OPEN | {"sglang_server_host": "fd00::5"}, "far", "http://[fd00::5]:30001"),
        ({"sglang_server_host": "0.0.0.0"}, "far", "http://guest:30000"),  # found by its name
    ],
)
def test_where_the_server_is(guest: dict[str, str], maker: str, expected: str) -> None:
    assert url("guest", {"guest": guest, "far": FAR}, maker) == expected


@pytest.mark.parametrize("host", [None, "127.0.0.1", "::1", "localhost", "127.0.1.1"])
def test_a_server_on_loopback_is_only_reached_from_its_own_machine(host: str | None) -> None:
    guest = {"ansible_host": "10.0.0.5"} | ({} if host is None else {"sglang_server_host": host})
    assert errors("guest", {"guest": guest}, "guest") == []
    assert errors("guest", {"guest": guest, "same": {"ansible_host": "10.0.0.5"}}, "same") == []
    assert errors("guest", {"guest": guest, "far": FAR}, "far") == [
        f"guest serves on {host or '127.0.0.1'} only, which bench_load_host far cannot reach: set "
        "sglang_server_host of guest to an address of its own (that needs sglang_server_api_key and "
        "sglang_server_admin_api_key), or leave bench_load_host empty to make the load on the guest."
    ]


def test_a_server_that_others_reach_may_be_loaded_by_them() -> None:
    for host in ("0.0.0.0", "::", "10.0.0.5", "serving.example"):
        assert errors("guest", {"guest": OPEN | {"sglang_server_host": host}, "far": FAR}, "far") == []


def test_a_machine_that_nobody_knows_is_named() -> None:
    assert errors("guest", {"guest": OPEN}, "fra") == [
        "bench_load_host is fra, which is no host of the inventory; add it, or leave bench_load_host empty "
        "to make the load on the guest."
    ]
