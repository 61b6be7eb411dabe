"""The name of an image says what is in it."""

from __future__ import annotations

import io
import tarfile
from typing import Any

import pytest

from servelab.shared.lab_image import Recipe, recipes

STATED: dict[str, Any] = {
    "name": "node",
    "suites": ["trixie"],
    "sources": ["deb http://deb.example.org/debian trixie main"],
    "packages": ["lxc", "openssh-server"],
    "files": [
        {"path": "/etc/pip.conf", "content": "[global]\n", "mode": "0640"},
        {"path": "/usr/bin/pct", "link": "/srv/x"},
    ],
    "run": "true",
}


def recipe_of(stated: dict[str, Any]) -> Recipe:
    (only,) = recipes(stated)
    return only


def test_each_suite_is_an_image_with_its_own_sources() -> None:
    stated = {**STATED, "suites": ["trixie", "bookworm"], "sources": ["deb http://d.example/debian SUITE-updates main"]}
    assert {one.key: one.sources for one in recipes(stated)} == {
        "node-trixie": ("deb http://d.example/debian trixie-updates main",),
        "node-bookworm": ("deb http://d.example/debian bookworm-updates main",),
    }


def test_the_name_is_stable_and_does_not_depend_on_order() -> None:
    again = {**STATED, "packages": ["openssh-server", "lxc"], "files": STATED["files"][::-1]}
    assert recipe_of(STATED).file_name == recipe_of(again).file_name
    assert recipe_of(STATED).file_name.startswith("node-trixie-")
    assert recipe_of(STATED).file_name.endswith(".tar.zst")


@pytest.mark.parametrize(
    "change",
    [
        {"suites": ["bookworm"]},
        {"sources": ["deb http://other.example.org/debian trixie main"]},
        {"packages": ["lxc", "openssh-server", "zstd"]},
        {"files": [{"path": "/etc/pip.conf", "content": "[global]\n", "mode": "0600"}]},
        {"files": [{"path": "/etc/pip.conf", "content": "[install]\n", "mode": "0640"}]},
        {"files": []},
        {"run": "false"},
    ],
    ids=lambda change: next(iter(change)),
)
def test_whatever_changes_the_image_changes_its_name(change: dict[str, Any]) -> None:
    assert recipe_of({**STATED, **change}).digest != recipe_of(STATED).digest


def test_the_files_are_laid_over_as_root_without_touching_directories() -> None:
    with tarfile.open(fileobj=io.BytesIO(recipe_of(STATED).overlay())) as archive:
        members = {member.name: member for member in archive.getmembers()}
        assert sorted(members) == ["etc/pip.conf", "usr/bin/pct"]
        assert (members["etc/pip.conf"].mode, members["etc/pip.conf"].uid) == (0o640, 0)
        content = archive.extractfile("etc/pip.conf")
        assert content is not None and content.read() == b"[global]\n"
        assert members["usr/bin/pct"].issym() and members["usr/bin/pct"].linkname == "/srv/x"
