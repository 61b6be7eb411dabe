"""Several servers behind SGLang's own router: which replicas the inventory names, and what is wrong with them."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from .readiness import Answer

Vars = Mapping[str, Any]
Replica = dict[str, Any]

# What the role says itself, and by which of its variables.
_OWN = {
    "host": "sglang_router_host",
    "port": "sglang_router_port",
    "worker_urls": "sglang_router_guests",
    "policy": "sglang_router_policy",
    "prometheus_host": "the role: 127.0.0.1",
    "prometheus_port": "sglang_router_metrics_port",
}
# Flags whose value is a secret, or may hold one.
_SECRET = ("api_key", "control_plane_api_keys", "oracle_password", "postgres_db_url", "redis_url")
# What the program that starts the router reads from the role's file.
_KEYS = {"sglang_server_api_key": "api-key", "sglang_server_admin_api_key": "admin-api-key"}
_EVERYWHERE = ("0.0.0.0", "::")
_SHOWN = 3


def is_loopback(host: str) -> bool:
    """Whether only the machine itself can reach this address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def machine_of(name: str, given: Vars) -> str:
    """What is the same for two inventory names of one machine."""
    if given.get("ansible_connection") == "local":
        return "this machine"
    return str(given.get("ansible_host") or name)


def replicas(guests: Sequence[str], hosts: Mapping[str, Vars], router: str) -> list[Replica]:
    """The servers of `guests` as the router on the inventory's host `router` reaches them.

    hosts: inventory name → its variables. Each replica: {"name", "url"}, in the order of `guests`; guests that the
    inventory does not have are left to `errors`.
    """
    found = []
    for name in guests:
        if name not in hosts:
            continue
        host, port = listens(hosts[name])
        if host in _EVERYWHERE:
            same = machine_of(name, hosts[name]) == machine_of(router, hosts[router])
            host = "127.0.0.1" if same else str(hosts[name].get("ansible_host") or name)
        found.append({"name": name, "url": url_of(host, port)})
    return found


def url_of(host: str, port: int) -> str:
    """Where a server or router is asked that listens on `host`; on its own machine for one that listens everywhere."""
    host = "127.0.0.1" if host in _EVERYWHERE else host
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def listens(given: Vars) -> tuple[str, int]:
    """Address and port on which a guest's servers listen."""
    return str(given.get("sglang_server_host", "127.0.0.1")), int(given.get("sglang_server_port", 30000))


def keys(guests: Sequence[str], hosts: Mapping[str, Vars]) -> dict[str, str]:
    """The keys that the router shows and asks for, named as in the role's file: the replicas' own."""
    given = next((hosts[name] for name in guests if name in hosts), {})
    return {short: str(given[name]) for name, short in _KEYS.items() if given.get(name)}


def errors(guests: Sequence[str], hosts: Mapping[str, Vars], known: Iterable[str], router: str, own: Vars) -> list[str]:
    """Everything that is wrong with the replicas and the router's settings, a sentence each.

    known: the hosts of gpu_guests. own: the role's settings {"host", "port", "metrics_port", "unprotected_ok", "args"}.
    """
    if not guests:
        return ["sglang_router_guests is empty, so there is nothing to route to; name hosts of the group gpu_guests."]
    known = list(known)
    said = [
        f"sglang_router_guests names {name}, which is no host of the group gpu_guests; correct it, or add the guest."
        for name in guests
        if name not in known
    ]
    guests = [name for name in guests if name in known and name in hosts]
    said += _reachable(guests, hosts, router) + _same_keys(guests, hosts)
    said += _same_address(replicas(guests, hosts, router))
    return said + _own(own, keys(guests, hosts)) + _ports(guests, hosts, router, own) + _args(own["args"])


def _reachable(guests: Sequence[str], hosts: Mapping[str, Vars], router: str) -> list[str]:
    here = machine_of(router, hosts[router])
    return [
        f"{name} serves on {host} only, which the router on {router} cannot reach: set sglang_server_host of {name} to "
        "an address of its own (that needs sglang_server_api_key and sglang_server_admin_api_key), or run the router "
        f"on {name}."
        for name in guests
        if is_loopback(host := listens(hosts[name])[0]) and machine_of(name, hosts[name]) != here
    ]


def _same_keys(guests: Sequence[str], hosts: Mapping[str, Vars]) -> list[str]:
    return [
        f"{variable} of {name} is not that of {guests[0]}, but the router shows all its servers one and the same; set "
        "it for the group gpu_guests."
        for variable in _KEYS
        for name in guests[1:]
        if (hosts[name].get(variable) or "") != (hosts[guests[0]].get(variable) or "")
    ]


def _same_address(found: Sequence[Replica]) -> list[str]:
    first: dict[str, str] = {}
    said = []
    for one in found:
        other = first.setdefault(one["url"], one["name"])
        if other != one["name"]:
            said.append(
                f"{one['name']} and {other} both serve at {one['url']}, which is one server; give each its own "
                "sglang_server_host or sglang_server_port."
            )
    return said


