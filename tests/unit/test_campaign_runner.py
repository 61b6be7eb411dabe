"""The runner with a real ansible-runner and a bench.yml that only writes the bundle that the real one would."""

import json

import pytest

from servelab.campaign import spec
from servelab.campaign.runner import BenchRunner
from servelab.campaign.spec import CampaignError

BENCH = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
    path: "{{ bench_results_dir }}/{{ campaign }}/20261129T101500Z-{{ mode }}"
  tasks:
    - name: Refuse a broken mode
      ansible.builtin.fail:
        msg: "There is no mode broken."
      when: mode == 'broken'
    - name: Make the directory
      ansible.builtin.file: {path: "{{ path }}", state: directory}
    - name: Write the run
      ansible.builtin.copy:
        dest: "{{ path }}/run.json"
        content: "{{ {'schema': 'servelab.run/1', 'mode': mode, 'status': 'invalid', 'reason': levels ~ ' ' ~ bench_seed
          ~ ' ' ~ bench_min_seconds ~ ' ' ~ bench_invalid_ok ~ ' ' ~ whose | default('nobody')
          ~ ' ' ~ bench_left_behind | default('nothing')} | to_json }}"
    - name: Write where it comes from
      ansible.builtin.copy:
        dest: "{{ path }}/provenance.json"
        content: "{{ {'start': {'id': 'abc', 'left_running': bench_leave_running | default(false)}} | to_json }}"
"""
STOP = """
- hosts: localhost
  connection: local
  gather_facts: false
  vars:
    ansible_python_interpreter: "{{ ansible_playbook_python }}"
  tasks:
    - name: Say that it was played
      ansible.builtin.file: {path: "{{ whose }}", state: touch}
"""


@pytest.fixture
def runner(tmp_path):
    (tmp_path / "bench.yml").write_text(BENCH)
    (tmp_path / "ansible.cfg").write_text("[defaults]\n")
    wanted = spec.check(
        "demo",
        {"description": "x", "modes": ["a", "b"], "levels": [1], "variables": {"bench_min_seconds": 6}},
    )
    return BenchRunner(tmp_path, tmp_path / "results", wanted, {})


def test_the_start_is_told_where_its_server_was_left(runner):
    assert runner("baseline", [1], 7, print, lambda: False, {"bench_leave_running": True}).start == "abc"
    assert runner("eagle3", [1], 7, print, lambda: False, {}).start is None


def test_what_was_left_is_stopped_by_the_playbook_for_it(runner, tmp_path):
    (tmp_path / "playbooks").mkdir()
    (tmp_path / "playbooks/stop.yml").write_text(STOP)
    played = tmp_path / "played"
    BenchRunner(tmp_path, runner.results, runner.spec, {"whose": str(played)}).stop_servers()
    assert played.exists()


def test_a_run_is_found_with_its_status_and_everything_was_passed_on(runner, tmp_path):
    outcome = runner("baseline", [1, 10], 7, print, lambda: False, {})
    assert (outcome.status, outcome.run_id) == ("invalid", "20261129T101500Z-baseline")
    assert outcome.reason == "1,10 7 6 True nobody nothing"
    run = json.loads((tmp_path / "results" / "demo" / outcome.run_id / "run.json").read_text())
    assert run["mode"] == "baseline"


def test_a_run_without_a_bundle_has_the_tasks_message(runner):
    outcome = runner("broken", [1], 7, print, lambda: False, {})
    assert (outcome.status, outcome.run_id) == ("failed", None)
    assert outcome.reason == "Refuse a broken mode: There is no mode broken."


def test_a_cancelled_run_is_made_again(runner):
    assert runner("baseline", [1], 7, print, lambda: True, {}).status == "cancelled"


def test_a_directory_that_is_no_collection(tmp_path):
    wanted = spec.check("demo", {"description": "x", "modes": ["a", "b"], "levels": [1]})
    with pytest.raises(CampaignError, match=r"holds no bench\.yml"):
        BenchRunner(tmp_path, tmp_path, wanted, {})


def test_its_inventory_and_what_only_this_run_must_know(runner, tmp_path):
    hosts = tmp_path / "mine"
    hosts.write_text("localhost whose=mine\n")
    mine = BenchRunner(tmp_path, runner.results, runner.spec, {}, [str(hosts)])
    outcome = mine("baseline", [1], 7, print, lambda: False, {"bench_left_behind": "something"})
    assert outcome.reason == "1 7 6 True mine something"
