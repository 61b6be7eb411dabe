"""The inventory's rules: one good inventory, and what must be said about each way of spoiling it."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from servelab.shared.inventory_rules import UNKNOWN, Catalogue, check_inventory

CATALOGUE = Catalogue(
    variables={
        "pve_container": {"pve_container_guest", "pve_container_restart_ok"},
        "pve_gpu_host": {"pve_gpu_host_expected_gpus"},
        "sglang_server": {"sglang_server_host", "sglang_server_modes", "sglang_server_tp_size"},
    },
    defaults={"sglang_server_tp_size": 8},
    modes=["baseline", "eagle3"],
    releases=["0.5.23"],
)
GUEST: dict[str, Any] = {
    "vmid": 129,
    "hostname": "gpu1",
    "template": "local:vztmpl/debian-13-standard_13.1-1_amd64.tar.zst",
    "memory": 65536,
    "swap": 0,
    "rootfs": "local-zfs:200",
    "startup": "order=2,up=30",
    "net": [{"name": "eth0", "bridge": "vmbr0", "ip": "192.168.1.129/24", "gw": "192.168.1.1"}],
    "features": {"nesting": True},
    "mounts": [{"source": "/tank/models", "path": "/shared", "read_only": True}],
    "gpus": "all",
}
HOSTS: dict[str, dict[str, Any]] = {
    "pve1": {"pve_gpu_host_expected_gpus": 8},
    "gpu1": {"pve_node": "pve1", "pve_container_guest": GUEST, "sglang_version": "0.5.23", "sglang_server_tp_size": 8},
}
GROUPS = {"pve_nodes": ["pve1"], "gpu_guests": ["gpu1"]}


def spoiled(**guest: Any) -> list[str]:
    """The problems of the good inventory with some keys of its guest replaced; None removes one."""
    hosts = copy.deepcopy(HOSTS)
    described = {**hosts["gpu1"]["pve_container_guest"], **guest}
    hosts["gpu1"]["pve_container_guest"] = {key: value for key, value in described.items() if value is not None}
    return check_inventory(hosts, GROUPS, CATALOGUE)


def with_variables(**variables: Any) -> list[str]:
    hosts = copy.deepcopy(HOSTS)
    hosts["gpu1"] = {key: value for key, value in {**hosts["gpu1"], **variables}.items() if value is not None}
    return check_inventory(hosts, GROUPS, CATALOGUE)


def test_a_good_inventory_has_no_problem() -> None:
    assert check_inventory(HOSTS, GROUPS, CATALOGUE) == []


def test_numbers_may_be_text_and_a_machine_may_be_no_container() -> None:
    assert spoiled(vmid="129", memory="65536", gpus=["0", 7], net=[{"name": "e", "bridge": "b", "ip": "dhcp"}]) == [
        "gpu1: sglang_server_tp_size is 8, but the guest gets 2 GPUs; lower it, or give the guest more in "
        "pve_container_guest.gpus."
    ]
    assert check_inventory({"bare": {}}, {"gpu_guests": ["bare"]}, CATALOGUE) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"vmid": 99}, "vmid is 99; Proxmox takes whole numbers from 100"),
        ({"vmid": None}, "vmid is missing"),
        ({"vmid": True}, "vmid is True"),
        ({"hostname": "gpu_1"}, "hostname is 'gpu_1'"),
        ({"hostname": "-gpu"}, "hostname is '-gpu'"),
        ({"memory": "64G"}, "memory is '64G'; it must be a whole number of MiB"),
        ({"cores": 0}, "cores is 0"),
        ({"rootfs": "200G"}, "rootfs is '200G'"),
        ({"shm_size": "64"}, "shm_size is '64'; write a size with its unit, such as 64G"),
        ({"shm_size": "0G"}, "shm_size is '0G'"),
        ({"hugepages": True}, "hugepages is True; give the node's directory"),
        ({"startup": "second"}, "startup is 'second'"),
        ({"template": "debian-13"}, "template is 'debian-13'"),
        ({"hostnme": "x"}, "hostnme is unknown; did you mean hostname?"),
        ({"features": {"nestin": True}}, "features.nestin is unknown; did you mean nesting?"),
        ({"features": ["nesting"]}, "features is ['nesting']; it must be a mapping"),
        ({"net": [{"name": "eth0", "bridge": "vmbr0", "ip": "192.168.1.129"}]}, "net[0].ip is '192.168.1.129'"),
        ({"net": [{"name": "eth0", "bridge": "vmbr0", "ip": "192.168.1.300/24"}]}, "net[0].ip is '192.168.1.300/24'"),
        ({"net": [{"name": "eth0", "bridge": "vmbr0", "ip": "192.168.1.255/24"}]}, "the network's own address"),
        (
            {"net": [{"name": "eth0", "bridge": "vmbr0", "ip": "192.168.1.129/24", "gw": "192.168.2.1"}]},
            "gw is 192.168.2.1, which is not in 192.168.1.0/24",
        ),
        ({"net": [{"name": "eth0", "ip": "dhcp"}]}, "net[0].bridge is missing"),
        ({"net": [{"name": "eth0", "bridge": "v", "hwaddr": "01:00:00:00:00:01"}]}, "unicast MAC"),
        ({"net": [{"name": "eth0", "bridge": "v", "vlan": 3}]}, "net[0].vlan is unknown"),
        ({"mounts": [{"source": "tank", "path": "/shared"}]}, "mounts[0].source is 'tank'"),
        ({"mounts": [{"source": "/a", "path": "/s"}, {"source": "/b", "path": "/s"}]}, "another mount has too"),
        ({"mounts": [{"source": "/a", "path": "/s", "readonly": True}]}, "did you mean read_only?"),
        ({"gpus": "0,1"}, "gpus is '0,1'"),
        ({"gpus": [0, 0, 1, 2, 3, 4, 5, 6]}, "names a card twice"),
        ({"gpus": [1, 2, 3, 4, 5, 6, 7, 8]}, "gpus names 8, but pve1 has 8 GPUs, numbered 0 to 7"),
    ],
)
def test_what_is_wrong_with_the_guest_is_said(change: dict[str, Any], said: str) -> None:
    problems = spoiled(**change)
    assert len(problems) == 1, problems
    assert problems[0].startswith("gpu1: pve_container_guest") and said in problems[0]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"pve_node": None}, "pve_node is not set"),
        ({"pve_node": "pve9"}, "pve_node is 'pve9', which is no host of the group pve_nodes (pve1)"),
        ({"pve_container_guest": None}, "pve_container_guest is not set"),
        ({"pve_container_guest": "gpu1"}, "pve_container_guest is 'gpu1'; it must be a mapping"),
        (
            {"sglang_version": "0.5.99"},
            "sglang_version is 0.5.99, but the supported releases are 0.5.23. Another release needs a lock made with "
            "`servelab lock`, named in sglang_env_lock.",
        ),
        (
            {"sglang_version": "0.5.10"},
            "sglang_version is 0.5.10, but the supported releases are 0.5.23. Before 0.5.11 SGLang is CUDA 12 on PyPI: "
            "it needs a lock made with the cu130 indexes, named in sglang_env_lock.",
        ),
        (
            {"sglang_version": "latest"},
            "sglang_version is latest, but the supported releases are 0.5.23. Another release",
        ),
        ({"sglang_env_version": "0.5.99"}, "sglang_env_version is 0.5.99, but the supported releases are 0.5.23."),
        ({"sglang_server_host": "0.0.0.0"}, "sglang_server_host is 0.0.0.0"),
        ({"sglang_server_modes": ["baseline", "eagle"]}, "sglang_server_modes names 'eagle'; the known modes are"),
        ({"sglang_server_tp_size": 16}, "sglang_server_tp_size is 16, but the guest gets 8 GPUs"),
        ({"sglang_server_tp_size": "eight"}, "sglang_server_tp_size is 'eight'"),
        ({"pve_container_gest": {}}, "pve_container_gest is no variable of the role pve_container; did you mean"),
    ],
)
def test_what_is_wrong_with_the_variables_is_said(change: dict[str, Any], said: str) -> None:
    problems = with_variables(**change)
    assert any(said in problem for problem in problems), problems


OLD = "/locks/0.5.10-py3.13.txt"


def lock(sglang: str, torch: str) -> str:
    """As `servelab lock` writes one, shortened."""
    hashed = f" \\\n    --hash=sha256:{'0' * 64}\n"
    return f"# name: {sglang}\n# python: 3.13\nsglang=={sglang}{hashed}torch=={torch}{hashed}"


def with_lock(version: str | None, path: Any, **locks: str) -> list[str]:
    hosts = copy.deepcopy(HOSTS)
    hosts["gpu1"] |= {"sglang_version": version, "sglang_env_lock": path}
    return check_inventory(hosts, GROUPS, replace(CATALOGUE, locks=locks))


def test_a_lock_of_ones_own_makes_a_release_known() -> None:
    """One that the collection has no stack for: an old one built for CUDA 13, and a new one from PyPI."""
    assert with_lock("0.5.10", OLD, **{OLD: lock("0.5.10", "2.9.1+cu130")}) == []
    assert with_lock("0.5.10.post1", OLD, **{OLD: lock("0.5.10.post1", "2.9.1+cu130")}) == []
    assert with_lock("0.5.22", "/l.txt", **{"/l.txt": lock("0.5.22", "2.14.1")}) == []


def test_a_lock_without_a_release_is_left_to_the_role_whose_default_counts() -> None:
    assert with_lock(None, OLD, **{OLD: lock("0.5.23", "2.14.1")}) == []


def test_a_lock_that_cannot_be_evaluated_is_not_judged() -> None:
    assert with_lock("0.5.10", UNKNOWN) == []


@pytest.mark.parametrize(
    ("version", "path", "text", "said"),
    [
        ("0.5.10", OLD, None, "but there is no such file on the controller; make it with `servelab lock`."),
        ("0.5.10", "l.txt", "", "must be an absolute path on the controller; beside the inventory that is {{ inv"),
        ("0.5.10", OLD, "torch>=2", "but that is no lock: Line 1 of the lock is 'torch>=2'"),
        ("0.5.9", OLD, lock("0.5.10", "2.9.1+cu130"), "which locks SGLang 0.5.10, but sglang_version is 0.5.9; name"),
        ("0.5.9", OLD, "# empty", "which locks no SGLang, but sglang_version is 0.5.9; name"),
        ("0.5.10", OLD, lock("0.5.10", "2.9.1"), "locks torch 2.9.1, but before 0.5.11 SGLang's torch is CUDA 12"),
        ("0.5.10", OLD, lock("0.5.10", "2.9.1+cu128"), "locks torch 2.9.1+cu128, but before 0.5.11"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_a_lock_is_said(version: str, path: str, text: str | None, said: str) -> None:
    problems = with_lock(version, path, **({} if text is None else {path: text}))
    assert len(problems) == 1, problems
    assert problems[0].startswith(f"gpu1: sglang_env_lock is {path}, ") and said in problems[0]


def test_loopback_has_more_than_one_name() -> None:
    for address in ("127.0.0.1", "127.0.0.2", "::1", "localhost"):
        assert with_variables(sglang_server_host=address) == []


def test_all_problems_are_found_at_once() -> None:
    problems = spoiled(vmid=1, hostname="a_b", memory=1, gpus="none")
    assert len(problems) == 4


@pytest.mark.parametrize("name", ["pve_node", "pve_container_guest", "sglang_server_tp_size", "sglang_server_modes"])
def test_a_variable_that_cannot_be_evaluated_is_not_judged_as_well(name: str) -> None:
    assert with_variables(**{name: UNKNOWN}) == []


def test_guests_are_compared_with_each_other() -> None:
    hosts = {**HOSTS, "gpu2": copy.deepcopy(HOSTS["gpu1"])}
    problems = check_inventory(hosts, {**GROUPS, "gpu_guests": ["gpu1", "gpu2"]}, CATALOGUE)
    assert problems == [
        "gpu1, gpu2: they all have the vmid 129 on pve1; a number belongs to one container.",
        "gpu1, gpu2: they all have the address 192.168.1.129; give each its own.",
    ]
    hosts["pve2"] = {}
    hosts["gpu2"]["pve_node"] = "pve2"
    hosts["gpu2"]["pve_container_guest"]["net"] = [{"name": "eth0", "bridge": "vmbr0", "ip": "dhcp"}]
    groups = {"pve_nodes": ["pve1", "pve2"], "gpu_guests": ["gpu1", "gpu2"]}
    assert check_inventory(hosts, groups, CATALOGUE) == []  # the same number on another node is another container


def test_an_inventory_without_guests_is_told_so() -> None:
    assert "gpu_guests has no host" in check_inventory({}, {"pve_nodes": ["pve1"]}, CATALOGUE)[0]


def test_a_router_on_a_machine_of_its_own_is_looked_at_too() -> None:
    catalogue = Catalogue(variables={**CATALOGUE.variables, "sglang_router": {"sglang_router_port"}})
    groups = {**GROUPS, "sglang_routers": ["front"]}
    hosts = {**HOSTS, "front": {"sglang_router_port": 30100, "sglang_router_ports": 30101}}
    (said,) = check_inventory(hosts, groups, catalogue)
    assert said.startswith("front: sglang_router_ports is no variable of the role sglang_router")
