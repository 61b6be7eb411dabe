"""The catalogue of failures: every text it cites stands where it says, and every failure is named in words of others.

The logs are a real server's (cases/sglang-real), the simulated server's in the words of several releases, and lines
written down by hand from the sources; none of them was made with the patterns.
"""

from __future__ import annotations

import argparse
import asyncio.base_events
import asyncio.selector_events
import inspect
import re
from pathlib import Path

import pytest
from sglang_wheels import other_wheel, texts
from sim_process import Sim, release

from servelab.shared.failure_catalogue import CATALOGUE, NOTICES, Cited
from servelab.shared.readiness_diagnosis import Exit, diagnose, notices, stalled
from servelab.shared.readiness_log import start_progress
from servelab.shared.sglang_release import Release

REAL = Path(__file__).parent / "cases" / "sglang-real"
# What torch 2.11 said on CPUs when processes with Gloo met, did not meet, or were killed; the frames were left out.
MEETINGS = REAL.parent / "torch-rendezvous"
RELEASES = ("0.5.8", "0.5.10", "0.5.12", "0.5.15", "0.5.19", "0.5.20", "0.5.23")
# Where a text is looked up that SGLang only passes on. The versions are those that 0.5.15 comes with.
OTHERS = {
    "flashinfer-python": "0.6.12",
    "transformers": "5.12.1",
    "huggingface-hub": "1.4.1",
    "nvidia-cuda-runtime": "13.0.96",
    "apache-tvm-ffi": "0.1.9",
}


def real(name: str) -> str:
    with (REAL / f"{name}.log").open(encoding="utf-8", newline="") as handle:
        return handle.read()


# -- citations ----------------------------------------------------------------------------------------------------

CITED = sorted({(cited.source, cited.text) for entry in (*CATALOGUE, *NOTICES) for cited in entry.cited})
OURS = [cited for entry in (*CATALOGUE, *NOTICES) for cited in entry.cited if cited.source == "sglang"]


@pytest.mark.parametrize("version", RELEASES)
def test_what_is_cited_from_sglang_stands_in_its_releases_and_in_no_other(version: str) -> None:
    source = texts(version)
    here = Release.parse(version)

    def meant(cited: Cited) -> bool:
        return Release.parse(cited.since) <= here and (cited.until is None or here <= Release.parse(cited.until))

    assert {cited.text: cited.text in source for cited in OURS} == {cited.text: meant(cited) for cited in OURS}


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_what_is_cited_from_other_packages_stands_there(name: str) -> None:
    content = other_wheel(name, OTHERS[name])
    wanted = [text for source, text in CITED if source == name]
    assert wanted
    assert [text for text in wanted if text.encode() not in content] == []


def test_what_is_cited_from_python_stands_there() -> None:
    modules = (argparse, asyncio.base_events, asyncio.selector_events)
    source = "".join(inspect.getsource(module) for module in modules) + " ".join(dir(__builtins__)) + "PermissionError"
    assert [text for origin, text in CITED if origin == "stdlib" and text not in source] == []


def test_what_is_cited_from_a_log_stands_in_a_real_one() -> None:
    logs = "".join(path.read_text(encoding="utf-8", errors="replace") for path in REAL.glob("*.log"))
    logs += (REAL.parent / "10-ready-then-dead" / "server.log").read_text()
    logs += "".join(path.read_text() for path in MEETINGS.glob("*.log"))
    assert [text for origin, text in CITED if origin == "log" and text not in logs] == []


def test_nothing_is_cited_from_nowhere() -> None:
    assert {source for source, _ in CITED} <= {"sglang", "stdlib", "log", "kernel", *OTHERS}
    assert all(entry.cited for entry in (*CATALOGUE, *NOTICES))


# -- the real server ----------------------------------------------------------------------------------------------

