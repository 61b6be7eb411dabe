"""Resetting a card: what nvidia-smi is asked, in which order, and what is said where it refuses."""

from __future__ import annotations

import pytest

from servelab.shared.gpu_reset import reset, why_not

IN_USE = """
The following GPUs could not be reset:
  GPU 00000000:1A:00.0: In use by another client

1 device is currently being used by one or more other processes (e.g. Fabric Manager, CUDA application). Please first
kill all processes using this device and all compute applications running in the system.
"""


class Smi:
    """An nvidia-smi that says what it is told to, for each of its first options."""

    def __init__(self, **said: tuple[int, str] | None) -> None:
        self.said = {"query": (0, "Disabled\n"), "pm0": (0, "All done."), "pm1": (0, "All done."), **said}
        self.asked: list[str] = []

    def __call__(self, argv, timeout):
        assert argv[0] == "nvidia-smi" and argv[-2:] == ["-i", "GPU-a"] and timeout == 5
        option = {"-pm": f"pm{argv[2]}", "--gpu-reset": "reset"}.get(argv[1], "query")
        self.asked.append(option)
        answer = self.said[option]
        return answer and (*answer, "")


def test_a_card_is_reset():
    smi = Smi(reset=(0, "GPU 00000000:1A:00.0 was successfully reset.\nAll done.\n"))
    assert reset("GPU-a", 5, smi) == ("reset", "GPU 00000000:1A:00.0 was successfully reset. All done.")
    assert smi.asked == ["query", "reset"]


@pytest.mark.parametrize("answer", [(0, "reset."), (255, IN_USE), None])
def test_persistence_mode_is_off_for_the_reset_and_on_again_whatever_comes_of_it(answer):
    smi = Smi(query=(0, "Enabled\n"), reset=answer)
    outcome, _ = reset("GPU-a", 5, smi)
    assert outcome == ("reset" if answer == (0, "reset.") else "failed")
    assert smi.asked == ["query", "pm0", "reset", "pm1"]


def test_where_persistence_mode_stays_nothing_is_reset():
    smi = Smi(query=(0, "Enabled\n"), pm0=(4, "Unable to set persistence mode: Insufficient Permissions"))
    outcome, said = reset("GPU-a", 5, smi)
    assert outcome == "failed" and "could not be switched off: Unable to set persistence mode" in said
    assert smi.asked == ["query", "pm0"]


def test_a_persistence_mode_that_does_not_come_back_is_told_with_its_remedy():
    smi = Smi(query=(0, "Enabled\n"), reset=(0, "reset."), pm1=(4, "no"))
    outcome, said = reset("GPU-a", 5, smi)
    assert outcome == "reset" and "run `nvidia-smi -pm 1 -i GPU-a` on the node (no)" in said


@pytest.mark.parametrize(
    ("status", "text", "remedy"),
    [
        (255, IN_USE, "nvidia_drm with modeset=1"),
        (3, "GPU Reset couldn't run because GPU 00000000:01:00.0 is the primary GPU.", "console is on it"),
        (255, "The following GPUs could not be reset:\n  GPU 00000000:8B:00.0: Not Supported", "NVLink"),
        (3, "Resetting GPU 00000000:00:03.0 is not supported.", "NVLink"),
        (255, "The following GPUs could not be reset:\n  GPU 0: Insufficient Permissions", "only root on the node"),
    ],
)
def test_a_refusal_is_told_with_its_remedy(status, text, remedy):
    outcome, said = reset("GPU-a", 5, Smi(reset=(status, text)))
    assert outcome == "failed" and said.startswith("nvidia-smi: ") and remedy in said


def test_what_nobody_knows_is_told_as_it_is():
    assert reset("GPU-a", 5, Smi(reset=(7, "Something new"))) == ("failed", "nvidia-smi: Something new")
    assert reset("GPU-a", 5, Smi(reset=(7, ""))) == ("failed", "nvidia-smi: exit status 7")


def test_one_that_never_answers_is_not_waited_for():
    assert reset("GPU-a", 5, Smi(query=None, reset=None)) == (
        "failed",
        "nvidia-smi did not answer within 5 s; only a reboot of the node is left",
    )


def test_without_nvidia_smi_that_is_said():
    def missing(argv, timeout):
        raise FileNotFoundError(argv[0])

    assert reset("GPU-a", 5, missing) == ("failed", "nvidia-smi is not installed here")


def holder(name, gpus, vmid=None, pid=9):
    return {"pid": pid, "name": name, "gpus": gpus, "vmid": vmid}


@pytest.mark.parametrize(
    ("holders", "unreadable", "why"),
    [
        ([], [], None),
        ([holder("python3", [4])], [], None),
        ([holder("python3", [3], 130)], [], "PID 9 (python3) of guest 130 has it open; stop that first"),
        ([holder("dcgm-exporter", [0, 3])], [], "PID 9 (dcgm-exporter) of the node has it open; stop that first"),
        ([holder("sglang", [])], [], "PID 9 (sglang) of the node has it open; stop that first"),
        # It lets go when persistence mode is switched off; its name is cut to 15 characters.
        ([holder("nvidia-persiste", [0, 1, 2, 3])], [], None),
        (
            [],
            [{"pid": 8, "name": "x"}],
            "PID 8 (x) could not be looked at, so nobody can say that it holds no GPU",
        ),
    ],
)
def test_who_keeps_a_card_from_being_reset(holders, unreadable, why):
    assert why_not({"holders": holders, "unreadable": unreadable}, [0, 1, 2, 3]) == why
