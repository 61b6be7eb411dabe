"""The "kernel driver" of the simulated cards: a daemon on the node.

    python3 -m servelab_lab.gpu.driver

At start it makes what loading the real driver makes: the nodes under /dev and /proc/driver/nvidia/version. Then every
connection to /run/servelab-gpu/driver.sock is answered with one JSON document and closed:

    {"driver_version", "cuda_version", "machine", "pid_namespace": "pid:[…]", "fault": null or a word,
     "cards": [0, 1, …], "processes": [{"pid", "card", "mib", "name"}],
     "values": {"3": {"memory.used": "[GPU requires reset]"}}, "lost": [3]}

/srv/servelab-lab/faults.json may switch on failures:

    {"gpu": {"fault": "hang", "no_devices", "mismatch" or "no_driver", "values": {card: {query field: text}},
             "lost": [card], "nodes": {name below /dev: "missing", "moved" or "file"}}}

It is read at every question, the nodes at start, as at a boot; without it all is well. servelab_lab.faults writes it.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import socketserver
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from .cards import CARDS, CUDA_VERSION, DRIVER_VERSION, SOCKET, cards
from .nodes import lay, lay_terminals
from .scan import holders

FAULTS = "/srv/servelab-lab/faults.json"
# Where a container that may nest has its uncovered proc.
LXC_PROC = Path("/dev/.lxc/proc")
VERSION_TEXT = (
    f"NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {DRIVER_VERSION}  Release Build  (servelab@simulated)\n"
    "GCC version:  gcc version 14.2.0 (Debian 14.2.0-19)\n"
)


def faults(path: Path) -> dict[str, Any]:
    """The "gpu" part of the fault file; {} when there is none. A broken file is told on stderr and ignored."""
    try:
        gpu = json.loads(path.read_text()).get("gpu", {})
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, AttributeError) as error:
        print(f"{path} is ignored: {error}", file=sys.stderr, flush=True)
        return {}
    return gpu if isinstance(gpu, dict) else {}


def answer(
    count: int,
    proc: Path,
    gpu_faults: dict[str, Any],
    machine: str = "",
    numbers: Mapping[tuple[int, int], int] | None = None,
) -> dict[str, Any]:
    """What the driver says now."""
    return {
        "driver_version": DRIVER_VERSION,
        "cuda_version": CUDA_VERSION,
        "machine": machine,
        "pid_namespace": os.readlink(proc / "self/ns/pid"),  # noqa: PTH115
        "fault": gpu_faults.get("fault"),
        "cards": [card.minor for card in cards(count)],
        "processes": [asdict(holder) for holder in holders(proc, numbers)],
        "values": gpu_faults.get("values", {}),
        "lost": gpu_faults.get("lost", []),
    }


_PR_SET_NAME = 15


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(
        self,
        path: Path,
        count: int,
        fault_file: Path,
        proc: Path,
        machine: str = "",
        numbers: Mapping[tuple[int, int], int] | None = None,
    ) -> None:
        self.count, self.fault_file, self.proc, self.machine = count, fault_file, proc, machine
        self.numbers = numbers
        path.parent.mkdir(parents=True, exist_ok=True)
        path.unlink(missing_ok=True)
        super().__init__(str(path), _Handler)
        # Guests reach it through a user namespace: everyone may ask, as everyone may open the real nodes.
        path.chmod(0o666)


class _Handler(socketserver.BaseRequestHandler):
    server: _Server

    def handle(self) -> None:
        gpu_faults = faults(self.server.fault_file)
        if gpu_faults.get("fault") == "hang":
            self.request.recv(1)  # the asker waits until it gives up, as with a GPU that fell off the bus
            return
        if gpu_faults.get("fault") == "no_driver":
            return
        said = answer(self.server.count, self.server.proc, gpu_faults, self.server.machine, self.server.numbers)
        self.request.sendall(json.dumps(said).encode())


def make_proc_entry(proc: Path, pristine: Path) -> None:
    """Show /proc/driver/nvidia/version. procfs takes no files, so a tmpfs lies over /proc/driver.

    The kernel lets an unprivileged guest mount its own proc only where it could see a complete one already: a second,
    uncovered proc at `pristine` keeps that true for the node's guests.
    """
    entry = proc / "driver/nvidia/version"
    if entry.exists():
        return
    if not any(place.is_mount() for place in (LXC_PROC, pristine)):
        pristine.mkdir(parents=True, exist_ok=True)
        subprocess.run(["mount", "-t", "proc", "proc", pristine], check=True)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=755", "servelab-driver", proc / "driver"], check=True)
    entry.parent.mkdir()
    entry.write_text(VERSION_TEXT)


def serve(path: Path, count: int, fault_file: Path, proc: Path = Path("/proc")) -> _Server:
    """Answer on `path` in a thread of its own; the server is returned so that it can be shut down."""
    server = _Server(path, count, fault_file, proc)
    threading.Thread(target=server.serve_forever, args=(0.05,), name="driver", daemon=True).start()
    return server


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="gpu-driver", description="Play the driver of the lab's simulated GPUs.")
    parser.add_argument("--socket", type=Path, default=Path(SOCKET))
    parser.add_argument("--cards", type=int, default=CARDS, metavar="N", help=f"0 to {CARDS} (default {CARDS})")
    parser.add_argument("--faults", type=Path, default=Path(FAULTS))
    parser.add_argument("--only-answer", action="store_true", help="make no nodes and mount nothing")
    parser.add_argument(
        "--terminals",
        type=Path,
        metavar="DIR",
        help="where nobody may make device nodes: pseudo-terminals under their names in DIR",
    )
    options = parser.parse_args(argv)
    if options.terminals:
        # The name by which gpu_clean is told to leave it alone: it holds every card, as a driver does.
        ctypes.CDLL(None).prctl(_PR_SET_NAME, b"gpu-driver")
        numbers = lay_terminals(options.cards, options.terminals)
        _Server(options.socket, options.cards, options.faults, Path("/proc"), "", numbers).serve_forever()
    if not options.only_answer:
        lay(options.cards, Path("/dev"), faults(options.faults).get("nodes", {}))
        make_proc_entry(Path("/proc"), Path("/run/servelab-proc"))
    # The first node is the one that results were made on.
    machine = "" if (name := os.uname().nodename) == "pve1" else name
    _Server(options.socket, options.cards, options.faults, Path("/proc"), machine).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
