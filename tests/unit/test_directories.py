"""The module that has several directories in one call, asked as Ansible asks it."""

from __future__ import annotations

import json
import os
import stat
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
# No user of any machine.
NOBODY_YET = "servelab-none"


def ask(directories: list[dict], *options: str) -> dict:
    """What the module answered."""
    env = os.environ | {"ANSIBLE_LOAD_CALLBACK_PLUGINS": "1", "ANSIBLE_STDOUT_CALLBACK": "ansible.posix.json"}
    arguments = json.dumps({"directories": directories})
    command = ["ansible", "localhost", "-i", "localhost,", "-c", "local", "-m", "servelab.sglang.directories"]
    done = subprocess.run(
        [*command, "-a", arguments, "--diff", *options], cwd=ROOT, env=env, capture_output=True, text=True, check=False
    )
    report = json.loads(done.stdout[done.stdout.index("{") :])
    return report["plays"][0]["tasks"][0]["hosts"]["localhost"]


def mode_of(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_what_is_missing_is_made_and_what_differs_alone_changed(tmp_path):
    kept, closed, deep = tmp_path / "kept", tmp_path / "closed", tmp_path / "way/deep"
    kept.mkdir(mode=0o755)
    closed.mkdir(mode=0o755)
    wanted = [{"paths": [str(kept), str(deep)], "mode": "0755"}, {"paths": [str(closed)], "mode": "0750"}]
    checked = ask(wanted, "--check")
    assert checked["changed_paths"] == [str(deep), str(closed)]
    assert not deep.exists() and mode_of(closed) == 0o755
    done = ask(wanted)
    assert done["changed_paths"] == checked["changed_paths"]
    assert [mode_of(path) for path in (kept, deep, closed)] == [0o755, 0o755, 0o750]
    assert [each["before"].get("mode") for each in done["diff"]] == ["0700", "0755"]
    assert [each["after"]["mode"] for each in done["diff"]] == ["0755", "0750"]
    again = ask(wanted)
    assert (again["changed"], again["diff"]) == (False, [])


def test_a_link_to_a_directory_stays_one_and_what_it_names_is_changed(tmp_path):
    """As where somebody has the runs on a larger disk."""
    larger, link = tmp_path / "larger", tmp_path / "link"
    larger.mkdir(mode=0o700)
    link.symlink_to(larger)
    assert ask([{"paths": [str(link)], "mode": "0755"}])["changed"]
    assert link.is_symlink() and mode_of(larger) == 0o755


def test_nothing_changes_where_one_has_the_name_of_something_else(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    told = ask([{"paths": [str(tmp_path / name) for name in ("new", "file", "nowhere")], "mode": "0755"}])
    assert told["msg"] == (
        f"{tmp_path}/file, {tmp_path}/nowhere must be a directory and is something else; nothing was changed. "
        "Move it away first."
    )
    assert not (tmp_path / "new").exists() and (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("there", [False, True])
def test_check_mode_takes_an_owner_who_is_made_by_the_task_before(tmp_path, there):
    path = tmp_path / "home"
    if there:
        path.mkdir()
    wanted = [{"paths": [str(path)], "owner": NOBODY_YET, "group": NOBODY_YET, "mode": "0750"}]
    told = ask(wanted, "--check")
    assert told["changed_paths"] == [str(path)]
    assert "failed to look up user servelab-none" in ask(wanted)["msg"]
