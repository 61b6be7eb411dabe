"""The switchboard: what is on is written for driver and server, contradictions are refused, and off is off."""

from __future__ import annotations

import json
import os
import stat

import pytest

from servelab_lab import faults
from servelab_lab.faults import FAULTS, Place, main, merged, switch, switched_on
from servelab_lab.gpu.nodes import lay
from servelab_lab.server.config import load_config

# docs/simulator.md, "Failures on demand".
SERVER = {
    "oom_kv_pool",
    "oom_graph_capture",
    "unsupported_architecture",
    "assertion",
    "fell_back_to_nccl",
    "hang_nccl_init",
    "garbage_output",
    "death_on_first_request",
}
ALL_NODES = [*(f"nvidia{n}" for n in range(8)), "nvidiactl", "nvidia-uvm", "nvidia-uvm-tools"]


@pytest.fixture
def place(tmp_path):
    (tmp_path / "dev").mkdir()
    return Place(tmp_path, tmp_path / "dev")


@pytest.fixture
def laid(place):
    try:
        lay(8, place.dev, {})
        os.close(os.open(place.dev / "nvidia0", os.O_RDWR))
    except PermissionError:
        pytest.skip("making device nodes needs root and a file system that allows them")
    return place


def written(place):
    return json.loads(place.file.read_text())


def test_every_recorded_failure_has_a_switch():
    assert set(FAULTS) >= SERVER | {
        *("smi_hang", "no_devices", "driver_mismatch", "needs_reset", "unreadable", "off_the_bus"),
        "persistence_off",
        *("uvm_missing", "uvm_moved", "node_is_file", "guest_locked", "other_guest", "node_process", "survivors"),
    }


def test_what_is_on_is_for_the_driver_to_read(place):
    assert switch(place, "smi_hang", True)
    assert written(place) == {"on": ["smi_hang"], "gpu": {"fault": "hang"}}
    assert not switch(place, "smi_hang", True)
    assert switch(place, "smi_hang", False)
    assert written(place) == {"on": []}


def test_several_at_once(place):
    for name in ("off_the_bus", "needs_reset", "unreadable"):
        switch(place, name, True)
    gpu = written(place)["gpu"]
    assert gpu["lost"] == [3]
    assert gpu["values"]["3"]["memory.used"] == "[GPU requires reset]"
    assert gpu["values"]["3"]["power.draw"] == "[Unknown Error]"
    switch(place, "needs_reset", False)
    assert "memory.used" not in written(place)["gpu"]["values"]["3"]
    assert switched_on(place) == ["off_the_bus", "unreadable"]


def test_two_that_contradict_are_refused_and_nothing_changes(place, capsys):
    switch(place, "smi_hang", True)
    assert main(["no_devices", "on"], place) == 2
    assert "no_devices contradicts what is on (smi_hang): switch that off first." in capsys.readouterr().err
    assert switched_on(place) == ["smi_hang"]


def test_an_unknown_name_is_answered_with_the_known_ones(place, capsys):
    assert main(["smi_hangs", "on"], place) == 2
    said = capsys.readouterr().err
    assert "There is no fault smi_hangs" in said and "smi_hang," in said


def test_a_foreign_file_is_not_overwritten(place, capsys):
    place.file.write_text("{")
    assert main(["smi_hang", "on"], place) == 2
    assert place.file.read_text() == "{"


@pytest.mark.parametrize("name", sorted(SERVER))
def test_the_simulated_server_reads_its_failure(place, name):
    server = place.doubles / "server.json"
    server.write_text('{"sglang_package": "/none"}')
    environment = {"SERVELAB_LAB_SERVER_JSON": str(server)}
    assert list(load_config(environment).faults) == []
    switch(place, name, True)
    switch(place, "survivors", True)
    assert load_config(environment).faults == [name]
    assert load_config(environment).survivors is True
    switch(place, name, False)
    assert list(load_config(environment).faults) == []


def numbers(place):
    found = {}
    for path in sorted(place.dev.iterdir()):
        status = path.lstat()
        found[path.name] = (
            (os.major(status.st_rdev), os.minor(status.st_rdev)) if stat.S_ISCHR(status.st_mode) else "file"
        )
    return found


def test_the_nodes_are_as_the_driver_makes_them(laid):
    assert numbers(laid) == dict.fromkeys(ALL_NODES, (1, 7))
    assert all(stat.S_IMODE((laid.dev / name).stat().st_mode) == 0o666 for name in ALL_NODES)
    assert lay(8, laid.dev, {}) == []


def test_missing_moved_and_a_file_in_place_and_back(laid):
    switch(laid, "uvm_moved", True)
    moved = numbers(laid)
    assert moved["nvidia-uvm"] == moved["nvidia-uvm-tools"] != (1, 7)
    os.close(os.open(laid.dev / "nvidia-uvm", os.O_RDWR))
    assert moved["nvidia0"] == (1, 7)
    with pytest.raises(faults.SwitchError):
        switch(laid, "uvm_missing", True)
    switch(laid, "uvm_moved", False)
    switch(laid, "uvm_missing", True)
    switch(laid, "node_is_file", True)
    now = numbers(laid)
    assert "nvidia-uvm" not in now and "nvidia-uvm-tools" not in now
    assert now["nvidia3"] == "file"
    switch(laid, "uvm_missing", False)
    switch(laid, "node_is_file", False)
    assert numbers(laid) == dict.fromkeys(ALL_NODES, (1, 7))


def test_a_boot_makes_the_nodes_with_what_is_on(laid):
    switch(laid, "uvm_missing", True)
    for path in laid.dev.iterdir():
        path.unlink()
    # What the driver does at its start.
    lay(8, laid.dev, written(laid)["gpu"]["nodes"])
    assert sorted(numbers(laid)) == sorted(set(ALL_NODES) - {"nvidia-uvm", "nvidia-uvm-tools"})


def test_merging_leaves_the_table_of_faults_alone():
    merged(["needs_reset", "unreadable"])
    assert "power.draw" not in FAULTS["needs_reset"].document["gpu"]["values"]["3"]
