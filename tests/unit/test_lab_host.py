"""What the lab reads of its host, held against files as people have them."""

from __future__ import annotations

import pytest

from servelab.shared.lab_host import (
    apt_packages_missing,
    certificates,
    debian_mirrors,
    nameservers,
    overlapping_route,
    pip_settings,
    proxies,
    with_sbin,
)


def test_missing_programs_are_named_by_their_packages_once() -> None:
    here = {"ip", "tar", "ssh", "ssh-keygen", "zstd", "mmdebstrap"}
    missing = apt_packages_missing(lambda name: f"/usr/bin/{name}" if name in here else None, lambda path: False)
    assert missing == ["debian-archive-keyring", "iptables", "lxc"]


def test_system_programs_are_found_after_a_plain_su() -> None:
    assert with_sbin("/usr/bin:/bin:/usr/sbin") == "/usr/bin:/bin:/usr/sbin:/usr/local/sbin:/sbin"


def test_nothing_is_missing_where_all_is_there() -> None:
    assert apt_packages_missing(lambda name: name, lambda path: True) == []


@pytest.mark.parametrize(
    ("route", "said"),
    [
        ({"dst": "10.0.0.0/8", "dev": "tun0"}, "10.0.0.0/8 dev tun0"),
        ({"dst": "10.201.7.128/25", "dev": "br-lan"}, "10.201.7.128/25 dev br-lan"),
        ({"dst": "10.201.7.9", "dev": "wg0"}, "10.201.7.9 dev wg0"),
        ({"dst": "10.201.7.0/24", "dev": "slabffffff"}, "10.201.7.0/24 dev slabffffff"),
        ({"dst": "10.201.7.0/24", "dev": "slab000001"}, None),
        ({"type": "local", "dst": "10.201.7.1", "dev": "slab000001"}, None),
        ({"dst": "default", "gateway": "192.0.2.1", "dev": "eth0"}, None),
        ({"dst": "10.201.8.0/24", "dev": "eth1"}, None),
        ({"dst": "fd00::/64", "dev": "eth0"}, None),
    ],
)
def test_a_route_overlaps_or_not(route: dict[str, str], said: str | None) -> None:
    assert overlapping_route("10.201.7.0/24", [route], "slab000001") == said


def test_a_resolver_on_the_loopback_is_replaced_by_the_one_it_asks() -> None:
    stub = "# managed by systemd-resolved\nnameserver 127.0.0.53\noptions edns0\nsearch example.org\n"
    uplink = "nameserver 192.0.2.53\nnameserver 2001:db8::53\n"
    assert nameservers(stub, uplink) == ["192.0.2.53", "2001:db8::53"]
    assert nameservers("nameserver 192.0.2.7\n", uplink) == ["192.0.2.7"]
    assert nameservers("nameserver 127.0.0.1\nnameserver ::1\n", "") == []


def test_pip_settings_that_mean_something_elsewhere() -> None:
    system = """[global]
index-url = https://mirror.example.org/simple
extra-index-url = file:///opt/pypi/simple
    https://second.example.org/simple
find-links = /opt/wheels
timeout = 15
"""
    user = "[install]\ntrusted-host = mirror.example.org\n[global]\ndefault-timeout = 60\n"
    assert pip_settings([system, user], {}) == {
        "index-url": "https://mirror.example.org/simple",
        "extra-index-url": "https://second.example.org/simple",
        "timeout": "60",
        "trusted-host": "mirror.example.org",
    }


def test_pips_environment_wins_and_local_directories_stay_here() -> None:
    environment = {
        "PIP_INDEX_URL": "http://cache.example.org/pypi",
        "PIP_DEFAULT_TIMEOUT": "180",
        "PIP_FIND_LINKS": "/opt/wheels",
        "PIP_EXTRA_INDEX_URL": "file:///opt/pypi/simple",
        "PIP_NO_CACHE_DIR": "1",
    }
    assert pip_settings(["[global]\nindex-url = https://pypi.example.org/simple\n"], environment) == {
        "index-url": "http://cache.example.org/pypi",
        "timeout": "180",
    }


def test_a_broken_pip_conf_is_passed_over() -> None:
    assert pip_settings(["index-url = no section", "[global]\nretries = 9\n"], {}) == {"retries": "9"}


def test_proxies_in_either_case() -> None:
    environment = {"HTTPS_PROXY": "http://proxy.example.org:3128", "no_proxy": "localhost", "http_proxy": ""}
    assert proxies(environment) == {"https_proxy": "http://proxy.example.org:3128", "no_proxy": "localhost"}
    assert proxies({"no_proxy": "localhost"}) == {}


def test_debians_archives_in_both_spellings() -> None:
    one_line = (
        "# deb http://old.example.org/debian x main\n"
        "deb [signed-by=/k.gpg] https://mirror.example.org/debian/ bookworm main\n"
    )
    deb822 = (
        "Types: deb\nURIs: http://security.example.org/debian-security\nSuites: bookworm-security\nComponents: main\n"
    )
    foreign = "deb http://apt.example.org/vendor stable main\n"
    assert debian_mirrors([foreign, one_line, deb822], is_debian=True) == {
        "main": "https://mirror.example.org/debian",
        "security": "http://security.example.org/debian-security",
    }


def test_another_systems_archives_are_not_debians() -> None:
    own = {"main": "http://deb.debian.org/debian", "security": "http://deb.debian.org/debian-security"}
    assert debian_mirrors(["deb http://archive.example.org/debian noble main"], is_debian=False) == own
    assert debian_mirrors([], is_debian=True) == own


def test_certificates_are_taken_one_by_one() -> None:
    one = "-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----"
    two = "-----BEGIN CERTIFICATE-----\nBBBB\n-----END CERTIFICATE-----"
    texts = [
        f"# a comment\n{one}\n{two}\n",
        one.replace("\n", "\r\n"),
        "-----BEGIN PRIVATE KEY-----\nxx\n-----END PRIVATE KEY-----",
    ]
    assert certificates(texts) == [one + "\n", two + "\n"]