REAL_ENDS = {
    "bad_model_path": ("missing model", "'/nonexistent/model'"),
    "oom_graph_capture": ("out of memory at graph capture", "(try 0.95)"),
    "oom_memfrac_099": ("out of memory at graph capture", "(try 0.94)"),
    "oom_pool_too_small": ("KV pool too small", "Raise sglang_server_mem_fraction_static (try 0.06)"),
    "port_in_use": ("port in use", "port 30000 on 127.0.0.1"),
    "sigkill_launcher": ("killed", "somebody killed the server"),
    "sigkill_scheduler": ("lost child", "a child process of the server died"),
    "sigkill_scheduler_serving": ("lost child", "a child process of the server died"),
    "sigterm_adaptive": ("asked to stop", "SIGTERM"),
    "usage_bad_flag": ("usage", "--no-such-flag 1"),
    "usage_missing_model": ("usage", "--model-path"),
}
ENDS_AS = {
    "bad_model_path": Exit("exited", 1, "exit-code"),
    "oom_graph_capture": Exit("killed", 9, "signal"),
    "oom_memfrac_099": Exit("killed", 9, "signal"),
    "oom_pool_too_small": Exit("killed", 9, "signal"),
    "port_in_use": Exit("exited", 3, "exit-code"),
    "sigkill_launcher": Exit("killed", 9, "signal"),
    "sigkill_scheduler": Exit("killed", 9, "signal"),
    "sigkill_scheduler_serving": Exit("killed", 9, "signal"),
    "sigterm_adaptive": Exit("killed", 9, "signal"),
    "usage_bad_flag": Exit("exited", 2, "exit-code"),
    "usage_missing_model": Exit("exited", 2, "exit-code"),
}


def as_it_is(text: str) -> str:
    return text


def with_other_ranks(text: str) -> str:
    """As from the second pipeline stage of an expert-parallel server."""
    return re.sub(r" TP(\d)\] ", r" DP0 PP1 TP\1 EP\1] ", text)


def as_the_journal_prints_it(text: str) -> str:
    """`journalctl -o short`: a prefix of its own before every line."""
    return "\n".join(f"Nov 29 15:33:47 guest1 python3[4127]: {line}" for line in re.split(r"[\r\n]+", text))


def with_stamps(text: str) -> str:
    return "\n".join(f"{at / 7:.3f} E {line}" for at, line in enumerate(re.split(r"[\r\n]+", text)))


def in_colour(text: str) -> str:
    return re.sub(r"(?m)^(\[[^\]]+\])", "\x1b[33m\\1\x1b[0m", text)


def from_windows(text: str) -> str:
    return text.replace("\n", "\r\n")


def with_the_ranks_swapped(text: str) -> str:
    return text.replace("TP0]", "TPx]").replace("TP1]", "TP0]").replace("TPx]", "TP1]")


def joined(text: str) -> str:
    """Two ranks that write at once share a physical line."""
    return re.sub(r"\n(?=\[[^\]]+ TP1\] )", "", text)


@pytest.mark.parametrize("known", [True, False], ids=["with its exit", "log alone"])
@pytest.mark.parametrize(
    "form",
    [as_it_is, with_other_ranks, as_the_journal_prints_it, with_stamps, in_colour, from_windows,
     with_the_ranks_swapped, joined],
)  # fmt: skip
@pytest.mark.parametrize("case", sorted(REAL_ENDS))
def test_real_ends_are_named_in_any_form(case: str, form, known: bool) -> None:  # type: ignore[no-untyped-def]
    name, words = REAL_ENDS[case]
    found = diagnose(form(real(case)), ENDS_AS[case] if known else None)
    assert found.name == name
    assert words in f"{found.cause} {found.remedy} {found.evidence}"
    assert found.failed == (name != "asked to stop")
    assert found.evidence


@pytest.mark.parametrize("case", ["sigterm_adaptive", "sigkill_launcher", "eagle3_start"])
def test_nothing_is_wrong_with_a_start_while_it_goes_well(case: str) -> None:
    """At no line of a start that ended well does its log show a failure."""
    lines = real(case).split("\n")
    stop = next(
        (at for at, line in enumerate(lines) if "SIGTERM received" in line or "resource_tracker" in line), len(lines)
    )
    for end in range(1, stop, 7):
        found = diagnose("\n".join(lines[:end]))
        assert (found.failed, found.name) in ((False, "no end"), (False, "NCCL hang"), (False, "access log only")), (
            lines[end - 1]
        )


# -- the simulated server, in the words of several releases -------------------------------------------------------

FAULTS = {
    "oom_kv_pool": ("out of memory at the KV pool", "Lower sglang_server_mem_fraction_static (try 0.50)"),
    "oom_graph_capture": ("out of memory at graph capture", "Lower sglang_server_mem_fraction_static (try 0.50)"),
    "unsupported_architecture": ("unsupported architecture", "Choose another way for these cards"),
    "assertion": ("assertion", "correct the mode's args"),
}


