"""The inventory's stack behind its link; what cannot be installed is refused, and the link in use is not touched."""

from __future__ import annotations

import re

import pytest
from stacks import LINK, OWN_LOCK, VALIDATE, assert_holds, cut_off, stack_of


@pytest.fixture(autouse=True)
def _elsewhere(guest):
    """A place for what tests put beside the stack."""
    guest.check_output("mkdir -p /srv/other")
    yield
    guest.check_output("rm -rf /srv/other")


def test_the_link_names_the_real_wheel_alone_of_its_lock(guest):
    assert_holds(guest, "0.5.23")


def test_a_link_moved_by_hand_is_found_and_alone_moved_back(play, guest):
    directory = stack_of(guest)
    guest.check_output(f"ln -sfn /srv/other {LINK}")
    repair = [("Use this stack", "lab-gpu1")]
    assert play("--check", "--diff").changed == repair
    assert stack_of(guest) == "/srv/other"
    assert play("--diff").changed == repair
    assert stack_of(guest) == directory


def test_without_a_network_nothing_changes(play, guest):
    with cut_off(guest):
        played = play()
    assert played.ok, played.said
    assert played.changed == []


def test_wrong_settings_are_told_at_once_and_before_anything_changes(play, guest):
    before = stack_of(guest)
    played = play(sglang_version="0.4.0", sglang_env_wheelhouse="wheels", sglang_env_python="python3.9")
    assert not played.ok
    assert "sglang_version is 0.4.0, but the supported releases are 0.5.12, 0.5.15, 0.5.23." in played.said
    assert "Before 0.5.11 SGLang is CUDA 12 on PyPI: it needs a lock made with the cu130 indexes" in played.said
    assert "sglang_env_wheelhouse is wheels, but must be an absolute path in the guest." in played.said
    assert "sglang_env_python is python3.9, but no such Python is on lab-gpu1." in played.said
    assert played.changed == []
    assert stack_of(guest) == before
    assert [name for name in guest.file("/opt/servelab/stacks").listdir() if name.startswith("0.4")] == []


def test_an_old_release_without_cuda_13_is_refused(play, guest, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text(OWN_LOCK.read_text().replace("+cu130", ""))
    old = {"sglang_version": "0.5.10", "sglang_env_lock": str(plain)}
    for played in (play(playbook=VALIDATE, **old), play(**old)):
        assert not played.ok
        assert f"sglang_env_lock is {plain}, which locks torch 2.9.1, but before 0.5.11" in played.said
        assert played.changed == []
    played = play(playbook=VALIDATE, sglang_version="0.5.10")
    assert "Before 0.5.11 SGLang is CUDA 12 on PyPI: it needs a lock made with the cu130 indexes" in played.said


def test_a_lock_for_another_python_is_refused(play, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(OWN_LOCK.read_text().replace("# python: 3.13", "# python: 3.11"))
    played = play(sglang_version="0.5.10", sglang_env_lock=str(other))
    assert not played.ok
    assert f"{other}, which is for Python 3.11, but python3 on lab-gpu1 is Python 3.13; make the lock" in played.said
    assert played.changed == []


def test_a_python_without_a_lock_is_refused(play, guest):
    guest.check_output("printf '#!/bin/sh\\necho 3.10\\n' > /srv/other/python && chmod +x /srv/other/python")
    played = play(sglang_env_python="/srv/other/python")
    assert not played.ok
    assert "sglang_env_python is Python 3.10, but SGLang 0.5.23 is locked for Python 3.11, 3.12, 3.13" in played.said


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(play, guest):
    guest.check_output("mkdir -p /srv/other/small && mount -t tmpfs -o size=1m none /srv/other/small")
    try:
        played = play(sglang_env_stacks_dir="/srv/other/small/stacks")
        assert not played.ok
        assert "needs 400 MiB in /srv/other/small/stacks, but only 1 MiB are free" in played.said
        # And the full one, of which the lock says how much is fetched: 4320 MB, kept and unpacked.
        played = play(sglang_env_stacks_dir="/srv/other/small/stacks", sglang_env_profile="full")
        assert not played.ok
        assert re.search(r"SGLang 0\.5\.23 \(full\) needs [12][0-9]{4} MiB in /srv/other/small/stacks", played.said)
        assert guest.file("/srv/other/small").listdir() == []
    finally:
        guest.check_output("umount /srv/other/small")


def test_a_directory_in_the_links_place_is_refused(play, guest):
    guest.check_output("mkdir /srv/other/busy")
    played = play(sglang_env_current="/srv/other/busy")
    assert not played.ok
    assert "/srv/other/busy is not a link, so it cannot be moved to another stack" in played.said
    assert guest.file("/srv/other/busy").is_directory