def _own(own: Vars, shown: Mapping[str, str]) -> list[str]:
    if is_loopback(own["host"]) or own["unprotected_ok"] or set(shown) == set(_KEYS.values()):
        return []
    return [
        f"sglang_router_host is {own['host']}, which others can reach: that needs sglang_server_api_key and "
        "sglang_server_admin_api_key of its servers (without the second, whoever has the first may add servers of his "
        "own, and reads what others ask), or sglang_router_unprotected_ok."
    ]


def _ports(guests: Sequence[str], hosts: Mapping[str, Vars], router: str, own: Vars) -> list[str]:
    ports = {"sglang_router_port": int(own["port"]), "sglang_router_metrics_port": int(own["metrics_port"])}
    said = [
        f"{variable} is {port}, but must lie between 1024 and 65535."
        for variable, port in ports.items()
        if not 1024 <= port <= 65535
    ]
    if len(set(ports.values())) == 1:
        said.append(f"sglang_router_port and sglang_router_metrics_port are both {own['port']}; give each its own.")
    here = machine_of(router, hosts[router])
    return said + [
        f"{variable} is {port}, which is the port of the servers of {name} on the same machine; set another."
        for name in guests
        if machine_of(name, hosts[name]) == here
        for variable, port in ports.items()
        if port == listens(hosts[name])[1]
    ]


def _args(given: Vars) -> list[str]:
    said = []
    for name in given:
        plain = str(name).replace("-", "_")
        if plain in _SECRET:
            said.append(
                f"sglang_router_args sets {name}, which would stand in the command line for all to see; the keys come "
                "from sglang_server_api_key and sglang_server_admin_api_key, others cannot be given."
            )
        elif plain in _OWN:
            said.append(f"sglang_router_args sets {name}, which is said by {_OWN[plain]}; remove it there.")
    return said


def argv(own: Vars, found: Sequence[Replica]) -> list[str]:
    """The router's flags. True is a bare flag, a list several values; null and false leave a flag out."""
    flags = {
        "host": own["host"],
        "port": own["port"],
        "worker_urls": [one["url"] for one in found],
        "policy": own["policy"],
        # Said, because the router's own default is every address of the machine.
        "prometheus_host": "127.0.0.1",
        "prometheus_port": own["metrics_port"],
        # A request is tried five times. Its own default gives a server up at the tenth failure, and a policy that keeps
        # requests with one server (cache_aware) would try all five there: two requests lost when a server ends.
        "cb_failure_threshold": 3,
        **own["args"],
    }
    words = []
    for name, value in flags.items():
        if value is None or value is False:
            continue
        words.append("--" + str(name).replace("_", "-"))
        if value is not True:
            words += [str(one) for one in (value if isinstance(value, list | tuple) else [value])]
    return words


def models_of(answer: Answer) -> list[str]:
    """The names in an answer to /v1/models."""
    listed = answer.body.get("data") if isinstance(answer.body, Mapping) else None
    return [str(one["id"]) for one in listed or [] if isinstance(one, Mapping) and "id" in one]


def problem_of(one: Replica, answer: Answer) -> str | None:
    """What a replica's answer to /v1/models says against it, as a sentence; None where nothing does."""
    who = f"{one['name']} ({one['url']})"
    if answer.status is None:
        return (
            f"{who} does not answer the router's machine: {answer.problem}. Start a mode there (playbooks/serve.yml "
            f"-e mode=NAME --limit {one['name']}), or leave it out of sglang_router_guests."
        )
    if answer.status in (401, 403):
        return f"{who} refuses the key: it runs with the keys that it was started with; restart it."
    if answer.status != 200 or not models_of(answer):
        return f"{who} answers HTTP {answer.status} and names no model; look at its log there."
    return None


def problems(found: Sequence[Replica], answers: Sequence[Answer]) -> list[str]:
    """What is wrong with the running servers: those that cannot be used, and those that serve something else."""
    said = [problem for one, answer in zip(found, answers, strict=True) if (problem := problem_of(one, answer))]
    serving = [(one, names) for one, answer in zip(found, answers, strict=True) if (names := models_of(answer))]
    return said + [
        f"{one['name']} serves {_listed(names)}, but {serving[0][0]['name']} {_listed(serving[0][1])}: one router's "
        "servers must be interchangeable; serve one model, or name it alike (sglang_server_served_model_name)."
        for one, names in serving[1:]
        if set(names) != set(serving[0][1])
    ]


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:_SHOWN])


def healthy(listed: Any) -> set[str]:
    """URLs of the servers that the router uses, of its answer to /workers."""
    workers = listed.get("workers") if isinstance(listed, Mapping) else None
    return {str(one.get("url")) for one in workers or [] if isinstance(one, Mapping) and one.get("is_healthy") is True}
