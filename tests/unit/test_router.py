"""Several servers behind one router: what the inventory must say, what is refused by name, and when it is ready."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import pytest

from servelab.shared import router
from servelab.shared.readiness import Answer
from servelab.shared.router_judge import RouterLook, judge

KEYS = {"sglang_server_api_key": "key-of-the-clients", "sglang_server_admin_api_key": "key-of-the-admins"}
HOSTS: dict[str, dict[str, Any]] = {
    "gpu1": {"ansible_host": "10.0.0.1", "sglang_server_host": "10.0.0.1", **KEYS},
    "gpu2": {"ansible_host": "10.0.0.2", "sglang_server_host": "0.0.0.0", "sglang_server_port": 31000, **KEYS},
    "front": {"ansible_host": "10.0.0.9"},
}
GUESTS = ["gpu1", "gpu2"]
OWN: dict[str, Any] = {
    "host": "127.0.0.1",
    "port": 30100,
    "metrics_port": 29000,
    "policy": "cache_aware",
    "unprotected_ok": False,
    "args": {},
}


def errors(
    *, hosts: dict[str, dict[str, Any]] | None = None, guests: list[str] = GUESTS, at: str = "front", **own: Any
) -> list[str]:
    return router.errors(guests, hosts or HOSTS, GUESTS, at, {**OWN, **own})


def spoilt(name: str, **given: Any) -> dict[str, dict[str, Any]]:
    hosts = copy.deepcopy(HOSTS)
    hosts[name] |= given
    return hosts


def test_two_servers_of_other_machines() -> None:
    assert errors() == []
    assert router.replicas(GUESTS, HOSTS, "front") == [
        {"name": "gpu1", "url": "http://10.0.0.1:30000"},
        # It listens on every address, so it is asked at the one that Ansible reaches it at.
        {"name": "gpu2", "url": "http://10.0.0.2:31000"},
    ]
    assert router.keys(GUESTS, HOSTS) == {"api-key": "key-of-the-clients", "admin-api-key": "key-of-the-admins"}


def test_a_server_that_listens_everywhere_is_asked_on_loopback_by_its_own_machine() -> None:
    assert router.replicas(["gpu2"], HOSTS, "gpu2") == [{"name": "gpu2", "url": "http://127.0.0.1:31000"}]


def test_an_address_of_ip_version_6_stands_in_brackets() -> None:
    assert router.replicas(["gpu1"], spoilt("gpu1", sglang_server_host="fd00::1"), "front")[0]["url"] == (
        "http://[fd00::1]:30000"
    )


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.8.8.8"])
def test_a_server_on_loopback_is_refused_where_the_router_is_on_another_machine(host: str) -> None:
    assert errors(hosts=spoilt("gpu2", sglang_server_host=host)) == [
        f"gpu2 serves on {host} only, which the router on front cannot reach: set sglang_server_host of gpu2 to an "
        "address of its own (that needs sglang_server_api_key and sglang_server_admin_api_key), or run the router on "
        "gpu2."
    ]


def test_without_an_address_in_the_inventory_a_server_is_on_loopback() -> None:
    hosts = copy.deepcopy(HOSTS)
    del hosts["gpu1"]["sglang_server_host"]
    (said,) = errors(hosts=hosts)
    assert said.startswith("gpu1 serves on 127.0.0.1 only")


def test_a_server_on_loopback_will_do_on_the_same_machine() -> None:
    assert errors(hosts=spoilt("gpu1", sglang_server_host="127.0.0.1"), at="gpu1") == []
    local = {name: {"ansible_connection": "local", "sglang_server_port": port} for name, port in
             (("gpu1", 30001), ("gpu2", 30002), ("front", 1))}  # fmt: skip
    assert errors(hosts=local) == []


def test_all_is_said_at_once() -> None:
    hosts = spoilt("gpu2", sglang_server_host="127.0.0.1", sglang_server_api_key="another key")
    said = errors(
        hosts=hosts, guests=[*GUESTS, "gpu3"], port=80, args={"api-key": "x", "policy": "random", "log_level": "debug"}
    )  # fmt: skip
    assert [sentence.split(",")[0] for sentence in said] == [
        "sglang_router_guests names gpu3",
        "gpu2 serves on 127.0.0.1 only",
        "sglang_server_api_key of gpu2 is not that of gpu1",
        "sglang_router_port is 80",
        "sglang_router_args sets api-key",
        "sglang_router_args sets policy",
    ]
    assert not any("another key" in sentence or "key-of" in sentence for sentence in said)


def test_nothing_to_route_to() -> None:
    assert errors(guests=[]) == [
        "sglang_router_guests is empty, so there is nothing to route to; name hosts of the group gpu_guests."
    ]


def test_two_names_of_one_server() -> None:
    (said,) = errors(hosts=spoilt("gpu2", sglang_server_host="10.0.0.1", sglang_server_port=30000))
    assert said.startswith("gpu2 and gpu1 both serve at http://10.0.0.1:30000, which is one server;")


def test_a_router_that_others_reach_needs_both_keys() -> None:
    assert errors(host="0.0.0.0") == []
    bare = {name: {key: value for key, value in given.items() if key != "sglang_server_admin_api_key"}
            for name, given in HOSTS.items()}  # fmt: skip
    (said,) = errors(hosts=bare, host="10.0.0.9")
    assert said.startswith(
        "sglang_router_host is 10.0.0.9, which others can reach: that needs sglang_server_api_key and"
    )
    assert errors(hosts=bare, host="10.0.0.9", unprotected_ok=True) == []


def test_ports_that_are_taken() -> None:
    assert errors(port=29000) == [
        "sglang_router_port and sglang_router_metrics_port are both 29000; give each its own."
    ]
    assert errors(port=31000, at="gpu2") == [
        "sglang_router_port is 31000, which is the port of the servers of gpu2 on the same machine; set another."
    ]
    assert errors(port=31000) == []


def test_the_flags() -> None:
    found = router.replicas(GUESTS, HOSTS, "front")
    own = {**OWN, "args": {"log_level": "debug", "disable_retries": True, "dp_aware": False, "log_dir": None,
                           "request_id_headers": ["a", "b"]}}  # fmt: skip
    assert router.argv(own, found) == [
        "--host", "127.0.0.1", "--port", "30100",
        "--worker-urls", "http://10.0.0.1:30000", "http://10.0.0.2:31000", "--policy", "cache_aware",
        # Its own default is every address.
        "--prometheus-host", "127.0.0.1", "--prometheus-port", "29000",
        # Its own default gives a server up after more failures than a request has tries.
        "--cb-failure-threshold", "3",
        "--log-level", "debug", "--disable-retries", "--request-id-headers", "a", "b",
    ]  # fmt: skip


def models(*names: str) -> Answer:
    return Answer(200, {"object": "list", "data": [{"id": name} for name in names]})


REPLICAS = [{"name": "gpu1", "url": "http://10.0.0.1:30000"}, {"name": "gpu2", "url": "http://10.0.0.2:31000"}]


def test_servers_that_answer_alike() -> None:
    assert router.problems(REPLICAS, [models("kimi"), models("kimi")]) == []


def test_a_server_is_refused_with_its_reason() -> None:
    silent, refusing = router.problems(REPLICAS, [Answer(problem="[Errno 111] Connection refused"), Answer(401, "")])
    assert silent == (
        "gpu1 (http://10.0.0.1:30000) does not answer the router's machine: [Errno 111] Connection refused. Start a "
        "mode there (playbooks/serve.yml -e mode=NAME --limit gpu1), or leave it out of sglang_router_guests."
    )
    assert refusing.startswith(
        "gpu2 (http://10.0.0.2:31000) refuses the key: it runs with the keys that it was started"
    )
    (loading,) = router.problems(REPLICAS, [models("kimi"), Answer(503, "")])
    assert loading.startswith("gpu2 (http://10.0.0.2:31000) answers HTTP 503 and names no model")


def test_servers_of_two_models_are_not_interchangeable() -> None:
    (said,) = router.problems(REPLICAS, [models("kimi"), models("llama")])
    assert said.startswith("gpu2 serves llama, but gpu1 kimi: ")


# The router's own answer to /workers (sglang-router 0.3.2), shortened.
def listed(*states: bool) -> Answer:
    urls = [one["url"] for one in REPLICAS]
    workers = [{"url": url, "model_id": "kimi", "is_healthy": good} for url, good in zip(urls, states, strict=False)]
    return Answer(200, {"workers": workers, "total": len(workers)})


READY = RouterLook(
    REPLICAS, active="active", port=30100, owner="ours", workers=listed(True, True), tokens=8,
    completion=Answer(200, {"usage": {"completion_tokens": 8}}),
)  # fmt: skip


def test_ready_when_all_are_used_and_a_completion_came() -> None:
    verdict = judge(READY)
    assert (verdict.state, verdict.progress) == (
        "done",
        "2 of 2 servers taken, and a completion came through the router",
    )


def test_that_it_listens_is_not_ready() -> None:
    assert judge(replace(READY, workers=Answer(200, {"workers": [], "total": 0}))).state == "working"
    assert judge(replace(READY, completion=None)).state == "working"
    assert judge(replace(READY, completion=Answer(503, ""))).state == "working"


def test_a_server_that_is_not_used_is_named_with_its_own_answer() -> None:
    replies = {"gpu2": Answer(problem="no answer within 10 s")}
    for workers in (listed(True), listed(True, False)):
        verdict = judge(replace(READY, workers=workers, replies=replies))
        assert (verdict.state, verdict.progress) == ("working", "1 of 2 servers taken, not gpu2")
        assert "gpu2 (http://10.0.0.2:31000) does not answer the router's machine: no answer within" in str(
            verdict.if_stalled
        )
    alive = judge(replace(READY, workers=listed(True), replies={"gpu2": models("kimi")}))
    assert "gpu2 (http://10.0.0.2:31000) answers itself" in str(alive.if_stalled)


def test_the_last_state_wins() -> None:
    """It answered, and then it was gone."""
    verdict = judge(replace(READY, active="failed", status=1, log="\x1b[2mstarting\nerror: Address in use\n"))
    assert verdict.state == "failed"
    assert verdict.cause == "The router is failed: it ended with exit status 1"
    assert verdict.tail == ["starting", "error: Address in use"]


def test_somebody_elses_answers_prove_nothing() -> None:
    verdict = judge(replace(READY, owner="pid 42: python3 -m http.server 30100"))
    assert verdict.state == "failed"
    assert verdict.cause == "Port 30100 is taken by pid 42: python3 -m http.server 30100"


def test_a_short_completion_is_no_proof() -> None:
    verdict = judge(replace(READY, completion=Answer(200, {"usage": {"completion_tokens": 3}})))
    assert (verdict.state, verdict.cause) == (
        "failed",
        "A completion through the router has 3 tokens instead of 8",
    )
