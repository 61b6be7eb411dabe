"""An older stack elsewhere; others come from a wheelhouse without a network, and what is not as locked is not used."""

from __future__ import annotations

import re

import pytest
from conftest import ROOT
from stacks import LINK, OWN_LOCK, VALIDATE, assert_holds, cut_off, stack_of

OTHER_LINK = "/srv/other/stack"
# The inventory's stack, which tests replace and bring back.
OWN = ROOT / "molecule/sglang_env/converge.yml"
# What the guest sees of the controller's cache; prepare.yml filled it with 0.5.15 and the toolchain.
WHEELHOUSE = "/var/cache/servelab-lab/wheelhouse"


@pytest.fixture
def without_a_network(guest):
    with cut_off(guest):
        yield


def test_the_link_names_the_real_wheel_alone_of_its_lock(guest):
    assert_holds(guest, "0.5.12", OTHER_LINK, "/srv/other/stacks")


def test_the_packages_that_were_asked_for_are_there(guest):
    assert guest.package("patch").is_installed


def test_a_stack_that_is_another_release_is_not_used(play, guest):
    """Somebody installed another one in it by hand."""
    directory = stack_of(guest, OTHER_LINK)
    version = f"{directory}/lib/python3.13/site-packages/sglang/_version.py"
    guest.check_output(f"cp --preserve {version} /srv/other/kept && sed -i 's/0\\.5\\.12/0.5.15/' {version}")
    guest.check_output("ln -sfn /srv/other/nowhere /srv/other/stack")
    try:
        played = play()
        assert not played.ok
        assert f"{directory} should hold SGLang 0.5.12, but holds 0.5.15" in played.said
        assert "remove that directory and run again. /srv/other/stack was not touched." in played.said
        assert stack_of(guest, OTHER_LINK) == "/srv/other/nowhere"
    finally:
        guest.check_output(f"mv /srv/other/kept {version}")
        guest.check_output(f"ln -sfn {directory} /srv/other/stack")


def test_a_stack_that_differs_from_its_lock_is_not_used(play, guest):
    """Its metadata says another version: pip was used in it by hand."""
    directory = stack_of(guest, OTHER_LINK)
    site = f"{directory}/lib/python3.13/site-packages"
    guest.check_output(f"mv {site}/sglang-0.5.12.dist-info {site}/sglang-0.5.12.post1.dist-info")
    try:
        played = play()
        assert not played.ok
        assert "must not be used. sglang 0.5.12.post1 is installed, but 0.5.12 is locked." in played.said
    finally:
        guest.check_output(f"mv {site}/sglang-0.5.12.post1.dist-info {site}/sglang-0.5.12.dist-info")


def test_an_upgrade_and_a_way_back_without_a_network(play, guest, without_a_network):
    """From the wheelhouse; the old stack stays, and going back is the link alone. What runs from a stack keeps it."""
    before = stack_of(guest)
    guest.check_output(
        f"systemd-run --quiet --unit=servelab-test-old {before}/bin/python -c 'import time; time.sleep(900)'"
    )
    try:
        there = play(playbook=OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
        assert there.ok, there.said
        new = stack_of(guest)
        assert re.fullmatch(r"/opt/servelab/stacks/0\.5\.15-light-[0-9a-f]{8}", new)
        assert guest.file(f"{new}/lib/python3.13/site-packages/sglang").is_directory
        # The process of the old stack still is one: its Python, its modules.
        assert guest.service("servelab-test-old").is_running
        assert guest.run(f"{before}/bin/python -c 'import sys; print(sys.prefix)'").stdout.strip() == before
        back = play(playbook=OWN)
        assert back.changed == [("Use this stack", "lab-gpu1")]
        assert stack_of(guest) == before
    finally:
        guest.run("systemctl stop servelab-test-old")


def test_a_wheel_that_was_tampered_with_is_named(play, guest):
    before = stack_of(guest)
    guest.check_output("rm -rf /opt/servelab/stacks/0.5.15-*")
    guest.check_output(f"mkdir -p /srv/other/bad && cp {WHEELHOUSE}/sglang-0.5.15-*.whl /srv/other/bad/")
    guest.check_output("for wheel in /srv/other/bad/*.whl; do printf x >> $wheel; done")
    played = play(playbook=OWN, sglang_version="0.5.15", sglang_env_wheelhouse="/srv/other/bad")
    assert not played.ok
    assert "sglang==0.5.15 from file:///srv/other/bad/sglang-0.5.15-cp313" in played.said
    assert re.search(r"is not what was locked: its sha256 is [0-9a-f]{64}, and [0-9a-f]{64} was expected", played.said)
    assert "/opt/servelab/stack was not touched" in played.said
    assert stack_of(guest) == before


def test_an_interrupted_installation_is_completed(play, guest):
    """The failed run above left a venv. Half a package more, and still no proof: nothing of it is believed."""
    before = stack_of(guest)
    directory = guest.check_output("ls -d /opt/servelab/stacks/0.5.15-light-*")
    half = f"{directory}/lib/python3.13/site-packages/sglang-0.5.15.dist-info"
    guest.check_output(f"mkdir -p {half} && printf 'Name: sglang\\nVersion: 0.5.15\\n' > {half}/METADATA")
    played = play(playbook=OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
    assert played.ok, played.said
    assert stack_of(guest) == directory
    assert guest.file(f"{LINK}/lib/python3.13/site-packages/sglang/srt").is_directory
    assert guest.file(f"{half}/RECORD").exists
    assert play(playbook=OWN).changed == [("Use this stack", "lab-gpu1")]
    assert stack_of(guest) == before


def test_constraints_of_the_machine_do_not_bind_a_lock(play, guest):
    """Somebody's pip.conf keeps SGLang old; a lock is exact, and pip alone would refuse it."""
    guest.check_output("rm -rf /opt/servelab/stacks/0.5.15-* && mkdir -p /root/.config/pip")
    guest.check_output("echo 'sglang<0.5' > /srv/other/constraints.txt")
    guest.check_output("printf '[global]\\nconstraint = /srv/other/constraints.txt\\n' > /root/.config/pip/pip.conf")
    try:
        played = play(playbook=OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
        assert played.ok, played.said
        assert "/0.5.15-light-" in stack_of(guest)
    finally:
        guest.check_output("rm -r /root/.config/pip")
    assert play(playbook=OWN).changed == [("Use this stack", "lab-gpu1")]


def test_an_old_release_comes_with_a_lock_of_ones_own(play, guest):
    """Through the inventory's check too, which is the first thing that site.yml does."""
    before = stack_of(guest)
    old = {"sglang_version": "0.5.10", "sglang_env_lock": str(OWN_LOCK)}
    checked = play(playbook=VALIDATE, **old)
    assert checked.ok, checked.said
    played = play(playbook=OWN, **old)
    assert played.ok, played.said
    directory = stack_of(guest)
    assert re.fullmatch(r"/opt/servelab/stacks/0\.5\.10-light-[0-9a-f]{8}", directory)
    metadata = guest.check_output(f"cat {LINK}/lib/python3.13/site-packages/sglang-0.5.10.dist-info/METADATA")
    assert "\nVersion: 0.5.10\n" in metadata
    assert play(playbook=OWN, **old).changed == []
    assert play(playbook=OWN).changed == [("Use this stack", "lab-gpu1")]
    assert stack_of(guest) == before
    guest.check_output(f"rm -r {directory}")
