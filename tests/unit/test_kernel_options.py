"""Kernel options for both boot loaders: added, kept, taken back, and what is somebody else's left alone."""

from __future__ import annotations

import subprocess

import pytest

from servelab.shared.kernel_options import conflicts, edit_line, grub_file, missing, option_errors

LINE = "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n"


def test_words_are_added_once_and_taken_back_without_a_trace():
    text, ours = edit_line(LINE, ["iommu=pt", "pcie_aspm=off"], [])
    assert text == "root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu=pt pcie_aspm=off\n"
    assert edit_line(text, ["iommu=pt", "pcie_aspm=off"], ours) == (text, ours)
    text, ours = edit_line(text, ["iommu=pt"], ours)
    assert (text, ours) == ("root=ZFS=rpool/ROOT/pve-1 boot=zfs iommu=pt\n", ["iommu=pt"])
    assert edit_line(text, [], ours) == (LINE, [])


def test_a_word_that_was_there_before_stays_there_afterwards():
    by_hand = LINE.replace("\n", " iommu=pt\n")
    text, ours = edit_line(by_hand, ["iommu=pt", "pcie_aspm=off"], [])
    assert ours == ["pcie_aspm=off"]
    assert edit_line(text, [], ours) == (by_hand, [])


def test_a_word_that_somebody_took_away_comes_back_and_is_ours():
    assert edit_line(LINE, ["iommu=pt"], ["iommu=pt"])[0] == LINE.replace("\n", " iommu=pt\n")


@pytest.mark.parametrize("line", ["root=/dev/sda1", "root=/dev/sda1   quiet\n", ""])
def test_a_line_that_needs_nothing_is_left_byte_for_byte(line):
    assert edit_line(line, [], [])[0] == line


def test_grub_reads_what_is_written(tmp_path):
    (tmp_path / "grub").write_text('GRUB_CMDLINE_LINUX_DEFAULT="quiet splash"\n')
    (tmp_path / "zz.cfg").write_text(grub_file(["iommu=pt", "pci=noacs,nomsi"]) or "")
    script = f'. {tmp_path}/grub; . {tmp_path}/zz.cfg; printf %s "$GRUB_CMDLINE_LINUX_DEFAULT"'
    said = subprocess.run(["sh", "-c", script], capture_output=True, text=True, check=True).stdout
    assert said == "quiet splash iommu=pt pci=noacs,nomsi"
    assert grub_file([]) is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["iommu=pt quiet"], "'iommu=pt quiet' is no option"),
        (["iommu=pt; reboot"], "is no option"),
        (['x="$(id)"'], "is no option"),
        (["iommu=pt", "iommu=off"], "iommu=pt and iommu=off contradict each other"),
    ],
)
def test_what_is_no_option_is_refused(options, words):
    assert words in " ".join(option_errors(options))


def test_good_options_are_not_refused():
    assert option_errors(["iommu=pt", "pcie_aspm=off", "quiet", "console=tty0", "console=ttyS0,115200n8"]) == []


def test_contradictions_with_what_is_there():
    assert "iommu=soft is on the command line already" in " ".join(conflicts(["iommu=pt"], "quiet iommu=soft"))
    assert conflicts(["iommu=pt"], "intel_iommu=on iommu=pt console=tty0") == []
    # One of ours is replaced, not complained about.
    assert conflicts(["iommu=off"], "iommu=pt", ["iommu=pt"]) == []
    assert edit_line("a iommu=pt\n", ["iommu=off"], ["iommu=pt"])[0] == "a iommu=off\n"


def test_what_the_running_kernel_lacks():
    assert missing(["iommu=pt", "pcie_aspm=off"], "BOOT_IMAGE=/x iommu=pt quiet") == ["pcie_aspm=off"]
