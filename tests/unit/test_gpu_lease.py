"""Who works on which cards: nobody takes what somebody living has, and nothing dead is in anybody's way."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

from servelab.shared.gpu_lease import Lease, Leased, Owner, boot_id, describe, machine, read, release, stale, take


def owner(pid: int, purpose: str = "campaign first", where: str = "boot/pid:[1]") -> Owner:
    return Owner(where, pid, pid * 100, "root@ctl", purpose)


def test_a_second_owner_is_told_who_has_the_cards(tmp_path):
    where = str(tmp_path / "leases")
    assert take([0, 1, 2, 3], owner(10), 129, 3600, directory=where) == {"renewed": False, "notes": []}
    with pytest.raises(Leased) as refused:
        take([3, 4], owner(20, "cleaning"), 130, 3600, directory=where)
    (reason,) = refused.value.reasons
    assert reason.startswith("GPU 3 is leased: campaign first, by root@ctl (PID 10 there), for guest 129, taken 20")
    assert [lease.owner.pid for lease in read(where)] == [10]


def test_other_cards_and_the_same_owner_do_not_exclude_each_other(tmp_path):
    where = str(tmp_path)
    take([0, 1], owner(10), 129, 3600, directory=where)
    take([2, 3], owner(20), 130, 3600, directory=where)
    # One playbook over two guests that share the cards.
    take([0, 1], owner(10), 131, 3600, directory=where)
    assert [(lease.owner.pid, lease.vmid) for lease in read(where)] == [(10, 129), (20, 130), (10, 131)]


def test_taking_it_again_renews_it_and_keeps_its_beginning(tmp_path):
    where = str(tmp_path)
    take([0], owner(10), 129, 3600, directory=where)
    (first,) = read(where)
    time.sleep(0.02)
    assert take([0], owner(10), 129, 60, directory=where)["renewed"]
    (second,) = read(where)
    assert second.taken == first.taken and second.renewed > first.renewed and second.ttl == 60


def test_released_means_gone_and_only_ones_own(tmp_path):
    where = str(tmp_path)
    take([0], owner(10), 129, 3600, directory=where)
    assert release(owner(20), 129, directory=where) is False
    assert release(owner(10), 130, directory=where) is False
    assert release(owner(10), 129, dry_run=True, directory=where) is True and len(read(where)) == 1
    assert release(owner(10), 129, directory=where) is True
    assert read(where) == [] and release(owner(10), 129, directory=where) is False


def lease(renewed: float, ttl: float = 100, boot: str = "b1") -> Lease:
    return Lease(owner(10), 129, [0, 1], 0.0, renewed, ttl, boot)


ON_CARD = {"vmid": 129, "gpus": [1]}


@pytest.mark.parametrize(
    ("one", "dead", "holders", "why"),
    [
        (lease(950), [], [], None),
        # Expired, but its server is there: the load may take hours without a word.
        (lease(800), [], [ON_CARD], None),
        (lease(800), [], [], "no sign of life for 200 s"),
        # Who is on other cards, or is another guest's, says nothing about this one.
        (lease(800), [], [ON_CARD | {"gpus": [5]}], "no sign of life"),
        (lease(800), [], [ON_CARD | {"vmid": 130}], "no sign of life"),
        (lease(950), [owner(10).key], [ON_CARD], "its owner is dead"),
        (lease(950), [owner(11).key], [], None),
        (lease(950, boot="b0"), [], [], "the node was booted since"),
    ],
)
def test_what_is_stale(one, dead, holders, why):
    found = stale(one, dead, holders, "b1", 1000.0)
    assert found is None if why is None else str(found).startswith(why)


def test_a_dead_owners_lease_is_set_aside_with_a_word(tmp_path):
    where = str(tmp_path)
    take([0], owner(10), 129, 3600, directory=where)
    notes = take([0], owner(20), 130, 3600, dead=[owner(10).key], directory=where)["notes"]
    assert len(notes) == 1 and notes[0].startswith(
        "a lease on GPU 0 was set aside, as its owner is dead: campaign first"
    )
    assert [one.owner.pid for one in read(where)] == [20]


def test_what_is_set_aside_goes_whatever_its_file_is_called(tmp_path):
    take([0], owner(10), 129, 3600, directory=str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    path.rename(tmp_path / "by-hand.json")
    take([0], owner(20), 130, 3600, by_force=True, directory=str(tmp_path))
    assert [one.owner.pid for one in read(str(tmp_path))] == [20]


def test_a_person_may_break_it(tmp_path):
    where = str(tmp_path)
    take([0], owner(10), 129, 3600, directory=where)
    assert "was to be broken" in take([0], owner(20), 130, 3600, by_force=True, directory=where)["notes"][0]


def test_a_check_takes_nothing_and_says_the_same(tmp_path):
    where = str(tmp_path / "leases")
    take([0], owner(20), 130, 3600, dry_run=True, directory=where)
    assert not Path(where).exists()
    take([0], owner(10), 129, 3600, directory=where)
    with pytest.raises(Leased):
        take([0], owner(20), 130, 3600, dry_run=True, directory=where)
    take([0], owner(20), 130, 3600, dead=[owner(10).key], dry_run=True, directory=where)
    assert [one.owner.pid for one in read(where)] == [10]


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": "servelab.lease/2"}', '{"owner": 3}'])
def test_what_is_no_lease_binds_nobody(tmp_path, text):
    (tmp_path / "x.json").write_text(text)
    assert read(str(tmp_path)) == []
    take([0], owner(10), 129, 60, directory=str(tmp_path))


def test_a_half_written_one_is_never_seen(tmp_path):
    take([0], owner(10), 129, 60, directory=str(tmp_path))
    (path,) = tmp_path.glob("*.json")
    assert json.loads(path.read_text())["schema"] == "servelab.lease/1"
    assert not list(tmp_path.glob(".*.half"))


def _race(where: str, pid: int, ready, wins) -> None:
    ready.wait()
    try:
        take([0, 1], owner(pid), pid, 3600, directory=where)
    except Leased:
        return
    wins.put(pid)


def test_of_many_at_once_one_gets_it(tmp_path):
    context = multiprocessing.get_context("fork")
    ready, wins = context.Event(), context.Queue()
    racers = [context.Process(target=_race, args=(str(tmp_path), pid, ready, wins)) for pid in range(100, 112)]
    for racer in racers:
        racer.start()
    ready.set()
    for racer in racers:
        racer.join(20)
    winner = wins.get(timeout=5)
    assert wins.empty() and [one.owner.pid for one in read(str(tmp_path))] == [winner]


def test_this_machine_is_named_by_boot_and_namespace():
    assert machine() == f"{boot_id()}/{Path('/proc/self/ns/pid').readlink()}"
    assert describe(lease(0), 30).endswith("last sign of life 30 s ago")
