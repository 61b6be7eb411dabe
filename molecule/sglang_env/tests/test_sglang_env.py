"""Two stacks, each behind its link, and a third without a network; what cannot be installed is refused and the link in
use is not touched."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

# Release, link, and the directory of all stacks.
STACKS = [
    ("0.5.23", "/opt/servelab/stack", "/opt/servelab/stacks"),
    ("0.5.12", "/srv/other/stack", "/srv/other/stacks"),
]
# The plays of converge.yml.
OWN, OTHER = ("--tags", "own"), ("--tags", "other")
LINK, OTHER_LINK = STACKS[0][1], STACKS[1][1]
# What the guest sees of the controller's cache; prepare.yml filled it with 0.5.15 and the toolchain.
WHEELHOUSE = "/var/cache/servelab-lab/wheelhouse"
OWN_LOCK = str(Path(__file__).resolve().parent.parent / "files/0.5.10-py3.13.txt")
VALIDATE = Path(__file__).resolve().parents[3] / "playbooks/validate.yml"


def stack_of(guest, link):
    return guest.check_output(f"readlink {link}")


@pytest.fixture
def cut_off(guest):
    """The guest without a way out; ssh from the lab's own network still works."""
    route = guest.check_output("ip route show default").splitlines()[0]
    guest.check_output("ip route del default")
    try:
        assert guest.run("python3 -m pip download --no-deps --dest /tmp/none --timeout 2 --retries 0 six").rc != 0
        yield
    finally:
        guest.check_output(f"ip route add {route}")


@pytest.mark.parametrize(("release", "link", "directory"), STACKS)
def test_the_link_names_the_real_wheel(guest, release, link, directory):
    assert re.fullmatch(rf"{directory}/{re.escape(release)}-light-[0-9a-f]{{8}}", stack_of(guest, link))
    metadata = guest.check_output(f"cat {link}/lib/python3.13/site-packages/sglang-{release}.dist-info/METADATA")
    assert "\nName: sglang\n" in metadata
    assert f"\nVersion: {release}\n" in metadata


@pytest.mark.parametrize(("release", "link", "directory"), STACKS)
def test_it_is_light_and_locked(guest, release, link, directory):
    packages = guest.file(f"{link}/lib/python3.13/site-packages").listdir()
    assert "sglang" in packages
    assert not {"torch", "flashinfer", "transformers"} & set(packages)
    wanted = json.loads(guest.file(f"{link}/servelab-proof.json").content_string)["wanted"]
    assert (wanted["sglang"], wanted["profile"], wanted["python"]) == (release, "light", "3.13")
    lock = guest.file(f"{link}/servelab-lock.txt").content_string
    assert re.search(rf"(?m)^sglang=={re.escape(release)} \\\n    --hash=sha256:[0-9a-f]{{64}}$", lock)
    assert lock.count("==") == lock.count("sglang==") + lock.count(
        "# requirement: cuda-toolkit[nvcc,cccl,cudart]==13.0"
    ) + (lock.count("# requirement: nvidia-") + lock.count("# override: "))


def test_the_packages_that_were_asked_for_are_there(guest):
    assert guest.package("patch").is_installed


def test_a_link_moved_by_hand_is_found_and_alone_moved_back(play, guest):
    directory = stack_of(guest, LINK)
    guest.check_output(f"ln -sfn /srv/other/stack {LINK}")
    repair = [("Use this stack", "lab-gpu1")]
    assert play(*OWN, "--check", "--diff").changed == repair
    assert stack_of(guest, LINK) == "/srv/other/stack"
    assert play(*OWN, "--diff").changed == repair
    assert stack_of(guest, LINK) == directory


def test_a_stack_that_is_another_release_is_not_used(play, guest):
    """Somebody installed another one in it by hand."""
    directory = stack_of(guest, OTHER_LINK)
    version = f"{directory}/lib/python3.13/site-packages/sglang/_version.py"
    guest.check_output(f"cp --preserve {version} /srv/other/kept && sed -i 's/0\\.5\\.12/0.5.15/' {version}")
    guest.check_output("ln -sfn /srv/other/nowhere /srv/other/stack")
    try:
        played = play(*OTHER)
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
        played = play(*OTHER)
        assert not played.ok
        assert "must not be used. sglang 0.5.12.post1 is installed, but 0.5.12 is locked." in played.said
    finally:
        guest.check_output(f"mv {site}/sglang-0.5.12.post1.dist-info {site}/sglang-0.5.12.dist-info")


