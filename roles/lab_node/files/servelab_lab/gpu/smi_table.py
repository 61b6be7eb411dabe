"""nvidia-smi without arguments: the table of cards and the table of processes."""

from __future__ import annotations

import time

from .cards import MEMORY_TOTAL_MIB, MODEL
from .client import Gpu, State
from .scan import Holder
from .smi_query import POWER_CAP_W, power_w, pstate, temperature_c

_RULE = "+-----------------------------------------+------------------------+----------------------+"
_BAR = "+-----------------------------------------------------------------------------------------+"
_HEAD = """\
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
| Fan  Temp   Perf          Pwr:Usage/Cap |           Memory-Usage | GPU-Util  Compute M. |
|                                         |                        |               MIG M. |
|=========================================+========================+======================|"""
_PROCESSES = """\
| Processes:                                                                              |
|  GPU   GI   CI              PID   Type   Process name                        GPU Memory |
|        ID   ID                                                               Usage      |
|=========================================================================================|"""


def _short(text: str, width: int) -> str:
    return text if len(text) <= width else f"{text[: width - 3]}..."


def _or_error(gpu: Gpu, field: str, shown: str) -> str:
    return "ERR!" if field in gpu.values else shown


def _card(gpu: Gpu) -> list[str]:
    # What the driver cannot read is ERR! here, and a word in brackets where it is queried.
    memory = f"{_or_error(gpu, 'memory.used', f'{gpu.used_mib}MiB')} / {MEMORY_TOTAL_MIB:>6}MiB"
    usage = f"{_or_error(gpu, 'power.draw', f'{power_w(gpu):.0f}W')} / {POWER_CAP_W:>4}W"
    heat, state = _or_error(gpu, "temperature.gpu", f"{temperature_c(gpu)}C"), _or_error(gpu, "pstate", pstate(gpu))
    persistence = "On" if gpu.persistent else "Off"
    return [
        f"| {gpu.index:>3}  {_short(MODEL, 27):<27}    {persistence:<3} | {gpu.card.bus_id:>18} Off | {'0':>20} |",
        f"| N/A  {heat:>4}    {state:<4}{usage:>22} | {memory:>22} | {'0%':>7} {'Default':>12} |",
        f"|{'':41}|{'':24}| {'Disabled':>20} |",
        _RULE,
    ]


def _process(gpu: Gpu, process: Holder) -> str:
    name = _short(process.name, 36)
    return f"| {gpu.index:>4}   N/A  N/A {process.pid:>15}      C   {name:<36} {f'{process.mib}MiB':>9} |"


def table(state: State) -> str:
    """The whole table as one text."""
    lines = [f"{time.strftime('%a %b %e %H:%M:%S %Y')}       ", _BAR]
    version = state.driver_version
    lines.append(f"| NVIDIA-SMI {version:<22} Driver Version: {version:<14} CUDA Version: {state.cuda_version:<8} |")
    lines += [_RULE, *_HEAD.splitlines()]
    for gpu in state.gpus:
        lines += _card(gpu)
    lines += ["", _BAR, *_PROCESSES.splitlines()]
    processes = [_process(gpu, process) for gpu in state.gpus for process in gpu.processes]
    lines += processes or [f"|  {'No running processes found':<87}|"]
    return "\n".join([*lines, _BAR]) + "\n"
