"""A run whose load is made by another host of the inventory, over a local connection, end to end.

    pytest tests/local/test_load_host.py      (some minutes: SGLang's wheel is installed below .lab)

Another name of this machine makes the load, in a directory of its own, so that what
two machines do not share must have been carried.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from servelab.shared.supervision import Process

ROOT = Path(__file__).resolve().parents[2]
# Two levels below the checkout, as the variables of inventory/local want it.
INVENTORY = ROOT / ".lab/load-inventory"
PREFIX = ROOT / ".lab/lh"
PORT = 30940
KEYS = {"sglang_server_api_key": "a-key-for-the-load-only", "sglang_server_admin_api_key": "another-for-who-rules"}
RUNS = PREFIX / "var/lib/servelab/runs"


def inventory() -> dict[str, Any]:
    here = {
        "ansible_connection": "local",
        "ansible_become": False,
        "ansible_python_interpreter": "{{ ansible_playbook_python }}",
    }
    guest = {"servelab_prefix": str(PREFIX), "sglang_server_port": PORT, "lab_node_time_scale": 20} | KEYS
    return {
        "all": {"hosts": {"loader": here, "far": {"ansible_host": "192.0.2.1"}}},
        "gpu_guests": {"hosts": {"local": guest}},
        "lab_doubles": {"hosts": {"local": None}},
    }


def play(playbook: str, *words: str, check: bool = True) -> str:
    """Run a playbook on that inventory; its output. Fails with it unless `check` is False."""
    program = str(Path(sys.executable).with_name("ansible-playbook"))
    command = [program, "-i", str(INVENTORY), playbook, *(word for one in words for word in ("-e", one))]
    done = subprocess.run(command, cwd=ROOT, env=dict(os.environ), capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return " ".join(done.stdout.split())


@pytest.fixture(scope="module")
def keeper() -> Iterator[Process]:
    INVENTORY.mkdir(parents=True, exist_ok=True)
    (INVENTORY / "hosts.yml").write_text(json.dumps(inventory()))
    link = INVENTORY / "group_vars"
    link.unlink(missing_ok=True)
    link.symlink_to("../../inventory/local/group_vars")
    try:
        play("site.yml", '{"sglang_server_prove": []}')
        yield Process(str(PREFIX))
    finally:
        play("playbooks/lab_down.yml")
    assert not PREFIX.exists()


@pytest.fixture(scope="module")
def run(keeper: Process, tmp_path_factory: pytest.TempPathFactory) -> Path:
    results = tmp_path_factory.mktemp("results")
    wanted = [f"bench_results_dir={results}", "mode=baseline", "levels=1", "bench_invalid_ok=true", "campaign=far"]
    play("bench.yml", *wanted, "bench_load_host=loader")
    (bundle,) = [path for path in (results / "far").iterdir() if path.is_dir()]
    return bundle


def test_what_another_machine_measured_is_in_the_run(run: Path) -> None:
    record = json.loads((run / "run.json").read_text())
    assert record["status"] in ("ok", "invalid"), record["reason"]
    assert record["skipped"]["cards"] == "the load was made on loader, which does not see the cards"
    assert json.loads((run / "provenance.json").read_text())["client"]["host"] == "loader"
    (level,) = json.loads((run / "summary.json").read_text())["levels"]
    assert level["requests"]["completed"] > 0
    assert len((run / "levels/level-0001.jsonl").read_text().splitlines()) >= level["requests"]["completed"]


def test_the_key_went_there_and_is_nowhere_now(run: Path, keeper: Process) -> None:
    told = json.loads((run / "provenance.json").read_text())["client"]["command"]
    key_file = Path(told[told.index("--api-key-file") + 1])
    assert key_file.parent == RUNS
    assert not key_file.exists()
    for path in [*run.rglob("*"), *RUNS.rglob("*")]:
        assert not path.is_file() or KEYS["sglang_server_api_key"].encode() not in path.read_bytes(), path


def test_nothing_is_left_where_the_load_was_made(run: Path, keeper: Process) -> None:
    assert list(RUNS.iterdir()) == []
    assert keeper.running("servelab-*.service") == ["servelab-gpu-driver.service"]


def test_a_machine_that_cannot_reach_the_server_is_refused_before_anything_changes(keeper: Process) -> None:
    said = play("bench.yml", "mode=baseline", "levels=1", "bench_load_host=far", check=False)
    assert "local serves on 127.0.0.1 only, which bench_load_host far cannot reach" in said
    said = play("bench.yml", "mode=baseline", "levels=1", "bench_load_host=fra", check=False)
    assert "bench_load_host is fra, which is no host of the inventory" in said
    assert list(RUNS.iterdir()) == []
