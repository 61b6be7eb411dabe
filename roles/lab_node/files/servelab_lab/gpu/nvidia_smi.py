"""The `nvidia-smi` of the lab: arguments, formats, sentences and exit statuses of the real tool.

SERVELAB_GPU_SOCKET and SERVELAB_GPU_DEV redirect it in tests.
"""

from __future__ import annotations

import contextlib
import os
import sys
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from .cards import CUDA_VERSION, DRIVER_VERSION, MODEL, SOCKET, Card
from .client import LOST, DriverError, State, look
from .smi_query import QueryError, query_apps, query_gpu
from .smi_report import report
from .smi_table import table
from .smi_topo import matrix, peers

_HINT = "Please run 'nvidia-smi -h' for help."
_HELP = f"""NVIDIA System Management Interface -- v{DRIVER_VERSION} (simulated by servelab)

nvidia-smi [-L | -q] [-i ID[,ID...]]
nvidia-smi --query-gpu=FIELD[,FIELD...] --format=csv[,noheader][,nounits] [-i ID[,ID...]] [-l SEC | -lms MSEC]
nvidia-smi --query-compute-apps=FIELD[,FIELD...] --format=csv[,noheader][,nounits] [-i ID[,ID...]]
nvidia-smi --gpu-reset -i ID
nvidia-smi -pm 0|1 -i ID
nvidia-smi topo -m | -p2p r|w|n|a|p
"""


class UsageError(ValueError):
    """Bad arguments: exit status 2, the text on stdout."""


@dataclass
class _Asked:
    what: str = "table"
    fields: str = ""
    style: set[str] = field(default_factory=set)
    ids: list[str] = field(default_factory=list)
    every: float | None = None


_PLAIN = {
    "-r": "reset",
    "--gpu-reset": "reset",
    "-L": "list",
    "--list-gpus": "list",
    "-q": "report",
    "--query": "report",
    "-h": "help",
    "--help": "help",
}
_VALUED = {
    "--query-gpu": "gpu",
    "--query-compute-apps": "apps",
    "--format": "format",
    "-pm": "persistence",
    "--persistence-mode": "persistence",
    "-i": "id",
    "--id": "id",
    "-l": "loop",
    "--loop": "loop",
    "-lms": "loop_ms",
    "--loop-ms": "loop_ms",
}


def _parse(arguments: list[str]) -> _Asked:
    asked, rest = _Asked(), list(arguments)
    while rest:
        word = rest.pop(0)
        name, equals, value = word.partition("=")
        if word == "--version":
            asked.what = "version"
        elif word in _PLAIN:
            asked.what = _PLAIN[word]
        elif name in _VALUED:
            if not equals:
                if not rest:
                    raise UsageError(f"Missing value for option {name}. {_HINT}\n")
                value = rest.pop(0)
            _take(asked, _VALUED[name], value)
        else:
            raise UsageError(f"Option {word} is not recognized. {_HINT}\n")
    if asked.what in {"gpu", "apps"} and "csv" not in asked.style:
        raise UsageError(f'"--format=" switch is missing. {_HINT}\n')
    return asked


def _take(asked: _Asked, option: str, value: str) -> None:
    if option == "format":
        asked.style = {part.strip() for part in value.split(",")}
    elif option == "id":
        asked.ids = [part.strip() for part in value.split(",")]
    elif option in {"loop", "loop_ms"}:
        if not value.isdigit() or not int(value):
            raise UsageError(f"Invalid value for option {option}: {value}. {_HINT}\n")
        asked.every = int(value) / (1000 if option == "loop_ms" else 1)
    else:
        asked.what, asked.fields = option, value


def _only(state: State, ids: list[str]) -> State:
    """The cards asked for with -i, by index, UUID or bus id."""
    if not ids:
        return state
    chosen = [gpu for gpu in state.gpus if {str(gpu.index), gpu.card.uuid, gpu.card.bus_id} & set(ids)]
    if not chosen:
        raise DriverError("No devices were found\n", 6)
    return replace(state, gpus=chosen)


def _reached(state: State) -> State:
    """The same, or the sentence about the first card that has fallen off the bus: the real tool then shows no other."""
    for gpu in state.gpus:
        if gpu.lost:
            raise DriverError(LOST.format(gpu.index, gpu.card.bus_id.removeprefix("0000")), 15)
    return state


def _list(state: State) -> str:
    return "".join(f"GPU {gpu.index}: {MODEL} (UUID: {gpu.card.uuid})\n" for gpu in state.gpus)


