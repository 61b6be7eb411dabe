"""nvidia-smi's tables and its sentences. Expectations: cases/01 and cases/02, written by hand."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from servelab.shared.nvidia_smi import memory_verdict, parse_table, query, throttle_reasons

CASES = Path(__file__).parent / "cases"
SENTINELS = CASES / "01-nvsmi-query-sentinels"
EXPECTED = json.loads((SENTINELS / "expected.json").read_text())
THRESHOLD = 64


def report(text: str, fields: list[str] | None = None) -> dict:
    parsed = parse_table(text, fields) if fields else parse_table(text)
    return {"gpus": parsed.gpus, "diagnosis": parsed.diagnosis.as_dict() if parsed.diagnosis else None}


def with_units() -> dict:
    return report((SENTINELS / "query_units.csv").read_text())


def without_header() -> dict:
    fields = ["index", "memory.total", "memory.used", "utilization.gpu", "power.draw", "temperature.gpu"]
    return report((SENTINELS / "query_nounits.csv").read_text(), fields)


@pytest.mark.parametrize("table", [with_units, without_header])
@pytest.mark.parametrize("expected", EXPECTED["gpus"], ids=lambda gpu: f"gpu{gpu['index']}")
def test_sentinels_become_null_and_never_zero(table, expected):
    gpu = table()["gpus"][expected["index"]]
    assert gpu["index"] == expected["index"]
    assert gpu["memory_used_mib"] == expected["mem_used_mib"]
    assert gpu["utilization_percent"] == expected.get("util", 0 if expected["index"] == 0 else None)
    if "health" in expected:
        assert gpu["health"] == expected["health"]
    single = memory_verdict({"gpus": [gpu], "diagnosis": None}, THRESHOLD)
    assert single["clean"] == {False: True, True: False, None: None}[expected["busy"]]


def test_values_with_units_and_modes_are_read():
    first, second = with_units()["gpus"][:2]
    assert first["power_w"] == 33.10
    assert first["memory_total_mib"] == 97887
    assert first["name"] == "NVIDIA RTX PRO 6000 Blackwell Server Edition"
    assert first["mig"] is False and first["health"] == "ok"
    assert second["mig"] is True and second["power_w"] is None


def test_a_row_with_a_column_too_many_is_not_read_by_position():
    # The last row of the case has 11 cells under 10 headers; its compute mode must not become "[N/A]" or worse.
    last = with_units()["gpus"][3]
    assert last["uuid"] == "GPU-00000000-0000-0000-0000-0000000000a3"
    assert last["compute_mode"] is None and last["mig"] is None


def test_a_table_with_unknown_memory_is_neither_clean_nor_busy():
    unknown = {"gpus": [g for g in with_units()["gpus"] if g["index"] != 1], "diagnosis": None}
    verdict = memory_verdict(unknown, THRESHOLD)
    assert verdict["clean"] is None
    assert any("GPU 3 must be reset" in reason for reason in verdict["reasons"])
    assert any("GPU 2" in reason for reason in verdict["reasons"])


@pytest.mark.parametrize("table", [with_units, without_header])
def test_the_whole_table_is_not_clean_and_names_what_is_unknown(table):
    assert EXPECTED["cleanup_verdict"] == "UNKNOWN, not clean"
    verdict = memory_verdict(table(), THRESHOLD)
    # One card is certainly in use, which says more than "unknown"; the two unknown ones are named all the same.
    assert verdict["clean"] is False
    assert verdict["reasons"] == [
        "GPU 1 has 91000 MiB in use, more than 64 MiB",
        "GPU 2 does not tell how much memory is in use",
        "GPU 3 must be reset: gpu_clean_reset_ok=true lets this role do it where nobody holds it; so does a boot",
    ]


@pytest.mark.parametrize(
    ("file", "name", "word_in_remedy"),
    [
        ("no_devices", "no_devices", "pct set"),
        ("mismatch", "driver_mismatch", "/proc/driver/nvidia/version"),
        ("no_driver", "driver_not_loaded", "modprobe"),
        ("no_perm", "permission", "mode=0666"),
        ("unknown", "cgroup_denied", "lxc.cgroup2.devices.allow"),
    ],
)
def test_a_sentence_is_a_diagnosis_and_not_a_card(file, name, word_in_remedy):
    said = report((CASES / "02-nvsmi-not-a-table" / f"{file}.stdout").read_text())
    assert said["gpus"] == []
    assert said["diagnosis"]["name"] == name
    assert word_in_remedy in said["diagnosis"]["remedy"]
    assert memory_verdict(said, THRESHOLD)["clean"] is None


def test_the_five_sentences_have_five_remedies():
    files = sorted((CASES / "02-nvsmi-not-a-table").glob("*.stdout"))
    remedies = {report(file.read_text())["diagnosis"]["remedy"] for file in files}
    assert len(files) == len(remedies) == 5


def test_empty_output_is_unknown():
    assert report("")["diagnosis"]["name"] == "unrecognised"
    assert memory_verdict(report(""), THRESHOLD)["clean"] is None


def test_a_skipped_probe_is_unknown_and_not_clean():
    registered = json.loads((CASES / "19-check-mode-probe" / "registered.json").read_text())
    verdict = memory_verdict(registered, THRESHOLD)
    assert verdict["clean"] is None and verdict["gpus"] == []


def test_only_the_wanted_cards_are_judged_and_a_missing_one_is_noticed():
    table = with_units()
    a0, a1 = (f"GPU-00000000-0000-0000-0000-0000000000a{n}" for n in (0, 1))
    assert memory_verdict(table, THRESHOLD, [a0])["clean"] is True
    assert memory_verdict(table, THRESHOLD, [a0, a1])["clean"] is False
    assert memory_verdict(table, THRESHOLD, [a0, "GPU-elsewhere"])["clean"] is None


def fake(tmp_path: Path, body: str) -> str:
    script = tmp_path / "nvidia-smi"
    script.write_text(f"#!/bin/sh\n{body}\n")
    script.chmod(0o755)
    return str(script)


def test_a_hanging_nvidia_smi_is_given_up(tmp_path):
    started = time.monotonic()
    # The child would keep the pipe open for a minute if only the shell were killed.
    said = query(0.3, fake(tmp_path, "sleep 60 & wait"))
    assert time.monotonic() - started < 5
    assert said.gpus == [] and said.diagnosis is not None and said.diagnosis.name == "timeout"


def test_a_missing_nvidia_smi_is_said(tmp_path):
    said = query(5, str(tmp_path / "nowhere"))
    assert said.diagnosis is not None and said.diagnosis.name == "not_installed"


def test_a_table_with_a_failing_exit_status_is_not_the_whole_truth(tmp_path):
    row = "0, GPU-a, 00:01.0, X, 580.95.05, 100, 4, 0, 30, 33.1, Disabled, Default, 1, 16"
    row += ", 600.00, 180, 2430, 405, 12481, 0x0000000000000001"
    said = query(5, fake(tmp_path, f"echo '{row}'; echo 'Unable to determine the device handle for GPU1' >&2; exit 15"))
    assert said.gpus[0]["memory_used_mib"] == 4
    assert said.diagnosis is not None and said.diagnosis.name == "gpu_lost"


def test_limits_clocks_and_what_holds_them_down_are_read():
    # The header is the real tool's of driver 580: clocks.sm is asked for, clocks.current.sm is answered.
    text = (
        "index, uuid, enforced.power.limit [W], clocks.current.sm [MHz], clocks.max.sm [MHz], "
        "clocks.current.memory [MHz], clocks.max.memory [MHz], clocks_event_reasons.active\n"
        "0, GPU-a, 700.00 W, 345 MHz, 1980 MHz, 3201 MHz, 3202 MHz, 0x0000000000000001\n"
        "1, GPU-b, [N/A], 1410 MHz, 1980 MHz, 3201 MHz, 3202 MHz, 0x0000000000000044\n"
    )
    first, second = report(text)["gpus"]
    assert (first["power_limit_w"], first["clock_sm_mhz"], first["clock_max_sm_mhz"]) == (700.0, 345, 1980)
    assert (first["clock_memory_mhz"], first["clock_max_memory_mhz"]) == (3201, 3202)
    assert first["throttle_reasons"] == ["gpu_idle"]
    assert second["power_limit_w"] is None
    assert second["throttle_reasons"] == ["sw_power_cap", "hw_thermal_slowdown"]


@pytest.mark.parametrize(
    ("cell", "names"),
    [
        ("0x0000000000000000", []),
        ("0x0000000000000080", ["hw_power_brake_slowdown"]),
        ("0x0000000000000120", ["sw_thermal_slowdown", "display_clock_setting"]),
        ("0x0000000000000208", ["hw_slowdown", "0x200"]),
        ("Not Supported", None),
    ],
)
def test_the_bits_of_throttling(cell, names):
    assert throttle_reasons(cell) == names
