"""A node that was restarted, with the driver's numbers moved as a boot may move them, needs nothing from anybody."""

from __future__ import annotations

from conftest import reboot


def test_site_changes_nothing_on_a_node_that_was_restarted(play, node, fault):
    before = node.check_output("stat -c %Hr:%Lr /dev/nvidia-uvm")
    with fault("uvm_moved"):
        assert reboot(node) == "running"
        assert node.check_output("stat -c %Hr:%Lr /dev/nvidia-uvm") != before
        played = play()
        assert played.ok, played.said
        assert played.changed == []
        # The guest came up by itself, with the number of now.
        assert node.check_output("pct exec 129 -- stat -c %Hr:%Lr /dev/nvidia-uvm") != before
    # The number is the old one again, and what is passed by dev[n] follows at the guest's next start.
    node.check_output("pct reboot 129")
    assert node.check_output("pct exec 129 -- stat -c %Hr:%Lr /dev/nvidia-uvm") == before
