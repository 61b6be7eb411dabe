"""What the lab's machines keep of Ansible's modules: the same answers, compiled once, and a harmless loss of it."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

KEPT = Path(__file__).resolve().parents[2] / "roles/lab_node/files/servelab_lab_compiled.py"
# How often the compiler was called for the module, and what the module says.
ASK = """
import sys, zipimport
sys.path.insert(0, sys.argv[2])
plain, calls = zipimport._compile_source, []
zipimport._compile_source = lambda path, source: calls.append(path) or plain(path, source)
import servelab_lab_compiled
servelab_lab_compiled.DIRECTORY = sys.argv[3]
sys.path.insert(0, sys.argv[1])
import told
print(len(calls), told.said())
"""


@pytest.fixture
def ask(tmp_path):
    def asking(source: str, directory: Path = tmp_path / "kept/deep") -> str:
        payload = tmp_path / "payload.zip"
        with zipfile.ZipFile(payload, "w") as file:
            file.writestr("told.py", source)
        command = [sys.executable, "-c", ASK, str(payload), str(KEPT.parent), str(directory)]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()

    return asking


def test_the_same_source_is_compiled_once(ask):
    source = "def said():\n    return 'first'\n"
    assert [ask(source), ask(source)] == ["1 first", "0 first"]


def test_another_source_of_the_same_name_and_length_is_another(ask):
    assert ask("def said():\n    return 'first'\n") == "1 first"
    assert ask("def said():\n    return 'other'\n") == "1 other"


def test_what_is_broken_there_is_compiled_again(ask, tmp_path):
    source = "def said():\n    return 'first'\n"
    ask(source)
    (kept,) = (tmp_path / "kept/deep").iterdir()
    for broken in (b"", b"x", b"\xe3"):
        kept.write_bytes(broken)
        assert ask(source) == "1 first"
        assert ask(source) == "0 first"


def test_nothing_is_kept_where_nothing_can_be_written(ask, tmp_path):
    (tmp_path / "file").write_text("no directory")
    source = "def said():\n    return 'first'\n"
    # Once to learn the file's name and once to run it, as zipimport does.
    assert [ask(source, tmp_path / "file/kept") for _ in range(2)] == ["2 first"] * 2
