"""The simulated driver and its nvidia-smi. Expected texts are written by hand after captures of the real tool 580."""

import contextlib
import io
import json
import os
import socket
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from servelab_lab import faults
from servelab_lab.gpu import Claim, driver, nvidia_smi
from servelab_lab.gpu.nodes import lay_terminals
from servelab_lab.gpu.scan import holders

HOLD = """
import os, sys
from pathlib import Path
from servelab_lab.gpu.claim import Claim
held = [Claim(int(card), int(mib) if mib else None, dev=Path(sys.argv[1]))
        for card, _, mib in (spec.partition("=") for spec in sys.argv[2:])]
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def dev(tmp_path):
    """A /dev with nvidia0…7, each /dev/full under another name."""
    directory = tmp_path / "dev"
    directory.mkdir()
    try:
        for name in [f"nvidia{i}" for i in range(8)] + ["nvidiactl"]:
            os.mknod(directory / name, stat.S_IFCHR | 0o666, os.makedev(1, 7))
        os.close(os.open(directory / "nvidia0", os.O_RDWR))
    except PermissionError:
        pytest.skip("making device nodes needs root and a file system that allows them")
    return directory


@pytest.fixture
def proc(tmp_path):
    """A /proc with the test's own processes only: this machine may carry labs, whose guests hold cards too."""
    directory = tmp_path / "proc"
    directory.mkdir()
    (directory / "self").symlink_to("/proc/self")
    see(directory, os.getpid())
    return directory


def see(proc, pid):
    (proc / str(pid)).symlink_to(f"/proc/{pid}")


@pytest.fixture
def node(tmp_path, dev, proc, monkeypatch):
    """A driver that answers; nvidia-smi is pointed at it."""
    sock, fault_file = tmp_path / "run/driver.sock", tmp_path / "faults.json"
    server = driver.serve(sock, 8, fault_file, proc)
    monkeypatch.setenv("SERVELAB_GPU_SOCKET", str(sock))
    monkeypatch.setenv("SERVELAB_GPU_DEV", str(dev))
    yield fault_file
    server.shutdown()
    server.server_close()


@contextlib.contextmanager
def holding(dev, *specs, name=None):
    """A process that holds cards: "3=47000" with that many MiB, "3" with a bare context."""
    argv = [sys.executable, "-c", HOLD, str(dev), *specs]
    if name:
        argv = ["bash", "-c", f'exec -a "{name}" "$0" "$@"', *argv]
    files = Path(driver.__file__).parents[2]
    env = {**os.environ, "PYTHONPATH": str(files)}
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)
    try:
        assert process.stdout.readline() == "held\n"
        see(dev.parent / "proc", process.pid)
        yield process
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()


