"""Readings of the cards while levels run: from what nvidia-smi prints to a level's figures, worked out by hand."""

import json
import time

import pytest

from servelab.load import cards

# Two cards, three looks two seconds apart; the last look was cut off by the end. 12:00:00 UTC is 1795953600.
PRINTED = """\
2026/11/29 12:00:00.100, 0, 90000, 60, 500.00, 2400, 5, 0x0000000000000000
2026/11/29 12:00:00.102, 1, 90010, 61, 510.00, 2380, 5, 0x0000000000000004
2026/11/29 12:00:02.100, 0, 90000, 66, 590.00, 2300, 5, 0x0000000000000004
2026/11/29 12:00:02.103, 1, 90012, 71, 600.00, 2100, 5, 0x0000000000000044
2026/11/29 12:00:04.100, 0, 90000, 60, 480.00, 2410, 5, 0x0000000000000000
2026/11/29 12:00:04.102, 1, 900
"""
NOON = 1795953600


def test_readings_have_their_time_in_utc_and_every_card():
    first, second, third = cards.read(PRINTED)
    assert first["t"] == NOON + 0.1
    assert first["gpus"][1] == {
        "index": 1,
        "memory_used_mib": 90010,
        "temperature_c": 61,
        "power_w": 510.0,
        "clock_sm_mhz": 2380,
        "pcie_link_gen": 5,
        "throttle_reasons": ["sw_power_cap"],
    }
    assert [len(reading["gpus"]) for reading in (first, second, third)] == [2, 2, 1]


def test_a_level_gets_what_was_read_in_its_window():
    assert cards.summary(cards.read(PRINTED), NOON, NOON + 3) == {
        "readings": 2,
        "power_w": 1100.0,  # 1010 and 1190 W of both together
        "clock_sm_mhz": 2240.0,  # the slower one: 2380 and 2100
        "temperature_c": 71,
        "memory_used_mib": 90012,
        "throttle": {"hw_thermal_slowdown": 0.5, "sw_power_cap": 1.0},
    }
    assert cards.summary(cards.read(PRINTED), NOON + 0.5, NOON + 1.5) is None


def test_what_a_card_does_not_tell_is_unknown_and_never_left_out_of_a_sum():
    text = (
        "2026/11/29 12:00:00.100, 0, 90000, 60, [N/A], 2400, 5, [N/A]\n"
        "2026/11/29 12:00:00.101, 1, 90000, 60, 500.00, 2400, 5, [N/A]\n"
    )
    found = cards.summary(cards.read(text), NOON, NOON + 1)
    assert (found["power_w"], found["clock_sm_mhz"], found["throttle"]) == (None, 2400.0, None)


def test_idle_and_set_clocks_are_no_throttling():
    text = "2026/11/29 12:00:00.100, 0, 4, 30, 33.10, 180, 1, 0x0000000000000003\n"
    assert cards.summary(cards.read(text), NOON, NOON + 1)["throttle"] == {}


@pytest.mark.parametrize(
    "text", ["", "NVIDIA-SMI has failed because it couldn't communicate\n", "a, b, c, d, e, f, g, h\n"]
)
def test_a_sentence_is_no_reading(text):
    assert cards.read(text) == []


def program(tmp_path, script):
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


def test_it_runs_beside_and_leaves_a_file(tmp_path):
    # The words it was called with, its time zone, and then a row: what a test of the call can see.
    script = f'echo "$TZ $*" > {tmp_path}/called; echo "2026/11/29 12:00:00.100, 0, 4, 30, 33.1, 180, 1, 0x0"; sleep 60'
    watch = cards.Watch(tmp_path, 2.5, program(tmp_path, script))
    for _ in range(200):
        if watch.readings():
            break
        time.sleep(0.05)
    watch.end()
    assert (tmp_path / "called").read_text() == (
        "UTC0 --query-gpu=timestamp,index,memory.used,temperature.gpu,power.draw,clocks.current.sm,"
        "pcie.link.gen.current,clocks_event_reasons.active --format=csv,noheader,nounits --loop-ms=2500\n"
    )
    (line,) = (tmp_path / "cards.jsonl").read_text().splitlines()
    assert json.loads(line)["gpus"][0]["power_w"] == 33.1
    assert not (tmp_path / "cards.csv").exists()


def test_without_readings_its_sentence_is_kept(tmp_path):
    watch = cards.Watch(tmp_path, 1, program(tmp_path, "echo No devices were found; exit 6"))
    watch._process.wait(10)
    watch.end()
    assert (tmp_path / "cards.csv").read_text() == "No devices were found\n"
    assert not (tmp_path / "cards.jsonl").exists()


def test_a_machine_without_nvidia_smi_is_measured_all_the_same(tmp_path):
    watch = cards.Watch(tmp_path, 1, str(tmp_path / "none"))
    watch.end()
    assert watch.why_not.startswith("[Errno 2] No such file or directory")
    assert watch.readings() == []
    assert list(tmp_path.iterdir()) == []