@pytest.mark.parametrize("version", ["0.5.8", "0.5.12", "0.5.15", "0.5.20", "0.5.23"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_what_the_simulator_plays_is_named(tmp_path: Path, fault: str, version: str) -> None:
    package = release(version, tmp_path)
    flags = ("--tp-size", "2", "--mem-fraction-static", "0.55")
    with Sim(tmp_path, *flags, sglang_package=package, faults=[fault], time_scale=200) as sim:
        status = sim.process.wait(20)
        log = sim.log()
    end = Exit("killed", -status, "signal") if status < 0 else Exit("exited", status, "exit-code")
    name, remedy = FAULTS[fault]
    for found in (diagnose(log, end), diagnose(log)):
        assert (found.name, remedy in found.remedy) == (name, True), found


# -- lines by hand, from the sources ------------------------------------------------------------------------------

HEAD = (
    "[2026-01-01 00:00:01] server_args=ServerArgs(model_path='/m', tp_size=4, mem_fraction_static=0.88, "
    "cuda_graph_max_bs=256)\n"
)
WEIGHTS = HEAD + "[2026-01-01 00:00:09 TP2] Load weight begin. avail mem=94.13 GB\n"
POOL = WEIGHTS + "[2026-01-01 00:00:19 TP2] Load weight end. elapsed=10.1 s, avail mem=20.13 GB\n"
GRAPHS = POOL + "[2026-01-01 00:00:21 TP2] Capture cuda graph begin. This can take up to several minutes.\n"
SERVING = GRAPHS + "[2026-01-01 00:00:41] The server is fired up and ready to roll!\n"
DIED = "[2026-01-01 00:00:50 TP3] Scheduler hit an exception: Traceback (most recent call last):\n"
OOM = DIED + (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 1.50 GiB. GPU 3 has a total capacity of 95.59 GiB "
    "of which 1.03 GiB is free.\n"
)
OLD_OOM = OOM.replace("torch.OutOfMemoryError", "torch.cuda.OutOfMemoryError")


TWO_NODES = "[2026-01-01 00:00:01] server_args=ServerArgs(model_path='/m', tp_size=16, nnodes=2, node_rank=0)\n"
FAILED = "[2026-01-01 00:01:01] Received sigquit from a child process. It usually means the child failed.\n"


@pytest.mark.parametrize(
    ("meeting", "name", "words"),
    [
        ("head_alone", "missing ranks", "only 1/2 ranks came within 9 s to where they meet"),
        ("other_alone", "head not reached", "was not reached at (127.0.0.1, 20077)"),
        ("port_taken", "port in use", "EADDRINUSE, message: address already in use"),
        ("no_such_interface", "wrong interface", "Unable to find address for: nosuch0"),
        ("other_killed", "lost peer", "a rank on another guest is gone (127.0.0.1), and no other goes on without it"),
        ("head_killed", "lost peer", "a rank on another guest is gone (127.0.0.1)"),
        ("head_gone_while_waiting", "lost peer", "a rank on another guest is gone, and no other goes on without it"),
    ],
)
def test_ranks_of_several_guests_that_do_not_meet_or_go(meeting: str, name: str, words: str) -> None:
    text = TWO_NODES + DIED + (MEETINGS / f"{meeting}.log").read_text() + FAILED
    found = diagnose(text, Exit("killed", 9, "signal"))
    assert (found.name, found.failed) == (name, True)
    assert words in found.cause and found.remedy


def test_the_same_on_one_guest_is_a_child_that_was_lost() -> None:
    text = DIED + (MEETINGS / "other_killed.log").read_text() + FAILED
    assert diagnose(text, Exit("killed", 9, "signal")).name == "lost child"


def test_a_scheduler_that_was_killed_here_is_no_rank_that_went_elsewhere() -> None:
    own = "[2026-01-01 00:01:01] Scheduler or DataParallelController 4711 terminated with -9\n"
    found = diagnose(TWO_NODES + own, Exit("exited", 0, "success"))
    assert found.name == "lost child" and "4711 terminated with -9" in found.evidence


def test_a_launcher_that_ends_with_0_is_named() -> None:
    found = diagnose(HEAD, Exit("exited", 0, "success"))
    assert (found.name, found.failed) == ("ended by itself", True)
    assert found.cause == "the server ended by itself with exit status 0, and nobody asked it to"
    assert found.tail


def test_a_guest_that_was_told_to_stop_and_left_it_to_the_first_was_asked_to() -> None:
    said = (
        "[2026-01-01 00:09:00] SIGTERM received on node_rank 1; waiting for the rank-0 ShutdownReq broadcast to stop\n"
    )
    gone = "[2026-01-01 00:09:05] Scheduler or DataParallelController 4711 terminated with 0\n"
    assert diagnose(TWO_NODES + said + gone, Exit("exited", 0, "success")).name == "asked to stop"


def test_a_start_that_waits_for_the_other_guests_says_so() -> None:
    waits = "[2026-01-01 00:00:09 TP0] Init torch distributed begin.\n"
    found = stalled(TWO_NODES + waits, "no news for 1200 s")
    assert found.name == "missing ranks" and "the ranks of 2 guests wait for each other" in found.cause
    assert stalled(waits, "no news for 1200 s").name == "NCCL hang"


@pytest.mark.parametrize(
    ("log", "name", "words"),
    [
        (WEIGHTS + OOM, "out of memory at weights", "sglang_server_tp_size 8 instead of 4"),
        (WEIGHTS + OLD_OOM, "out of memory at weights", "the memory fraction does not matter"),
        (POOL + OOM, "out of memory at the KV pool", "Lower sglang_server_mem_fraction_static (try 0.83)"),
        (GRAPHS + OOM, "out of memory at graph capture", "sglang_server_cuda_graph_max_bs (try 128)"),
        (SERVING + OOM, "out of memory while serving", "Lower sglang_server_mem_fraction_static (try 0.83)"),
        (POOL + DIED + "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: "
         "self.server_args.mem_fraction_static=0.88\n",
         "KV pool too small", "Raise sglang_server_mem_fraction_static (try 0.93)"),
        (SERVING + DIED + "RuntimeError: Decode out of memory. Try to lower your batch size.\n",
         "KV pool too small", "Raise"),
        (GRAPHS + DIED + "Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB.\n"
         "Possible solutions:\n1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n",
         "out of memory at graph capture", "(try 0.83)"),
        (WEIGHTS + DIED + "RuntimeError: The memory capacity is unbalanced. Some GPUs may be occupied by other "
         "processes. pre_model_load_memory=20.1, local_gpu_memory=94.2\n", "GPUs occupied", "playbooks/clean.yml"),
        (WEIGHTS + DIED + "RuntimeError: CUDA error: no kernel image is available for execution on the device\n"
         "CUDA kernel errors might be asynchronously reported at some other API call\n",
         "unsupported architecture", "no kernel image"),
        (WEIGHTS + DIED + "ValueError: The quantization method modelopt_fp4 is not supported for the current GPU. "
         "Minimum capability: 100. Current capability: 90.\n", "unsupported architecture", "modelopt_fp4"),
        (WEIGHTS + DIED + "RuntimeError: Could not find nvcc and default cuda_home='/usr/local/cuda' doesn't exist\n",
         "missing toolchain", "cuda_toolkit"),
        (WEIGHTS + DIED + "FileNotFoundError: [Errno 2] No such file or directory: 'ninja'\n",
         "missing toolchain", "'ninja'"),
        (GRAPHS + DIED + "RuntimeError: Cannot find ptxas\n", "missing toolchain", "ptxas"),
        (GRAPHS + DIED + "RuntimeError: Ninja build failed. Ninja output:\nFAILED: pcie_ipc.o\n",
         "compilation failed", "Compare nvcc"),
        (HEAD + "Exception: flashinfer_python is installed with version 0.6.3, which is less than the minimum required "
         "version 0.7.2. Please uninstall the old version and reinstall the latest version\n",
         "wheel mismatch", "flashinfer_python is installed with version 0.6.3"),
        (HEAD + "ImportError: /opt/x/common_ops.abi3.so: undefined symbol: _ZN3c104cuda9SetDeviceEi\n",
         "wheel mismatch", "undefined symbol"),
        (HEAD + "ImportError: libcudart.so.12: cannot open shared object file: No such file or directory\n",
         "wheel mismatch", "do not mix CUDA 12 and 13"),
        (WEIGHTS + DIED + "AttributeError: 'KimiK25ForConditionalGeneration' object has no attribute "
         "'set_eagle3_layers_to_capture'\n", "draft model mismatch", "set_eagle3_layers_to_capture"),
        (WEIGHTS + DIED + "ValueError: Model LlamaForCausalLM does not implement set_eagle3_layers_to_capture, which "
         "EAGLE3 aux hidden-state capture requires.\n", "draft model mismatch", "leave speculation out"),
        (WEIGHTS + DIED + "AssertionError: Attempted to load weight (torch.Size([7168, 21504])) into parameter "
         "(torch.Size([4096, 12288]))\n", "draft model mismatch", "trained for exactly this model"),
        (WEIGHTS + DIED + "RuntimeError: Cannot find any model weights with `/models/kimi`\n",
         "missing shard", "index file"),
        (WEIGHTS + DIED + "safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, "
         "file not fully covered\n", "missing shard", "incomplete metadata"),
        (WEIGHTS + DIED + "FileNotFoundError: No such file or directory: "
                          "/models/kimi/model-00003-of-00064.safetensors\n",
         "missing shard", "model-00003-of-00064"),
        (HEAD + "OSError: Can't load tokenizer for '/models/kimi'. If you were trying to load it from the Hub\n",
         "tokenizer", "tokenizer.json"),
        (HEAD + "OSError: /models/kimi does not appear to have a file named config.json. Checkout the folder\n",
         "missing model", "config.json"),
        (HEAD + "ValueError: Model architectures ['KimiNext'] are not supported for now. Supported architectures: "
                "[...]\n",
         "unsupported model", "KimiNext"),
        (HEAD + "ValueError: The repository /models/kimi contains custom code which must be executed to correctly "
         "load the model.\n", "trust_remote_code", "pinned revision"),
        (HEAD + "PermissionError: [Errno 13] Permission denied: '/models/kimi/config.json'\n",
         "model file not readable", "sglang_server_user"),
        (WEIGHTS + DIED + "RuntimeError: NCCL error: unhandled cuda error (run with NCCL_DEBUG=INFO for details)\n",
         "NCCL", "unhandled cuda error"),
        (WEIGHTS + DIED + "RuntimeError: CUDA error: invalid device ordinal\n", "too few GPUs", "tp_size"),
        (SERVING + "[2026-01-01 00:09:50 TP3] TpModelWorker watchdog timeout (self.watchdog_timeout=300, "
                   "self.soft=False)\n",
         "watchdog", "NCCL_P2P_DISABLE=1"),
        (SERVING + DIED + "torch.AcceleratorError: CUDA error: uncorrectable ECC error encountered\n",
         "GPU lost", "Xid"),
        (HEAD + "RuntimeError: No CUDA GPUs are available\n", "no GPU", "nvidia-uvm"),
        (HEAD + "RuntimeError: CUDA driver version is insufficient for CUDA runtime version\n",
         "driver too old", "580"),
        (HEAD + "ValueError: Port is already in use. dist_init_port=30001 port_base=30002 nccl_port=30005\n",
         "port in use", "clean.yml"),
        (SERVING + "[2026-01-01 00:02:02] ERROR:    [Errno 98] error while attempting to bind on address "
         "('::1', 30000, 0, 0): [errno 98] address already in use\n", "port in use", "port 30000 on ::1"),
        (POOL + DIED + "ValueError: Not enough host memory available. Requesting 220.00 GB but only have 100.00 GB "
                       "free.\n",
         "host out of memory", "not of GPU memory"),
        (WEIGHTS + "[2026-01-01 00:01:00] Subprocess scheduler_3 (pid=812) crashed with exit code -9. Triggering "
                   "SIGQUIT\n",
         "lost child", "OOM killer"),
        (WEIGHTS + "RuntimeError: Rank 2 scheduler died during initialization (exit code: -11). If exit code is -9 "
         "(SIGKILL), a common cause is the OS OOM killer.\n", "crashed child", "SIGSEGV"),
    ],
)  # fmt: skip
def test_lines_of_the_sources_are_named(log: str, name: str, words: str) -> None:
    found = diagnose(
        log + "[2026-01-01 00:01:01] Received sigquit from a child process. It usually means the child failed.\n"
    )
    if name not in ("lost child", "crashed child", "port in use"):
        assert diagnose(log).name == name
    assert (found.name, words in f"{found.cause} {found.remedy} {found.evidence}") == (name, True), found


def test_a_cause_before_the_server_was_ready_is_none() -> None:
    benign = "RuntimeError: Cannot find any model weights with `/models/kimi/extra`\n"
    found = diagnose(WEIGHTS + benign + SERVING.removeprefix(WEIGHTS) + DIED + "ZeroDivisionError: division by zero\n")
    assert found.name == "unknown"


def test_a_soft_watchdog_is_no_end() -> None:
    log = SERVING + "[2026-01-01 00:09:50 TP3] Scheduler watchdog timeout (self.watchdog_timeout=30, self.soft=True)\n"
    assert diagnose(log).name == "no end"
    assert [note.split(":")[0] for note in notices(log)] == ["soft watchdog"]


# -- beside the log -----------------------------------------------------------------------------------------------


def test_the_kernel_knows_what_the_log_cannot() -> None:
    killed = Exit("killed", 9, "signal")
    oom = (
        "[10.2] "
        "oom-kill:constraint=CONSTRAINT_MEMCG,nodemask=(null),cpuset=ns,oom_memcg=/lxc/129,task_memcg=/lxc/129/ns/"
        "system.slice/servelab.slice/servelab-baseline.service,task=sglang::schedul,pid=99121,uid=100\n"
        "[10.3] Memory cgroup out of memory: Killed process 99121 (sglang::schedul)"
    )
    assert diagnose(WEIGHTS, killed, oom).name == "host out of memory"
    assert diagnose(WEIGHTS, killed, oom.replace("servelab", "mysql")).name == "killed"
    xid = "[11.0] NVRM: Xid (PCI:0000:41:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    found = diagnose(SERVING, killed, xid)
    assert (found.name, "Xid 79 on PCI:0000:41:00" in found.cause) == ("GPU lost", True)
    # A program's own fault is no hardware.
    assert diagnose(SERVING, killed, xid.replace(": 79,", ": 31,")).name == "killed"


def test_exit_137_alone_proves_no_oom_killer() -> None:
    found = diagnose(WEIGHTS, Exit("killed", 9, "signal"))
    assert (found.name, "somebody killed" in found.cause) == ("killed", True)
    assert diagnose(WEIGHTS, Exit("killed", 9, "oom-kill")).name == "host out of memory"


def test_a_start_that_stands_still_among_its_ranks_hangs_in_nccl() -> None:
    log = (
        HEAD
        + "[2026-01-01 00:00:05 TP1] Init parallel begin.\n[2026-01-01 00:00:06 TP0] sglang is using nccl==2.30.7\n"
    )
    found = stalled(log, "No news for 1200 s")
    assert (found.name, found.failed) == ("NCCL hang", False)
    assert "NCCL_P2P_DISABLE=1" in found.remedy and "IOMMU" in found.remedy


def test_a_server_that_does_not_serve_as_it_was_asked_says_so() -> None:
    log = SERVING + (
        "[2026-01-01 00:00:07 TP1] Setup Custom allreduce failed with unsupported. To silence this warning, specify\n"
        "[2026-01-01 00:00:07 TP1] CustomAllreduce is disabled because it's not supported on more than two "
        "PCIe-only GPUs.\n"
        "[2026-01-01 00:00:07 TP1] speculative_adaptive disabled: topk is 4. Falling back to static speculative "
        "params.\n"
    )
    assert [note.split(":")[0] for note in notices(log)] == [
        "fell back to NCCL",
        "custom all-reduce disabled",
        "adaptive speculation disabled",
    ]


# -- the phases ---------------------------------------------------------------------------------------------------


def test_the_phases_in_the_words_of_0_5_23() -> None:
    steps = [
        ("[2026-01-01 00:00:01] server_args={'model_path': '/m'}", "importing"),
        ("[2026-01-01 00:00:02 TP0] Init parallel begin.", "joining ranks"),
        ("[2026-01-01 00:00:03 TP0] Init parallel ends. elapsed=1.02 s", "joining ranks"),
        ("[2026-01-01 00:00:04 TP0] Load weight begin. avail mem=94.13 GB", "loading weights"),
        ("[2026-01-01 00:00:05 TP0] Target KV Cache VA upper bound. #tokens: 9", "allocating the KV cache"),
        ("[2026-01-01 00:00:06 TP0] Capture target decode CUDA graph begin. backend=full", "capturing CUDA graphs"),
        ("Capturing prefill shape (num_tokens=512 avail_mem=3.10 GB):  50%|█████     | 4/8 [00:01<00:01,  4.00it/s]",
         "capturing CUDA graphs"),
        ("[2026-01-01 00:00:08 TP0] max_total_num_tokens=5000, context_len=4096", "warming up"),
        ("[2026-01-01 00:00:09] The server is fired up and ready to roll!", "listening"),
    ]  # fmt: skip
    said = ""
    for line, phase in steps:
        said += line + "\n"
        assert start_progress(said).phase == phase, line
