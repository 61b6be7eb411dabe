"""The patch is in the one stack and not in the other, goes to the byte, and never goes over what somebody edited."""

from __future__ import annotations

import base64
import csv
import hashlib

import pytest

PACKAGE = "/opt/servelab/stack/lib/python3.13/site-packages"
OTHER = "/srv/other/stack/lib/python3.13/site-packages"
# The play of converge.yml that is as the inventory says.
OWN = ("--tags", "own")
TASK = [("Open or close the custom allreduce for PCIe GPUs", "lab-gpu1")]


def edited(host, packages: str, release: str) -> set[str]:
    """The files of SGLang's allreduce that are not as the wheel brought them, by the wheel's own list of hashes."""
    record = host.check_output(f"cat {packages}/sglang-{release}.dist-info/RECORD")
    told = {
        row[0]: row[1] for row in csv.reader(record.splitlines()) if "device_communicators/custom_all_reduce" in row[0]
    }
    assert len(told) >= 2
    found = set()
    for path, wanted in told.items():
        digest = hashlib.sha256(host.file(f"{packages}/{path}").content).digest()
        if wanted != "sha256=" + base64.urlsafe_b64encode(digest).decode().rstrip("="):
            found.add(path.rsplit("/", 1)[-1])
    return found


def file(name: str) -> str:
    return f"{PACKAGE}/sglang/srt/distributed/device_communicators/{name}"


def test_the_patch_is_in_the_one_and_not_in_the_other(guest):
    assert edited(guest, PACKAGE, "0.5.23") >= {"custom_all_reduce_utils.py", "custom_all_reduce.py"}
    assert edited(guest, OTHER, "0.5.12") == set()
    assert "SGLANG_FORCE_CUSTOM_AR_PCIE" in guest.file(file("custom_all_reduce_utils.py")).content_string
    for name in ("custom_all_reduce_utils.py", "custom_all_reduce.py"):
        guest.check_output(f"python3 -m py_compile {file(name)}")


def test_the_patch_goes_to_the_byte_and_comes_again(play, guest):
    patched = guest.file(file("custom_all_reduce.py")).sha256sum
    checked = play(*OWN, "--check", "--diff", sglang_allreduce_state="absent")
    assert checked.changed == TASK
    assert guest.file(file("custom_all_reduce.py")).sha256sum == patched
    assert play(*OWN, sglang_allreduce_state="absent").changed == TASK
    assert edited(guest, PACKAGE, "0.5.23") == set()
    assert play(*OWN).changed == TASK
    assert guest.file(file("custom_all_reduce.py")).sha256sum == patched


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_file_that_somebody_edited_is_refused_and_kept(play, guest, state):
    path = file("custom_all_reduce_utils.py")
    guest.check_output(f"cp --preserve {path} /srv/other/kept && echo '# mine' >> {path}")
    before = guest.file(path).sha256sum
    try:
        played = play(*OWN, sglang_allreduce_state=state)
        assert not played.ok
        assert "custom_all_reduce_utils.py" in played.said
        assert played.changed == []
        assert guest.file(path).sha256sum == before
    finally:
        guest.check_output(f"mv /srv/other/kept {path}")


def test_a_release_of_unknown_form_is_refused_and_kept(play, guest):
    """The place where the patch belongs reads otherwise than in every release that is known."""
    path = f"{OTHER}/sglang/srt/distributed/device_communicators/custom_all_reduce.py"
    guest.check_output(f"cp --preserve {path} /srv/other/kept && sed -i 's/world_size/number_of_ranks/g' {path}")
    before = guest.file(path).sha256sum
    try:
        played = play(*OWN, sglang_allreduce_package_dir=f"{OTHER}/sglang", sglang_allreduce_state="present")
        assert not played.ok
        assert guest.file(path).sha256sum == before
        assert "number_of_ranks" in guest.file(path).content_string
    finally:
        guest.check_output(f"mv /srv/other/kept {path}")


def test_no_sglang_is_told_with_the_directory(play):
    played = play(*OWN, sglang_allreduce_package_dir="/nowhere/sglang")
    assert not played.ok
    assert "/nowhere/sglang" in played.said


def test_the_drop_in_forces_every_process_of_the_stack_and_goes_again(play, guest):
    dropin, python = f"{PACKAGE}/servelab_allreduce.pth", "/opt/servelab/stack/bin/python"
    said = f"{python} -c 'import os; print(os.environ.get(\"SGLANG_FORCE_CUSTOM_AR_PCIE\"))'"
    assert not guest.file(dropin).exists
    assert guest.check_output(said) == "None"
    # The other stack, too, which stays unpatched: there it has no effect.
    assert play(sglang_allreduce_sitecustomize=True).changed == [
        ("Set the variables in every process of the stack", "lab-gpu1")
    ]
    assert guest.check_output(said) == "1"
    assert guest.check_output(f"SGLANG_FORCE_CUSTOM_AR_PCIE=0 {said}") == "0"
    assert play(*OWN, sglang_allreduce_sitecustomize=True).changed == []
    assert play(*OWN).changed == [("Set them in none", "lab-gpu1")]
    assert not guest.file(dropin).exists


def test_somebody_elses_drop_in_is_kept(play, guest):
    dropin = f"{PACKAGE}/servelab_allreduce.pth"
    guest.check_output(f"echo '# mine' > {dropin}")
    try:
        played = play(*OWN, sglang_allreduce_sitecustomize=True)
        assert not played.ok
        assert "is not ours and is kept" in played.said
        assert play(*OWN).changed == []
        assert guest.file(dropin).content_string == "# mine\n"
    finally:
        guest.check_output(f"rm {dropin}")
