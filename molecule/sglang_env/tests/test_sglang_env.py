"""Two stacks, each behind its link; what cannot be installed is refused and the link in use is not touched."""

from __future__ import annotations

import json

import pytest

STACKS = [
    ("0.5.23", "/opt/servelab/stack", "/opt/servelab/stacks/0.5.23-light"),
    ("0.5.12", "/srv/other/stack", "/srv/other/stacks/0.5.12-light"),
]


@pytest.mark.parametrize(("release", "link", "directory"), STACKS)
def test_the_link_names_the_real_wheel(guest, release, link, directory):
    assert guest.check_output(f"readlink {link}") == directory
    metadata = guest.check_output(f"cat {link}/lib/python3.13/site-packages/sglang-{release}.dist-info/METADATA")
    assert "\nName: sglang\n" in metadata
    assert f"\nVersion: {release}\n" in metadata


@pytest.mark.parametrize(("release", "link", "directory"), STACKS)
def test_it_is_light(guest, release, link, directory):
    packages = guest.file(f"{directory}/lib/python3.13/site-packages").listdir()
    assert "sglang" in packages
    assert not {"torch", "flashinfer", "transformers"} & set(packages)
    assert json.loads(guest.file(f"{directory}/servelab-proof.json").content_string) == {
        "sglang": release,
        "profile": "light",
        "python": "3.13",
    }


def test_the_packages_that_were_asked_for_are_there(guest):
    assert guest.package("patch").is_installed


def test_a_link_moved_by_hand_is_found_and_alone_moved_back(play, guest):
    _release, link, directory = STACKS[0]
    guest.check_output(f"ln -sfn /srv/other/stack {link}")
    repair = [("Use this stack", "lab-gpu1")]
    assert play("--check", "--diff").changed == repair
    assert guest.check_output(f"readlink {link}") == "/srv/other/stack"
    assert play("--diff").changed == repair
    assert guest.check_output(f"readlink {link}") == directory


def test_a_stack_that_is_another_release_is_not_used(play, guest):
    """Somebody installed another one in it by hand."""
    directory = STACKS[1][2]
    version = f"{directory}/lib/python3.13/site-packages/sglang/_version.py"
    guest.check_output(f"cp --preserve {version} /srv/other/kept && sed -i 's/0\\.5\\.12/0.5.15/' {version}")
    guest.check_output("ln -sfn /srv/other/nowhere /srv/other/stack")
    try:
        played = play()
        assert not played.ok
        assert f"{directory} should hold SGLang 0.5.12, but holds 0.5.15" in played.said
        assert "remove that directory and run again. /srv/other/stack was not touched." in played.said
        assert guest.check_output("readlink /srv/other/stack") == "/srv/other/nowhere"
    finally:
        guest.check_output(f"mv /srv/other/kept {version}")
        guest.check_output(f"ln -sfn {directory} /srv/other/stack")


def test_wrong_settings_are_told_at_once_and_before_anything_changes(play, guest):
    played = play(sglang_version="0.4.0", sglang_env_profile="full", sglang_env_python="python3.9")
    assert not played.ok
    assert "sglang_version is 0.4.0, but the supported releases are " in played.said
    assert "0.5.12" in played.said and "0.5.23" in played.said
    assert "sglang_env_profile is full, which this version cannot install yet" in played.said
    assert "sglang_env_python is python3.9, but no such Python is on lab-gpu1." in played.said
    assert played.changed == []
    assert guest.check_output(f"readlink {STACKS[0][1]}") == STACKS[0][2]
    assert [name for name in guest.file("/opt/servelab/stacks").listdir() if name.startswith("0.4")] == []


def test_a_directory_in_the_links_place_is_refused(play, guest):
    guest.check_output("mkdir /srv/other/busy")
    played = play(sglang_env_current="/srv/other/busy")
    assert not played.ok
    assert "/srv/other/busy is not a link, so it cannot be moved to another stack" in played.said
    assert guest.file("/srv/other/busy").is_directory
