"""Modes over several guests: what each guest is told, and a sentence for everything that cannot work."""

from __future__ import annotations

from typing import Any

import pytest

from servelab.shared import modes, modes_needs, modes_nodes

CATALOGUE: dict[str, Any] = {
    "base": {
        "description": "b",
        "args": {"model_path": "/m", "tp_size": "${tp_size}"},
        "env": {"NCCL_ALGO": "Ring"},
        "treatment": ["NCCL_*"],
    },
    "two": {"description": "t", "extends": "base", "nodes": 2, "args": {"tp_size": 16}},
    "three": {"description": "t", "extends": "two", "nodes": 3},
    "one_again": {"description": "o", "extends": "two", "nodes": None, "args": {"tp_size": 8}},
}
HOSTS: dict[str, dict[str, Any]] = {
    "gpu1": {"ansible_host": "10.0.0.1"},
    "gpu2": {"ansible_host": "192.168.7.2", "sglang_server_dist_address": "10.0.0.2"},
    "gpu3": {"ansible_host": "fd00::3"},
}
OWN = {"port": 30000, "dist_port": 20000, "isolated": True, "prove": [], "boot_mode": ""}


def told(here: str, names: tuple[str, ...] = ("gpu1", "gpu2", "gpu3"), interface: str = "eth0") -> dict[str, Any]:
    return modes_nodes.settings(names, HOSTS, here, 20000, interface)


def render(name: str, here: str, **machine: Any) -> dict[str, Any]:
    return modes.render(CATALOGUE, name, {"tp_size": 8, **told(here)}, machine, {})


def test_every_rank_gets_its_own_number_and_the_head_s_address() -> None:
    head, second = render("two", "gpu1"), render("two", "gpu2")
    assert head["nodes"] == 2
    assert head["args"] == {
        "model_path": "/m",
        "tp_size": 16,
        "nnodes": 2,
        "node_rank": 0,
        "dist_init_addr": "10.0.0.1:20000",
    }
    assert second["args"] == head["args"] | {"node_rank": 1}
    assert second["env"] == {"NCCL_SOCKET_IFNAME": "eth0", "GLOO_SOCKET_IFNAME": "eth0", "NCCL_ALGO": "Ring"}


def test_the_head_s_address_may_be_ipv6() -> None:
    assert told("gpu1", ("gpu3", "gpu1"))["dist_init_addr"] == "[fd00::3]:20000"
    assert told("gpu1", ("gpu3", "gpu1"))["node_rank"] == 1


def test_a_mode_s_own_interface_stays_and_an_unknown_one_is_left_out() -> None:
    catalogue = CATALOGUE | {"mine": {"description": "m", "extends": "two", "env": {"GLOO_SOCKET_IFNAME": "ib0"}}}
    env = modes.render(catalogue, "mine", {"tp_size": 8, **told("gpu1")})["env"]
    assert (env["GLOO_SOCKET_IFNAME"], env["NCCL_SOCKET_IFNAME"]) == ("ib0", "eth0")
    silent = modes.render(catalogue, "two", {"tp_size": 8, **told("gpu1", interface="")})["env"]
    assert silent == {"NCCL_ALGO": "Ring"}


def test_a_mode_over_one_guest_is_told_nothing() -> None:
    for name in ("base", "one_again"):
        mode = render(name, "gpu1")
        assert mode["args"] == {"model_path": "/m", "tp_size": 8}
        assert mode["env"] == {"NCCL_ALGO": "Ring"} and "nodes" not in mode
        assert mode["treatment"] == ["NCCL_*"]


def test_what_several_guests_bring_is_declared_as_the_treatment() -> None:
    assert set(render("two", "gpu1")["treatment"]) >= {"NCCL_*", "nnodes", "dist_init_addr", "tp_size"}
    assert "GLOO_SOCKET_IFNAME" in render("two", "gpu1")["treatment"]


def test_who_takes_part() -> None:
    assert modes_nodes.takes_part(2, told("gpu2")) and not modes_nodes.takes_part(2, told("gpu3"))
    assert modes_nodes.takes_part(1, told("gpu3")) and modes_nodes.takes_part(3, told("gpu3"))
    assert not modes_nodes.takes_part(2, told("gpu9"))
    with pytest.raises(modes.ModeError, match="Mode 'two' serves over the first 2 guests of sglang_server_nodes"):
        render("two", "gpu3")


def test_the_table_says_how_many_guests_a_mode_needs() -> None:
    assert "3 guests" in modes_needs.words(modes.merge(CATALOGUE, "three"))


@pytest.mark.parametrize(
    ("mode", "sentence"),
    [
        ({"nodes": 0}, "nodes is 0, but is a number of guests; write 2 or more, or leave it out."),
        ({"nodes": True}, "nodes is True, but must be a whole number."),
        ({"nodes": "2"}, "nodes is '2', but must be a whole number."),
        ({"args": {"nnodes": 2}}, "nnodes is put in for each guest; say nodes: 2 in the mode instead."),
        ({"args": {"node_rank": 1}}, "node_rank is put in for each guest; say nodes: 2 in the mode instead."),
        ({"args": {"dist_init_addr": "x:1"}}, "dist_init_addr is put in for each guest; say nodes: 2 in the mode"),
    ],
)
def test_what_a_file_may_not_say(mode: dict[str, Any], sentence: str) -> None:
    assert any(sentence in error for error in modes.check("mine", {"description": "m", **mode}))


def test_nor_the_machine() -> None:
    with pytest.raises(modes.ModeError, match="sglang_server_extra_args: node_rank is put in for each guest"):
        render("two", "gpu1", node_rank=1)