def test_without_a_network_nothing_changes(play, cut_off):
    played = play()
    assert played.ok, played.said
    assert played.changed == []


def test_an_upgrade_and_a_way_back_without_a_network(play, guest, cut_off):
    """From the wheelhouse; the old stack stays, and going back is the link alone. What runs from a stack keeps it."""
    before = stack_of(guest, LINK)
    guest.check_output(
        f"systemd-run --quiet --unit=servelab-test-old {before}/bin/python -c 'import time; time.sleep(900)'"
    )
    try:
        there = play(*OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
        assert there.ok, there.said
        new = stack_of(guest, LINK)
        assert re.fullmatch(r"/opt/servelab/stacks/0\.5\.15-light-[0-9a-f]{8}", new)
        assert guest.file(f"{new}/lib/python3.13/site-packages/sglang").is_directory
        # The process of the old stack still is one: its Python, its modules.
        assert guest.service("servelab-test-old").is_running
        assert guest.run(f"{before}/bin/python -c 'import sys; print(sys.prefix)'").stdout.strip() == before
        back = play(*OWN)
        assert back.changed == [("Use this stack", "lab-gpu1")]
        assert stack_of(guest, LINK) == before
    finally:
        guest.run("systemctl stop servelab-test-old")


def test_a_wheel_that_was_tampered_with_is_named(play, guest):
    before = stack_of(guest, LINK)
    guest.check_output("rm -rf /opt/servelab/stacks/0.5.15-*")
    guest.check_output(f"mkdir -p /srv/other/bad && cp {WHEELHOUSE}/sglang-0.5.15-*.whl /srv/other/bad/")
    guest.check_output("for wheel in /srv/other/bad/*.whl; do printf x >> $wheel; done")
    played = play(*OWN, sglang_version="0.5.15", sglang_env_wheelhouse="/srv/other/bad")
    assert not played.ok
    assert "sglang==0.5.15 from file:///srv/other/bad/sglang-0.5.15-cp313" in played.said
    assert re.search(r"is not what was locked: its sha256 is [0-9a-f]{64}, and [0-9a-f]{64} was expected", played.said)
    assert "/opt/servelab/stack was not touched" in played.said
    assert stack_of(guest, LINK) == before


def test_an_interrupted_installation_is_completed(play, guest):
    """The failed run above left a venv. Half a package more, and still no proof: nothing of it is believed."""
    before = stack_of(guest, LINK)
    directory = guest.check_output("ls -d /opt/servelab/stacks/0.5.15-light-*")
    half = f"{directory}/lib/python3.13/site-packages/sglang-0.5.15.dist-info"
    guest.check_output(f"mkdir -p {half} && printf 'Name: sglang\\nVersion: 0.5.15\\n' > {half}/METADATA")
    played = play(*OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
    assert played.ok, played.said
    assert stack_of(guest, LINK) == directory
    assert guest.file(f"{LINK}/lib/python3.13/site-packages/sglang/srt").is_directory
    assert guest.file(f"{half}/RECORD").exists
    assert play(*OWN).changed == [("Use this stack", "lab-gpu1")]
    assert stack_of(guest, LINK) == before


def test_constraints_of_the_machine_do_not_bind_a_lock(play, guest):
    """Somebody's pip.conf keeps SGLang old; a lock is exact, and pip alone would refuse it."""
    guest.check_output("rm -rf /opt/servelab/stacks/0.5.15-* && mkdir -p /root/.config/pip")
    guest.check_output("echo 'sglang<0.5' > /srv/other/constraints.txt")
    guest.check_output("printf '[global]\\nconstraint = /srv/other/constraints.txt\\n' > /root/.config/pip/pip.conf")
    try:
        played = play(*OWN, sglang_version="0.5.15", sglang_env_wheelhouse=WHEELHOUSE)
        assert played.ok, played.said
        assert "/0.5.15-light-" in stack_of(guest, LINK)
    finally:
        guest.check_output("rm -r /root/.config/pip")
    assert play(*OWN).changed == [("Use this stack", "lab-gpu1")]


def test_wrong_settings_are_told_at_once_and_before_anything_changes(play, guest):
    before = stack_of(guest, LINK)
    played = play(*OWN, sglang_version="0.4.0", sglang_env_wheelhouse="wheels", sglang_env_python="python3.9")
    assert not played.ok
    assert "sglang_version is 0.4.0, but the supported releases are 0.5.12, 0.5.15, 0.5.23." in played.said
    assert "Before 0.5.11 SGLang is CUDA 12 on PyPI: it needs a lock made with the cu130 indexes" in played.said
    assert "sglang_env_wheelhouse is wheels, but must be an absolute path in the guest." in played.said
    assert "sglang_env_python is python3.9, but no such Python is on lab-gpu1." in played.said
    assert played.changed == []
    assert stack_of(guest, LINK) == before
    assert [name for name in guest.file("/opt/servelab/stacks").listdir() if name.startswith("0.4")] == []


def test_an_old_release_comes_with_a_lock_of_ones_own(play, guest):
    """Through the inventory's check too, which is the first thing that site.yml does."""
    before = stack_of(guest, LINK)
    old = {"sglang_version": "0.5.10", "sglang_env_lock": OWN_LOCK}
    checked = play(playbook=VALIDATE, **old)
    assert checked.ok, checked.said
    played = play(*OWN, **old)
    assert played.ok, played.said
    directory = stack_of(guest, LINK)
    assert re.fullmatch(r"/opt/servelab/stacks/0\.5\.10-light-[0-9a-f]{8}", directory)
    metadata = guest.check_output(f"cat {LINK}/lib/python3.13/site-packages/sglang-0.5.10.dist-info/METADATA")
    assert "\nVersion: 0.5.10\n" in metadata
    assert play(*OWN, **old).changed == []
    assert play(*OWN).changed == [("Use this stack", "lab-gpu1")]
    assert stack_of(guest, LINK) == before
    guest.check_output(f"rm -r {directory}")


def test_an_old_release_without_cuda_13_is_refused(play, guest, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text(Path(OWN_LOCK).read_text().replace("+cu130", ""))
    old = {"sglang_version": "0.5.10", "sglang_env_lock": str(plain)}
    for played in (play(playbook=VALIDATE, **old), play(*OWN, **old)):
        assert not played.ok
        assert f"sglang_env_lock is {plain}, which locks torch 2.9.1, but before 0.5.11" in played.said
        assert played.changed == []
    played = play(playbook=VALIDATE, sglang_version="0.5.10")
    assert "Before 0.5.11 SGLang is CUDA 12 on PyPI: it needs a lock made with the cu130 indexes" in played.said


def test_a_lock_for_another_python_is_refused(play, tmp_path):
    other = tmp_path / "other.txt"
    other.write_text(Path(OWN_LOCK).read_text().replace("# python: 3.13", "# python: 3.11"))
    played = play(*OWN, sglang_version="0.5.10", sglang_env_lock=str(other))
    assert not played.ok
    assert f"{other}, which is for Python 3.11, but python3 on lab-gpu1 is Python 3.13; make the lock" in played.said
    assert played.changed == []


def test_a_python_without_a_lock_is_refused(play, guest):
    guest.check_output("printf '#!/bin/sh\\necho 3.10\\n' > /srv/other/python && chmod +x /srv/other/python")
    played = play(*OWN, sglang_env_python="/srv/other/python")
    assert not played.ok
    assert "sglang_env_python is Python 3.10, but SGLang 0.5.23 is locked for Python 3.11, 3.12, 3.13" in played.said


def test_a_disk_that_is_too_small_is_refused_before_the_first_byte(play, guest):
    guest.check_output("mkdir -p /srv/other/small && mount -t tmpfs -o size=1m none /srv/other/small")
    try:
        played = play(*OWN, sglang_env_stacks_dir="/srv/other/small/stacks")
        assert not played.ok
        assert "needs 400 MiB in /srv/other/small/stacks, but only 1 MiB are free" in played.said
        # And the full one, of which the lock says how much is fetched: 4320 MB, kept and unpacked.
        played = play(*OWN, sglang_env_stacks_dir="/srv/other/small/stacks", sglang_env_profile="full")
        assert not played.ok
        assert re.search(r"SGLang 0\.5\.23 \(full\) needs [12][0-9]{4} MiB in /srv/other/small/stacks", played.said)
        assert guest.file("/srv/other/small").listdir() == []
    finally:
        guest.check_output("umount /srv/other/small")


def test_a_directory_in_the_links_place_is_refused(play, guest):
    guest.check_output("mkdir /srv/other/busy")
    played = play(*OWN, sglang_env_current="/srv/other/busy")
    assert not played.ok
    assert "/srv/other/busy is not a link, so it cannot be moved to another stack" in played.said
    assert guest.file("/srv/other/busy").is_directory
