"""The innocent live, the targets are gone, the cards are empty, and the refusal named everybody."""

from __future__ import annotations

import json

import pytest

NOTES = "/run/servelab-test"


def pid(host, name: str) -> int:
    return int(host.file(f"{NOTES}/{name}.pid").content_string)


def lives(host, number: int) -> bool:
    return host.run("kill -0 %s", str(number)).rc == 0


@pytest.mark.parametrize("name", ["bystander", "monitor"])
@pytest.mark.parametrize("place", ["node", "guest"])
def test_the_innocent_live(place, name, request):
    host = request.getfixturevalue(place)
    assert lives(host, pid(host, name))


@pytest.mark.parametrize("place", ["node", "guest"])
def test_the_holder_of_dev_full_lives(place, request):
    assert request.getfixturevalue(place).service("full").is_running


@pytest.mark.parametrize("name", ["bench", "bench-survivor", "by-nobody", "deaf"])
def test_the_targets_are_gone(guest, name):
    assert not lives(guest, pid(guest, name))


@pytest.mark.parametrize("unit", ["servelab-left", "nested"])
def test_their_units_are_gone(guest, unit):
    assert not guest.service(unit).is_running


def test_notes_about_owners_are_gone(guest):
    assert guest.file("/run/servelab").listdir() == []


@pytest.mark.parametrize("place", ["node", "guest"])
def test_the_cards_are_empty(place, request):
    host = request.getfixturevalue(place)
    used = host.check_output("nvidia-smi --query-gpu=memory.used --format=csv,noheader,nounits").split()
    assert len(used) == 8
    # 4 MiB is what such a card reports when it is idle; a process on it takes hundreds.
    assert max(int(mib) for mib in used) <= 4


def test_fuser_finds_the_monitor_only(guest):
    nodes = " ".join(f"/dev/nvidia{number}" for number in range(8))
    assert guest.run(f"fuser {nodes} 2>/dev/null").stdout.split() == [str(pid(guest, "monitor"))] * 8


def test_the_refusal_named_everybody_and_the_remedy(guest):
    said = guest.file(f"{NOTES}/refusal.txt").content_string
    assert "3 process(es) hold GPUs of lab-gpu1 and are not ours to end; nobody was signalled." in said
    rows = {line.split()[0]: line for line in said.splitlines() if line[:1].isdigit()}
    deaf, by_nobody = rows[str(pid(guest, "deaf"))], rows[str(pid(guest, "by-nobody"))]
    assert "guest 129, root" in deaf and " 2-3 " in deaf and "holder.py deaf" in deaf
    assert "guest 129, nobody" in by_nobody and " 0 " in by_nobody
    assert any("nested.service" in row and " 5 " in row for row in rows.values())
    assert said.count("refuse: not started by a benchmark") == 3 and said.count("gpu_clean_force=true") == 3
    # Both monitors are named as well, and that they may stay.
    assert said.count("tolerate: on the protect list: dcgm-exporter") == 2


def test_the_proof_names_who_stayed(guest):
    assert json.loads(guest.file(f"{NOTES}/converged").content_string) == ["dcgm-exporter", "dcgm-exporter"]