def _version(state: State) -> str:
    nvml = DRIVER_VERSION.rpartition(".")[0]
    return (
        f"NVIDIA-SMI version  : {DRIVER_VERSION}\nNVML version        : {nvml}\n"
        f"DRIVER version      : {state.driver_version}\nCUDA Version        : {CUDA_VERSION}\n"
    )


def _topo(arguments: list[str], state: State) -> str:
    if arguments in (["-m"], ["--matrix"]):
        return matrix(state)
    if len(arguments) == 2 and arguments[0] in {"-p2p", "--p2pstatus"} and arguments[1] in set("rwnap"):
        return peers(state, arguments[1])
    raise UsageError(f"Invalid combination of input arguments. {_HINT}\n")


def _throw(card: Card, fault: str, on: bool) -> bool:
    """Throw a switch of the node for a card, where this one has it; False in a guest, where it cannot be done."""
    # Imported here: only this needs the switchboard.
    from ..faults import CARD, Place, SwitchError, switch

    place = Place()
    if not os.access(place.doubles, os.W_OK):
        return False
    if card.minor == CARD:
        with contextlib.suppress(SwitchError):
            switch(place, fault, on=on)
    return True


_IN_USE = (
    "\n1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, "
    "graphics application such as an X server, or a monitoring application such as another instance of nvidia-smi). "
    "Please first kill all processes using this device and all compute applications running in the system.\n"
)


def _reset(state: State, ids: list[str]) -> str:
    """What a reset says and does here: nothing while the card has a client; else the sickness is over."""
    if len(ids) != 1:
        raise UsageError(f"Resetting several GPUs at once is not played. {_HINT}\n")
    (gpu,) = state.gpus
    refused = f"The following GPUs could not be reset:\n  GPU {gpu.card.bus_id}: {{}}\n"
    # Persistence mode is a client too.
    if gpu.busy or gpu.persistent:
        raise DriverError(refused.format("In use by another client") + _IN_USE, 255)
    if not _throw(gpu.card, "needs_reset", on=False):
        raise DriverError(refused.format("Insufficient Permissions"), 255)
    return f"GPU {gpu.card.bus_id} was successfully reset.\nAll done.\n"


def _persistence(state: State, value: str) -> str:
    """Switch persistence mode on or off; what is played is that of one card."""
    if value not in ("0", "1"):
        raise UsageError(f"Invalid value for option -pm: {value}. {_HINT}\n")
    said = ""
    for gpu in state.gpus:
        name = f"persistence mode for GPU {gpu.card.bus_id}"
        if not _throw(gpu.card, "persistence_off", on=value == "0"):
            raise DriverError(f"Unable to set {name}: Insufficient Permissions\n", 4)
        said += f"{'Enabled' if value == '1' else 'Disabled'} {name}.\n"
    return said + "All done.\n"


def _answer(asked: _Asked, sock: Path, dev: Path) -> str:
    if asked.what == "help":
        return _HELP
    state = _reached(_only(look(sock, dev), asked.ids))
    if asked.what == "gpu":
        return query_gpu(state, asked.fields, asked.style)
    if asked.what == "apps":
        return query_apps(state, asked.fields, asked.style)
    if asked.what == "reset":
        return _reset(state, asked.ids)
    if asked.what == "persistence":
        return _persistence(state, asked.fields)
    return {"table": table, "list": _list, "report": report, "version": _version}[asked.what](state)


def main(arguments: list[str]) -> int:
    """Print to stdout, also what went wrong: that is where the real tool says it."""
    sock = Path(os.environ.get("SERVELAB_GPU_SOCKET", SOCKET))
    dev = Path(os.environ.get("SERVELAB_GPU_DEV", "/dev"))
    try:
        if arguments[:1] == ["topo"]:
            return _print(_topo(arguments[1:], _reached(look(sock, dev))))
        asked = _parse(arguments)
        while True:
            code = _print(_answer(asked, sock, dev))
            if asked.every is None:
                return code
            # In a loop the table has one header.
            asked.style.add("noheader")
            time.sleep(asked.every)
    except DriverError as error:
        return _print(str(error), error.code)
    except (UsageError, QueryError) as error:
        return _print(str(error), 2)


def _print(text: str, code: int = 0) -> int:
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # `nvidia-smi | head -1` is no error
    return code


if __name__ == "__main__":
    # The driver tells lookers from users of a card by this name.
    with contextlib.suppress(OSError):
        Path("/proc/self/comm").write_text("nvidia-smi")
    sys.exit(main(sys.argv[1:]))
