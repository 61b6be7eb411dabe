"""What load_probe says of a client, however it stands or ended. Properties as `systemctl show` prints them."""

from typing import Any

import pytest

from servelab.shared.load_progress import judge, read_progress

RUNNING = {
    "ActiveState": "active",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "InvocationID": "a1",
    "Result": "success",
}
GONE = {
    "LoadState": "not-found",
    "ActiveState": "inactive",
    "ExecMainCode": "0",
    "ExecMainStatus": "0",
    "InvocationID": "",
}
WORKING = {"state": "working", "phase": "measuring", "sentence": "level 10: measuring", "marker": "5:10"}
DONE = {"state": "done", "phase": "finished", "sentence": "all levels measured", "marker": "9", "valid": True}
INVALID = DONE | {"valid": False}
REFUSED = {"state": "failed", "phase": "starting", "sentence": "no answer", "marker": "2", "cause": "no answer from X"}


def ended(code: str, status: str, result: str = "exit-code") -> dict[str, str]:
    return {
        "ActiveState": "failed",
        "ExecMainCode": code,
        "ExecMainStatus": status,
        "Result": result,
        "InvocationID": "a1",
    }


def test_before_the_first_word() -> None:
    seen = judge("u", RUNNING, None)
    assert (seen["state"], seen["phase"], seen["valid"]) == ("working", "starting", None)


def test_the_marker_changes_with_progress_and_with_another_start() -> None:
    first = judge("u", RUNNING, WORKING)
    assert first["progress"] == "level 10: measuring"
    assert first["marker"] == judge("u", RUNNING, dict(WORKING))["marker"]
    assert first["marker"] != judge("u", RUNNING, WORKING | {"marker": "5:11"})["marker"]
    assert first["marker"] != judge("u", RUNNING | {"InvocationID": "b2"}, WORKING)["marker"]


def test_a_client_that_says_done_and_still_runs_is_not_done() -> None:
    assert judge("u", RUNNING, DONE)["state"] == "working"


@pytest.mark.parametrize(
    ("unit", "record", "valid"),
    [
        (ended("1", "0", "success") | {"ActiveState": "inactive"}, DONE, True),
        (ended("1", "3"), INVALID, False),
        (GONE, DONE, True),
        (GONE, INVALID, False),
    ],
)
def test_done(unit: dict[str, str], record: dict[str, Any], valid: bool) -> None:
    seen = judge("u", unit, record)
    assert (seen["state"], seen["valid"], seen["cause"]) == ("done", valid, None)


@pytest.mark.parametrize(
    ("unit", "record", "words"),
    [
        (ended("1", "4"), REFUSED, "no answer from X"),
        (GONE, REFUSED, "no answer from X"),
        (ended("1", "2"), None, "options"),
        (ended("1", "1"), WORKING, "status 1"),
        (ended("1", "0"), WORKING, "status 0 before it was done"),
        (ended("2", "9", "signal"), WORKING, "signal 9"),
        (ended("2", "9", "oom-kill"), WORKING, "memory ran out"),
        (GONE, None, "never started"),
        (GONE, WORKING, "gone"),
        (ended("2", "15", "signal"), DONE | {"state": "working"}, "signal 15"),
    ],
)
def test_failed(unit: dict[str, str], record: dict[str, Any] | None, words: str) -> None:
    seen = judge("u", unit, record)
    assert seen["state"] == "failed"
    assert words in seen["cause"]
    assert seen["remedy"]


@pytest.mark.parametrize("text", [None, "", "{", "[]", "{}", '{"state": 3}'])
def test_no_progress_is_no_progress(text: str | None) -> None:
    assert read_progress(text) is None