def wrong(names: list[str], hosts: dict[str, dict[str, Any]] = HOSTS, **own: Any) -> list[str]:
    mode = {"name": "two", "nodes": 2, "args": {"tp_size": own.pop("tp_size", 16)}}
    return modes_nodes.errors(mode, names, hosts, OWN | own)


def test_nothing_is_wrong_with_two_guests_that_reach_each_other() -> None:
    assert wrong(["gpu1", "gpu2"]) == wrong(["gpu2", "gpu3", "gpu1"]) == []
    assert modes_nodes.errors({"name": "base", "args": {"tp_size": 3}}, [], {}, OWN) == []


@pytest.mark.parametrize(
    ("names", "own", "sentence"),
    [
        (
            ["gpu1"],
            {},
            "Mode 'two' serves over 2 guests, and sglang_server_nodes has 1 (gpu1); add guests to the group gpu_guests "
            "or to sglang_server_nodes, or take a mode with fewer nodes.",
        ),
        (
            ["gpu1", "gpu9"],
            {},
            "sglang_server_nodes names gpu9, which the inventory does not have; correct it, or add the guest.",
        ),
        (["gpu1", "gpu1"], {}, "sglang_server_nodes names a guest twice (gpu1, gpu1); each has one rank."),
        (
            ["gpu1", "gpu2"],
            {"tp_size": 15},
            "Mode 'two' serves over 2 guests, and its 15 ranks (tp_size) do not divide by 2: SGLang gives each guest "
            "as many; set tp_size to a multiple.",
        ),
        (
            ["gpu1", "gpu2"],
            {"prove": ["two"]},
            "Mode 'two' serves over 2 guests, which sglang_server_prove cannot start guest by guest; leave it out, and "
            "start it with playbooks/serve.yml -e mode=two.",
        ),
        (
            ["gpu1", "gpu2"],
            {"boot_mode": "two"},
            "Mode 'two' serves over 2 guests, and sglang_server_boot_mode would start each rank when its guest boots, "
            "whether the others are there or not; choose another mode.",
        ),
        (
            ["gpu1", "gpu2"],
            {"isolated": False},
            "Mode 'two' serves over 2 guests, whose ranks talk to each other without a key and take Python objects "
            "from whoever reaches their ports; set sglang_server_dist_isolated=true where nobody but the guests "
            "reaches that network.",
        ),
        (["gpu1", "gpu2"], {"dist_port": 80}, "sglang_server_dist_port is 80, but must lie between 1024 and 65529."),
        (
            ["gpu1", "gpu2"],
            {"port": 20004},
            "sglang_server_port is 20004, which lies between 20000 and 20006, where the ranks of a mode over several "
            "guests meet; move sglang_server_dist_port.",
        ),
    ],
)
def test_every_mistake_gets_its_sentence(names: list[str], own: dict[str, Any], sentence: str) -> None:
    assert sentence in wrong(names, **own)


@pytest.mark.parametrize("address", ["127.0.0.1", "::1", "localhost", "0.0.0.0"])
def test_an_address_that_the_others_cannot_reach_is_refused(address: str) -> None:
    hosts = HOSTS | {"gpu1": {"ansible_host": address}}
    assert wrong(["gpu1", "gpu2"], hosts) == [
        f"Mode 'two' serves over 2 guests, and gpu1 has the address {address}, at which the others cannot reach it; "
        "set sglang_server_dist_address of gpu1 to an address of its own."
    ]


def test_two_names_of_one_machine_may_meet_on_its_loopback_and_need_no_statement() -> None:
    here = {"ansible_connection": "local", "sglang_server_dist_address": "127.0.0.1"}
    assert wrong(["a", "b"], {"a": here, "b": here}, isolated=False) == []


FACTS = {
    "interfaces": ["lo", "eth0", "br-1"],
    "lo": {"ipv4": {"address": "127.0.0.1"}},
    "eth0": {"ipv4": {"address": "10.0.0.1"}, "ipv6": [{"address": "fe80::1"}, {"address": "fd00::1"}]},
    "br_1": {"ipv4": {"address": "10.1.0.1"}, "ipv4_secondaries": [{"address": "10.1.0.2"}]},
}


@pytest.mark.parametrize(
    ("address", "name"),
    [
        ("10.0.0.1", "eth0"),
        ("fd00:0::1", "eth0"),
        ("10.1.0.2", "br-1"),
        ("127.0.0.1", "lo"),
        ("10.9.9.9", None),
        ("gpu1.example", ""),
    ],
)
def test_the_interface_is_the_one_that_has_the_address(address: str, name: str | None) -> None:
    assert modes_nodes.interface_of(address, FACTS) == name


def test_of_unknown_interfaces_nothing_is_claimed() -> None:
    assert modes_nodes.interface_of("10.0.0.1", {}) == ""


def test_a_play_without_all_ranks_starts_nothing() -> None:
    assert modes_nodes.play_errors("two", 2, ["gpu1", "gpu2", "gpu3"], ["gpu1", "gpu2"], 5) == []
    assert modes_nodes.play_errors("base", 1, ["gpu1", "gpu2"], ["gpu2"], 1) == []
    assert modes_nodes.play_errors("two", 2, ["gpu1", "gpu2"], ["gpu1"], 5) == [
        "Mode 'two' serves over gpu1, gpu2, and gpu2 is not in this play any more, or never was: leave out -l, and "
        "mend what failed there. Nothing was started."
    ]
    assert modes_nodes.play_errors("two", 2, ["gpu1", "gpu2"], ["gpu1", "gpu2"], 1) == [
        "Mode 'two' serves over gpu1, gpu2, which are watched at the same time, and forks is 1; add -f 2."
    ]
