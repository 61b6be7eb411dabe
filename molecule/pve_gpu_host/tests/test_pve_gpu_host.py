"""The audit tells good nodes from bad and calls unknown what it cannot see; changes come, survive a boot, and go."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

KEEP = "Keep the audit for what follows"
MODPROBE = "/etc/modprobe.d/servelab-nvidia.conf"
GRUB = "/etc/default/grub.d/zz-servelab.cfg"
UNITS = ["servelab-gpu-nodes.service", "servelab-acs.service"]
# Parts of converge.yml that are enough for many tests: its first play, and of the role in it the audit alone.
ROLE, AUDIT = ("--skip-tags", "alternative"), ("--tags", "pve_gpu_host_audit")


def findings(result: dict) -> dict[str, dict]:
    return {finding["check"]: finding for finding in result["ansible_facts"]["pve_gpu_host_audit"]["findings"]}


@pytest.fixture(scope="module")
def played(play):
    return play("--diff")


def test_the_node_is_good_and_nothing_changes(played):
    assert played.ok
    assert played.changed == []
    audit = played.results[KEEP][0]["ansible_facts"]["pve_gpu_host_audit"]
    # Simulated cards have no place in the kernel, which shows nothing about IOMMU, ACS and the like; that is not "ok".
    assert {name: finding["status"] for name, finding in findings(played.results[KEEP][0]).items()} == {
        "kernel driver": "ok",
        "driver flavour": "ok",
        "device nodes": "ok",
        "nodes at boot": "ok",
        "GPUs": "ok",
        "persistence": "ok",
        "PCIe link": "ok",
        "BAR1": "ok",
        "topology": "ok",
        "P2P status": "ok",
        "peer mapping": "unknown",
        "IOMMU": "unknown",
        "ACS": "unknown",
        "HMM": "unknown",
        "ASPM": "unknown",
    }
    assert audit["driver_version"] == "580.95.05"
    assert [gpu["index"] for gpu in audit["gpus"]] == list(range(8))
    assert {gpu["memory_total_mib"] for gpu in audit["gpus"]} == {97887}


def test_the_topology_has_two_islands(played):
    topology = played.results[KEEP][0]["ansible_facts"]["pve_gpu_host_audit"]["topology"]
    assert "2 NUMA islands (0-3; 4-7)" in findings(played.results[KEEP][0])["topology"]["found"]
    assert topology


def test_another_purpose_finds_another_verdict_and_goes_on(played):
    found = findings(played.results[KEEP][1])
    assert played.results[KEEP][1]["ansible_facts"]["pve_gpu_host_audit"]["status"] == "fail"
    assert found["kernel driver"]["status"] == "fail"
    assert found["kernel driver"]["found"] == "580.95.05"
    assert found["kernel driver"]["right"] == "590.44.01 or newer"
    assert found["GPUs"]["status"] == "fail"
    assert "GPU-00000000-0000-0000-0000-000000000000" in json.dumps(found["GPUs"])
    assert found["device nodes"]["status"] == "ok"


def test_a_missing_card_stops_the_play_with_the_remedy(play):
    played = play(*AUDIT, pve_gpu_host_expected_gpus=9)
    assert not played.ok
    assert played.said.startswith("lab-pve1 cannot give its GPUs away as it is: GPUs: 8 x NVIDIA RTX PRO 6000")
    assert "(right: 9 GPUs). Remedy: " in played.said
    assert "(pve_gpu_host_audit_fatal=false goes on all the same.)" in played.said


# Failure of the switchboard, the check that finds it, and what it finds.
@pytest.mark.parametrize(
    ("name", "check", "found"),
    [
        ("smi_hang", "GPUs", "nvidia-smi did not answer within 2"),
        ("no_devices", "GPUs", "the driver is loaded, but this"),
        ("no_driver", "GPUs", "driver"),
        ("driver_mismatch", "GPUs", "version"),
        ("off_the_bus", "GPUs", "a GPU has fallen off the bus"),
        ("needs_reset", "GPUs", "GPU 3: needs-reset"),
        ("unreadable", "GPUs", "GPU 3: error"),
        ("uvm_missing", "device nodes", "missing: nvidia-uvm, nvidia-uvm-tools"),
        ("node_is_file", "device nodes", "nvidia3 is a regular file"),
    ],
)
def test_a_failure_is_found_and_stops_the_play_with_its_remedy(play, fault, name, check, found):
    with fault(name):
        played = play(*AUDIT, pve_gpu_host_timeout=2)
    assert not played.ok
    finding = findings(played.results[KEEP][0])[check]
    assert finding["status"] == "fail"
    assert found in finding["found"]
    assert f"{check}: {finding['found']} (right: {finding['right']}). Remedy: {finding['remedy']}." in played.said


def test_a_card_without_persistence_mode_is_a_warning_with_its_remedy(play, fault):
    with fault("persistence_off"):
        played = play(*AUDIT)
    assert played.ok
    finding = findings(played.results[KEEP][0])["persistence"]
    assert (finding["status"], finding["found"]) == ("warn", "off on GPU 3")
    assert finding["remedy"].startswith("enable nvidia-persistenced")


def test_a_moved_number_is_no_fault_of_the_node(play, fault):
    with fault("uvm_moved"):
        played = play(*AUDIT)
    assert played.ok
    assert findings(played.results[KEEP][0])["device nodes"]["status"] == "ok"


def test_a_program_can_read_the_audit(played, node):
    (written,) = [result for result in played.results["Write the audit for programs"] if not result.get("skipped")]
    audit = json.loads(Path(written["dest"]).read_text())
    assert audit["node"] == "lab-pve1" and audit["status"] == "fail"
    assert len(audit["findings"]) == 15 and len(audit["gpus"]) == 8


def test_the_changes_are_there(node):
    for unit in UNITS:
        assert node.service(unit).is_enabled and node.service(unit).is_running
    assert node.file(MODPROBE).content_string.splitlines()[1:] == [
        "options nvidia_uvm uvm_disable_hmm=1",
        'options nvidia NVreg_RegistryDwords="ForceP2P=0x11"',
        "options nvidia NVreg_EnableGpuFirmware=1",
    ]
    (word,) = json.loads(node.file("/etc/servelab/kernel-options.json").content_string)
    assert node.file("/etc/kernel/cmdline").content_string == f"root=ZFS=rpool/ROOT/pve-1 boot=zfs {word}\n"
    assert node.check_output(f". /etc/default/grub; . {GRUB}; echo $GRUB_CMDLINE_LINUX_DEFAULT") == f"quiet {word}"
    called = node.file("/var/tmp/called").content_string.splitlines()
    assert called.count("proxmox-boot-tool refresh") == 1 and called.count("update-initramfs -u -k all") == 1
    assert "nvidia-modprobe -c=0 -u" in called


def test_the_unit_ran_before_the_guests_of_this_boot(node):
    def when(unit: str, what: str) -> int:
        return int(node.check_output(f"systemctl show -P {what}TimestampMonotonic {unit}"))

    for unit in UNITS:
        assert 0 < when(unit, "ActiveEnter") <= when("pve-guests.service", "InactiveExit")


def test_a_node_that_appears_after_the_guests_is_found(play, node):
    node.check_output("cp -a /dev/nvidia-uvm /dev/held && rm /dev/nvidia-uvm && mv /dev/held /dev/nvidia-uvm")
    found = findings(play(*AUDIT).results[KEEP][0])["nodes at boot"]
    assert found["status"] == "warn"
    # A failure that was played and is over made its nodes anew too.
    late, how_late = found["found"].split(" made up to ")
    assert "nvidia-uvm" in late.split(", ") and "nvidiactl" not in late
    assert how_late.endswith(" after the guests were started")
    assert "pve_gpu_host_boot_unit=true" in found["remedy"]


def test_a_file_changed_by_hand_is_found_and_alone_put_right(play, node):
    node.check_output("sed -i 's/-c=0 -u/-c=0/' /etc/systemd/system/servelab-gpu-nodes.service")
    checked = play(*ROLE, "--check", "--diff")
    assert checked.changed[0] == ("Bring the unit", "lab-pve1")
    assert "+" not in checked.diff[0] and "nvidia-modprobe -c=0 -u" in checked.diff[1]
    assert play(*ROLE).ok
    assert "-c=0 -u" in node.file("/etc/systemd/system/servelab-gpu-nodes.service").content_string
    assert play(*ROLE).changed == []


def test_what_needs_a_boot_fails_and_says_so_and_check_mode_does_not(play, node):
    more = {"pve_gpu_host_modprobe_options": ["nvidia NVreg_Other=1"], "pve_gpu_host_reboot_ok": False}
    before = node.file(MODPROBE).content_string
    assert play(*ROLE, "--check", **more).ok
    assert node.file(MODPROBE).content_string == before
    booted = node.check_output("systemctl show -P UserspaceTimestampMonotonic")
    for _again in range(2):
        played = play(*ROLE, **more)
        assert not played.ok
        assert "lab-pve1 must be rebooted before it is as described: options for modules were changed" in played.said
        assert "-e pve_gpu_host_reboot_ok=true" in played.said
    assert node.check_output("systemctl show -P UserspaceTimestampMonotonic") == booted


def test_bad_options_are_refused_all_at_once_before_anything_changes(play):
    played = play(
        pve_gpu_host_kernel_options=["iommu=pt quiet"],
        pve_gpu_host_modprobe_options=["nvidia; rm -rf /"],
        pve_gpu_host_force_p2p_registry='x"',
    )
    assert not played.ok and played.changed == []
    assert 'pve_gpu_host_kernel_options has "iommu=pt quiet", which is no option of the kernel' in played.said
    assert 'pve_gpu_host_modprobe_options has "nvidia; rm -rf /"' in played.said
    assert "pve_gpu_host_force_p2p_registry is" in played.said


def test_an_option_that_contradicts_the_node_is_refused(play, node):
    node.check_output("""sed -i 's/"quiet"/"quiet iommu=soft"/' /etc/default/grub""")
    played = play(pve_gpu_host_kernel_options=["iommu=pt"], pve_gpu_host_modprobe_options=["nvidia NVreg_Never=1"])
    node.check_output("sed -i 's/ iommu=soft//' /etc/default/grub")
    assert not played.ok and played.changed == []
    assert "iommu=soft is on the command line already, and iommu=pt is wanted" in played.said


def test_switched_off_it_goes_without_a_trace(play, node):
    nothing = {
        "pve_gpu_host_boot_unit": False,
        "pve_gpu_host_acs": False,
        "pve_gpu_host_disable_hmm": False,
        "pve_gpu_host_force_p2p": False,
        "pve_gpu_host_modprobe_options": [],
        "pve_gpu_host_kernel_options": [],
    }
    played = play(*ROLE, **nothing)
    assert played.ok
    for path in [
        MODPROBE,
        GRUB,
        "/etc/servelab/kernel-options.json",
        *(f"/etc/systemd/system/{unit}" for unit in UNITS),
    ]:
        assert not node.file(path).exists
    assert node.file("/etc/kernel/cmdline").content_string == "root=ZFS=rpool/ROOT/pve-1 boot=zfs\n"
    assert play(*ROLE, **nothing).changed == []