def smi(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = nvidia_smi.main(list(arguments))
    return code, out.getvalue()


def used():
    code, out = smi("--query-gpu=memory.used", "--format=csv,noheader,nounits")
    assert code == 0
    return [int(line) for line in out.splitlines()]


def test_an_idle_machine_uses_the_few_mib_a_real_one_does(node):
    assert used() == [4] * 8


def test_memory_follows_who_holds_the_node(node, dev):
    with holding(dev, "3=47000", "5"):
        assert used() == [4, 4, 4, 47004, 4, 516, 4, 4]
    assert used() == [4] * 8


def test_claims_add_up_grow_and_are_released(node, dev):
    first = Claim(2, 1000, dev=dev)
    second = Claim(2, 200, dev=dev)
    assert used()[2] == 1204
    second.resize(300)
    assert used()[2] == 1304
    first.release()
    second.release()
    second.release()
    assert used()[2] == 4
    with pytest.raises(ValueError, match="released"):
        second.resize(1)


def test_a_missing_node_cannot_be_claimed(dev):
    (dev / "nvidia6").unlink()
    with pytest.raises(FileNotFoundError):
        Claim(6, 10, dev=dev)


def test_a_node_that_was_unlinked_is_still_held(dev, proc):
    with holding(dev, "1=300") as process:
        (dev / "nvidia1").unlink()
        assert [(h.pid, h.card, h.mib) for h in holders(proc)] == [(process.pid, 1, 300)]


def test_another_device_under_the_name_is_no_card(dev, proc):
    (dev / "nvidia0").unlink()
    os.mknod(dev / "nvidia0", stat.S_IFCHR | 0o666, os.makedev(1, 3))
    with holding(dev, "0"):
        assert holders(proc) == []


def test_terminals_are_other_cards_than_the_nodes_of_a_lab_on_the_same_machine(dev, proc):
    """The processes of a lab's guests can be seen from the machine that carries it."""
    before = set(os.listdir("/proc/self/fd"))  # noqa: PTH208
    terminals = dev.parent / "terminals"
    numbers = lay_terminals(8, terminals)
    try:
        with holding(dev, "3=47000"), holding(terminals, "5=700") as own:
            assert [(h.pid, h.card, h.mib) for h in holders(proc, numbers)] == [(own.pid, 5, 700)]
            # Nor does a lab's driver know the terminals.
            assert [(h.card, h.mib) for h in holders(proc)] == [(3, 47000)]
    finally:
        for descriptor in set(os.listdir("/proc/self/fd")) - before:  # noqa: PTH208
            with contextlib.suppress(OSError):
                os.close(int(descriptor))


def test_a_child_with_inherited_files_has_no_memory_of_its_own(node, dev, proc):
    held = Claim(4, 700, dev=dev, inheritable=True)
    child = subprocess.Popen(["sleep", "30"], close_fds=False)
    see(proc, child.pid)
    try:
        assert os.stat(f"/proc/{child.pid}/fd/{held.fileno()}").st_rdev == os.makedev(1, 7)  # noqa: PTH116
        assert used()[4] == 704
        assert [h.pid for h in holders(proc) if h.card == 4] == [os.getpid()]
        held.release()
        assert [(h.pid, h.mib) for h in holders(proc) if h.card == 4] == [(child.pid, 700)]
    finally:
        child.kill()
        child.wait()


def test_the_looking_tools_are_no_users(dev, proc):
    script = dev.parent / "nvidia-smi"
    script.write_text(f"#!{sys.executable}\nf = open('{dev}/nvidia0')\nprint('held', flush=True)\ninput()\n")
    script.chmod(0o755)
    process = subprocess.Popen([script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "held\n"
    see(proc, process.pid)
    assert holders(proc) == []
    process.communicate("\n")


def test_list(node):
    code, out = smi("-L")
    assert code == 0
    lines = out.splitlines()
    assert len(lines) == 8
    assert lines[0] == (
        "GPU 0: NVIDIA RTX PRO 6000 Blackwell Server Edition (UUID: GPU-f0ac3d23-dbdb-51b6-9e32-1a21431fc286)"
    )


def test_query_names_fields_in_full_and_units_in_header_and_cells(node):
    fields = "index,name,memory.total,memory.used,memory.free,utilization.gpu,clocks.sm,clocks.mem,power.draw"
    code, out = smi(
        f"--query-gpu={fields},temperature.gpu,compute_cap,persistence_mode,pcie.link.gen.max", "--format=csv"
    )
    assert code == 0
    assert out.splitlines()[:2] == [
        "index, name, memory.total [MiB], memory.used [MiB], memory.free [MiB], utilization.gpu [%], "
        "clocks.current.sm [MHz], clocks.current.memory [MHz], power.draw [W], temperature.gpu, compute_cap, "
        "persistence_mode, pcie.link.gen.max",
        "0, NVIDIA RTX PRO 6000 Blackwell Server Edition, 97887 MiB, 4 MiB, 97246 MiB, 0 %, "
        "180 MHz, 405 MHz, 33.10 W, 31, 12.0, Enabled, 5",
    ]


def test_noheader_and_nounits(node):
    assert smi("--query-gpu=index,memory.total,fan.speed", "--format=csv,noheader,nounits", "-i", "7") == (
        0,
        "7, 97887, [N/A]\n",
    )
    assert smi("--query-gpu=memory.total", "--format=csv,nounits", "--id=0") == (0, "memory.total [MiB]\n97887\n")


def test_an_unknown_field_is_refused_on_stdout_with_2(node):
    assert smi("--query-gpu=index,nosuchfield", "--format=csv") == (
        2,
        'Field "nosuchfield" is not a valid field to query.\n\n',
    )


@pytest.mark.parametrize("arguments", [["--query-gpu=index"], ["--frobnicate"], ["topo", "-x"], ["-i"]])
def test_bad_arguments_are_2(node, arguments):
    assert smi(*arguments)[0] == 2


def test_a_loop_repeats_the_rows_and_not_the_header(node, monkeypatch):
    naps = []

    def nap(seconds):
        naps.append(seconds)
        if len(naps) == 3:
            raise KeyboardInterrupt

    monkeypatch.setattr(nvidia_smi.time, "sleep", nap)
    out = io.StringIO()
    with contextlib.redirect_stdout(out), pytest.raises(KeyboardInterrupt):
        nvidia_smi.main(["--query-gpu=index,enforced.power.limit", "--format=csv", "-i", "7", "--loop-ms=500"])
    assert naps == [0.5, 0.5, 0.5]
    assert out.getvalue() == "index, enforced.power.limit [W]\n" + 3 * "0, 600.00 W\n".replace("0,", "7,", 1)


def test_compute_apps(node, dev):
    with holding(dev, "0=90210", "7", name="sglang::scheduler_TP0") as process:
        code, out = smi("--query-compute-apps=pid,process_name,gpu_bus_id,used_memory", "--format=csv")
    assert code == 0
    assert out == (
        "pid, process_name, gpu_bus_id, used_gpu_memory [MiB]\n"
        f"{process.pid}, sglang::scheduler_TP0, 00000000:01:00.0, 90210 MiB\n"
        f"{process.pid}, sglang::scheduler_TP0, 00000000:E1:00.0, 512 MiB\n"
    )


def test_no_apps_is_a_header_alone(node):
    assert smi("--query-compute-apps=gpu_uuid,pid", "--format=csv") == (0, "gpu_uuid, pid\n")


def test_table(node, dev):
    with holding(dev, "1=75218", name="sglang::scheduler_TP1") as process:
        code, out = smi()
    assert code == 0
    lines = out.splitlines()
    assert lines[1:16] == [
        "+-----------------------------------------------------------------------------------------+",
        "| NVIDIA-SMI 580.95.05              Driver Version: 580.95.05      CUDA Version: 13.0     |",
        "+-----------------------------------------+------------------------+----------------------+",
        "| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |",
        "| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |",
        "|                                         |                        |               MIG M. |",
        "|=========================================+========================+======================|",
        "|   0  NVIDIA RTX PRO 6000 Blac...    On  |   00000000:01:00.0 Off |                    0 |",
        "| N/A   31C    P8             33W /  600W |       4MiB /  97887MiB |      0%      Default |",
        "|                                         |                        |             Disabled |",
        "+-----------------------------------------+------------------------+----------------------+",
        "|   1  NVIDIA RTX PRO 6000 Blac...    On  |   00000000:21:00.0 Off |                    0 |",
        "| N/A   41C    P1             84W /  600W |   75222MiB /  97887MiB |      0%      Default |",
        "|                                         |                        |             Disabled |",
        "+-----------------------------------------+------------------------+----------------------+",
    ]
    assert lines[-8:] == [
        "",
        "+-----------------------------------------------------------------------------------------+",
        "| Processes:                                                                              |",
        "|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |",
        "|        ID   ID                                                               Usage      |",
        "|=========================================================================================|",
        f"|    1   N/A  N/A {process.pid:15}      C   sglang::scheduler_TP1                 75218MiB |",
        "+-----------------------------------------------------------------------------------------+",
    ]


def test_table_without_processes(node):
    assert smi()[1].splitlines()[-2] == (
        "|  No running processes found                                                             |"
    )


def test_topo_is_two_islands_and_underlined_in_a_pipe(node):
    code, out = smi("topo", "-m")
    assert code == 0
    lines = out.splitlines()
    assert lines[0] == (
        "\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\tCPU Affinity\tNUMA Affinity\tGPU NUMA ID\x1b[0m"
    )
    assert lines[1] == "GPU0\t X \tNODE\tNODE\tNODE\tSYS\tSYS\tSYS\tSYS\t0-31,64-95\t0\t\tN/A"
    assert lines[5] == "GPU4\tSYS\tSYS\tSYS\tSYS\t X \tNODE\tNODE\tNODE\t32-63,96-127\t1\t\tN/A"
    assert lines[9:12] == ["", "Legend:", ""]


@pytest.mark.parametrize(("capability", "word"), [("r", "OK"), ("w", "OK"), ("n", "NS")])
def test_p2p(node, capability, word):
    code, out = smi("topo", "-p2p", capability)
    assert code == 0
    assert out.splitlines()[:2] == [
        " \t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tGPU4\tGPU5\tGPU6\tGPU7\t\x1b[0m",
        " GPU0\tX\t" + f"{word}\t" * 7,
    ]


def test_report_has_bar1(node, dev):
    with holding(dev, "0=100"):
        out = smi("-q", "-i", "0")[1]
    assert "Attached GPUs                                          : 1\nGPU 00000000:01:00.0\n" in out
    assert "    BAR1 Memory Usage\n        Total                                          : 131072 MiB\n" in out
    assert "        Used                                           : 104 MiB\n" in out


def test_a_guest_sees_its_own_cards_only_and_counts_from_0(node, dev):
    for minor in (0, 1, 2, 4, 5, 7):
        (dev / f"nvidia{minor}").unlink()
    assert smi("--query-gpu=index,pci.bus_id", "--format=csv,noheader") == (
        0,
        "0, 00000000:61:00.0\n1, 00000000:C1:00.0\n",
    )


NO_DRIVER = (
    "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver. "
    "Make sure that the latest NVIDIA driver is installed and running.\n\n"
)


def test_no_driver_is_9(dev, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVELAB_GPU_SOCKET", str(tmp_path / "none.sock"))
    monkeypatch.setenv("SERVELAB_GPU_DEV", str(dev))
    assert smi() == (9, NO_DRIVER)


def test_no_control_node_is_9_and_no_card_is_6(node, dev):
    for minor in range(8):
        (dev / f"nvidia{minor}").unlink()
    assert smi() == (6, "No devices were found\n")
    (dev / "nvidiactl").unlink()
    assert smi() == (9, NO_DRIVER)


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("no_driver", 9, NO_DRIVER),
        ("no_devices", 6, "No devices were found\n"),
        ("mismatch", 18, "Failed to initialize NVML: Driver/library version mismatch\nNVML library version: 580.95\n"),
    ],
)
def test_faults(node, fault, code, text):
    node.write_text(json.dumps({"gpu": {"fault": fault}}))
    assert smi() == (code, text)
    node.unlink()
    assert smi()[0] == 0


def test_a_hanging_driver_keeps_the_asker_waiting(node):
    node.write_text(json.dumps({"gpu": {"fault": "hang"}}))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(0.3)
        connection.connect(os.environ["SERVELAB_GPU_SOCKET"])
        with pytest.raises(TimeoutError):
            connection.recv(1)


def test_a_sick_card_answers_with_a_sentinel_without_unit(node):
    node.write_text(json.dumps({"gpu": {"values": {"3": {"memory.used": "[GPU requires reset]"}}}}))
    assert smi("--query-gpu=index,memory.used", "--format=csv,noheader", "-i", "2,3") == (
        0,
        "2, 4 MiB\n3, [GPU requires reset]\n",
    )


IN_USE = """\
The following GPUs could not be reset:
  GPU 00000000:61:00.0: In use by another client

1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, \
graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). \
Please first kill all processes using this device and all compute applications running in the system.
"""


@pytest.fixture
def switchboard(node, monkeypatch):
    """The node of the switches is the tests' own."""
    place = faults.Place(node.parent, node.parent / "dev")
    monkeypatch.setattr(faults, "Place", lambda: place)
    return place


def test_a_card_is_reset_when_nobody_has_it_and_without_persistence_mode(node, dev, switchboard):
    assert faults.main(["needs_reset", "on"], switchboard) == 0
    assert smi("--gpu-reset", "-i", "3") == (255, IN_USE)
    assert smi("-pm", "0", "-i", "3") == (0, "Disabled persistence mode for GPU 00000000:61:00.0.\nAll done.\n")
    assert smi("--query-gpu=persistence_mode", "--format=csv,noheader", "-i", "2,3") == (0, "Enabled\nDisabled\n")
    with holding(dev, "3"):
        assert smi("--gpu-reset", "-i", "3") == (255, IN_USE)
    assert faults.switched_on(switchboard) == ["needs_reset", "persistence_off"]
    assert smi("-r", "-i", "3") == (0, "GPU 00000000:61:00.0 was successfully reset.\nAll done.\n")
    assert smi("-pm", "1", "-i", "3") == (0, "Enabled persistence mode for GPU 00000000:61:00.0.\nAll done.\n")
    assert faults.switched_on(switchboard) == []


def test_a_guest_resets_nothing(node, monkeypatch):
    elsewhere = faults.Place(node.parent / "not-here", node.parent / "dev")
    monkeypatch.setattr(faults, "Place", lambda: elsewhere)
    node.write_text(json.dumps({"gpu": {"values": {"3": {"persistence_mode": "Disabled"}}}}))
    status, said = smi("--gpu-reset", "-i", "3")
    assert status == 255 and "  GPU 00000000:61:00.0: Insufficient Permissions\n" in said
    assert smi("-pm", "1", "-i", "3")[0] == 4


def test_a_broken_fault_file_breaks_nothing(node, capsys):
    node.write_text("{")
    assert smi("-L")[0] == 0


def test_everyone_may_ask(node):
    assert stat.S_IMODE(Path(os.environ["SERVELAB_GPU_SOCKET"]).stat().st_mode) == 0o666


def test_a_card_that_fell_off_the_bus_is_one_sentence_and_15(node):
    node.write_text(json.dumps({"gpu": {"lost": [3]}}))
    sentence = (
        "Unable to determine the device handle for GPU3: 0000:61:00.0: GPU is lost.  "
        "Reboot the system to recover this GPU\n"
    )
    assert smi() == (15, sentence)
    assert smi("--query-gpu=index", "--format=csv,noheader") == (15, sentence)
    assert smi("--query-gpu=index", "--format=csv,noheader", "-i", "2,4") == (0, "2\n4\n")


def test_what_cannot_be_read_is_err_in_the_table(node):
    unknown = dict.fromkeys(("power.draw", "temperature.gpu"), "[Unknown Error]")
    node.write_text(json.dumps({"gpu": {"values": {"3": unknown}}}))
    code, out = smi()
    (row,) = [line for line in out.splitlines() if "ERR!" in line]
    assert code == 0
    assert row == ("| N/A  ERR!    P8            ERR! /  600W |       4MiB /  97887MiB |      0%      Default |")


def test_another_node_has_other_cards(node, tmp_path, dev, proc, monkeypatch):
    first = smi("-L")[1]
    server = driver._Server(tmp_path / "second.sock", 8, node, proc, "pve2")
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    monkeypatch.setenv("SERVELAB_GPU_SOCKET", str(tmp_path / "second.sock"))
    try:
        second = smi("-L")[1]
    finally:
        server.shutdown()
        server.server_close()
    assert first.count("GPU-") == second.count("GPU-") == 8
    assert not set(first.splitlines()) & set(second.splitlines())
