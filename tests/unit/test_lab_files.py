"""Files of a lab: only what differs is written, nothing outside the root, nothing that others put there is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from servelab.shared.lab_files import EscapeError, Wanted, delete, differs, put, surplus, tree


@pytest.mark.parametrize(
    "item",
    [
        Wanted("etc/network/interfaces", b"auto lo\n", mode=0o644),
        Wanted("etc/secret", b"x", mode=0o600),
        Wanted("usr/sbin/pct", link="/srv/servelab-lab/bin/pct"),
        Wanted("root/.ssh", mode=0o700),
    ],
    ids=lambda item: item.path,
)
def test_what_was_put_does_not_differ(tmp_path: Path, item: Wanted) -> None:
    assert differs(tmp_path, item)
    put(tmp_path, item)
    assert not differs(tmp_path, item)
    assert not list(tmp_path.rglob("*.half"))


def test_each_property_counts(tmp_path: Path) -> None:
    put(tmp_path, Wanted("f", b"one", mode=0o644))
    assert differs(tmp_path, Wanted("f", b"two", mode=0o644))
    assert differs(tmp_path, Wanted("f", b"one", mode=0o600))
    assert differs(tmp_path, Wanted("f", link="one"))
    assert differs(tmp_path, Wanted("f", mode=0o644))
    assert differs(tmp_path, Wanted("f", b"one", mode=0o644, owner=os.getuid() + 1))
    put(tmp_path, Wanted("l", link="f"))
    assert differs(tmp_path, Wanted("l", link="g"))
    assert differs(tmp_path, Wanted("l", b"one", mode=0o644)), "a link to a file with the content is not the file"


def test_a_link_is_replaced_and_its_target_left_alone(tmp_path: Path) -> None:
    outside = tmp_path / "resolv.conf"
    outside.write_text("the host's")
    root = tmp_path / "root"
    put(root, Wanted("etc/resolv.conf", link=str(outside)))
    put(root, Wanted("etc/resolv.conf", b"the node's", mode=0o644))
    assert outside.read_text() == "the host's"
    assert (root / "etc/resolv.conf").read_text() == "the node's"


def test_a_directory_that_leads_out_of_the_root_is_refused(tmp_path: Path) -> None:
    host_etc = tmp_path / "etc"
    host_etc.mkdir()
    root = tmp_path / "root"
    put(root, Wanted("etc", link=str(host_etc)))
    with pytest.raises(EscapeError, match="leads out of"):
        put(root, Wanted("etc/hostname", b"pve1\n", mode=0o644))
    with pytest.raises(EscapeError):
        put(root, Wanted("etc/network/interfaces", b"", mode=0o644))
    put(root, Wanted("ssh", link=str(host_etc)))
    with pytest.raises(EscapeError):
        put(root, Wanted("ssh", mode=0o700))
    assert list(host_etc.iterdir()) == []


def test_a_directory_may_be_a_link_to_one(tmp_path: Path) -> None:
    put(tmp_path, Wanted("disk/lab", mode=0o755))
    put(tmp_path, Wanted("lab", link="disk/lab"))
    assert not differs(tmp_path, Wanted("lab", mode=0o755))


def test_a_link_within_the_root_is_followed(tmp_path: Path) -> None:
    put(tmp_path, Wanted("usr/bin"))
    put(tmp_path, Wanted("bin", link="usr/bin"))
    put(tmp_path, Wanted("bin/tool", b"#!/bin/sh\n", mode=0o755))
    assert (tmp_path / "usr/bin/tool").read_bytes() == b"#!/bin/sh\n"


def test_a_tree_is_copied_with_modes_that_everybody_can_read(tmp_path: Path) -> None:
    source = tmp_path / "source"
    put(source, Wanted("pct/__init__.py", b"", mode=0o600))
    put(source, Wanted("run", b"#!/bin/sh\n", mode=0o700))
    put(source, Wanted("pct/__pycache__/x.pyc", b"code", mode=0o644))
    assert sorted((item.path, item.content, item.mode) for item in tree("doubles", source)) == [
        ("doubles/pct/__init__.py", b"", 0o644),
        ("doubles/run", b"#!/bin/sh\n", 0o755),
    ]


def test_only_what_a_tree_once_brought_is_surplus(tmp_path: Path) -> None:
    source = tmp_path / "source"
    put(source, Wanted("kept.py", b"", mode=0o644))
    root = tmp_path / "root"
    for path in ("a/kept.py", "a/gone/old.py", "a/gone/__pycache__/old.pyc", "a/shared/own.py", "server.json"):
        put(root, Wanted(path, b"", mode=0o644))
    wanted = [*tree("a", source), Wanted("a/shared/own.py", b"", mode=0o644)]
    assert surplus(root, {"a": source}, wanted) == ["a/gone/old.py"]
    delete(root, "a/gone/old.py")
    assert not (root / "a/gone").exists(), "what is left empty but for byte code goes too"
    assert (root / "a/kept.py").exists() and (root / "server.json").exists()
