"""The lab's switchboard: each failure that the lab can play, by name.

    python3 -m servelab_lab.faults list              every name, whether it is on, and what it does
    python3 -m servelab_lab.faults NAME on|off
    python3 -m servelab_lab.faults all off

It runs on the node, as root. What is on is kept beside the doubles in faults.json, which the driver and the simulated
server read; nodes, guests and processes are changed at once. Exit status 2: no such name, or two that contradict.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .gpu.cards import CARDS
from .gpu.nodes import FILE, MISSING, MOVED, UVM_NODES, lay
from .server.config import FAULTS as SERVER_FAULTS

# The card that is sick, lost or taken; any other would do as well.
CARD = 3


class SwitchError(Exception):
    """The switch cannot be thrown; one sentence why."""


@dataclass(frozen=True)
class Place:
    """Where the switchboard works: the doubles' directory, the node's /dev, its guests and processes."""

    doubles: Path = Path("/srv/servelab-lab")
    dev: Path = Path("/dev")

    @property
    def file(self) -> Path:
        return self.doubles / "faults.json"


@dataclass(frozen=True)
class Fault:
    """`document` is merged into faults.json while it is on. `throw` and `is_on` are for what is no file's business."""

    what: str
    document: dict[str, Any] = field(default_factory=dict)
    throw: Callable[[bool], None] | None = None
    is_on: Callable[[], bool] | None = None


def _gpu(what: str, **document: Any) -> Fault:
    return Fault(what, {"gpu": document})


def _nodes(what: str, **nodes: str) -> Fault:
    return Fault(what, {"gpu": {"nodes": {name.replace("_", "-"): wrong for name, wrong in nodes.items()}}})


def _actions(name: str) -> dict[str, Any]:
    """Looked up when they are needed: they need the real LXC."""

    def throw(on: bool) -> None:
        from . import fault_actions

        getattr(fault_actions, f"{name}_{'on' if on else 'off'}")()

    def is_on() -> bool:
        from . import fault_actions

        return bool(getattr(fault_actions, f"{name}_is_on")())

    return {"throw": throw, "is_on": is_on}


_SICK = {"memory.used": "[GPU requires reset]", "memory.free": "[GPU requires reset]"}
_NOT_PERSISTENT = {"persistence_mode": "Disabled"}
_UNREADABLE = {"power.draw": "[Unknown Error]", "temperature.gpu": "[Unknown Error]", "fan.speed": "[Unknown Error]"}

FAULTS: dict[str, Fault] = {
    "smi_hang": _gpu("nvidia-smi never answers, on node and guests", fault="hang"),
    "no_devices": _gpu("the driver is loaded and finds no card", fault="no_devices"),
    "no_driver": _gpu("nobody answers nvidia-smi", fault="no_driver"),
    "driver_mismatch": _gpu("library and kernel driver are of two versions", fault="mismatch"),
    "needs_reset": _gpu(f"card {CARD} answers '[GPU requires reset]' for its memory", values={str(CARD): _SICK}),
    "persistence_off": _gpu(f"card {CARD} has no persistence mode", values={str(CARD): _NOT_PERSISTENT}),
    "unreadable": _gpu(f"card {CARD} shows ERR! for what cannot be read", values={str(CARD): _UNREADABLE}),
    "off_the_bus": _gpu(f"card {CARD} has fallen off the bus", lost=[CARD]),
    "uvm_missing": _nodes(
        "/dev/nvidia-uvm is not there, as after a boot without CUDA", **dict.fromkeys(UVM_NODES, MISSING)
    ),
    "uvm_moved": _nodes("/dev/nvidia-uvm has another number, as after a boot", **dict.fromkeys(UVM_NODES, MOVED)),
    "node_is_file": _nodes(f"/dev/nvidia{CARD} is a regular file on the node", **{f"nvidia{CARD}": FILE}),
    "guest_locked": Fault("the first guest is locked, as by a backup that died", **_actions("guest_locked")),
    "node_process": Fault(f"a process on the node holds card {CARD}", **_actions("node_process")),
    "other_guest": Fault(f"another guest holds card {CARD}", **_actions("other_guest")),
    "survivors": Fault("schedulers outlive their launcher", {"server": {"survivors": True}}),
    **{name: Fault("docs/simulator.md, Failures on demand", {"server": {"faults": [name]}}) for name in SERVER_FAULTS},
}


def merged(names: Iterable[str]) -> dict[str, Any]:
    """faults.json for these names. Raises SwitchError where two want different things."""
    result: dict[str, Any] = {"on": []}
    for name in names:
        _merge(result, FAULTS[name].document, name, result["on"])
        result["on"].append(name)
    return result


def _merge(into: dict[str, Any], more: dict[str, Any], name: str, others: list[str]) -> None:
    for key, value in more.items():
        old = into.get(key)
        if isinstance(value, dict):
            _merge(into.setdefault(key, {}), value, name, others)
        elif isinstance(value, list):
            into[key] = [*(old or []), *value]
        elif old not in (None, value):
            raise SwitchError(f"{name} contradicts what is on ({', '.join(others)}): switch that off first.")
        else:
            into[key] = value


def switched_on(place: Place) -> list[str]:
    """The names that faults.json has."""
    try:
        names = json.loads(place.file.read_text())["on"]
    except FileNotFoundError:
        return []
    except (ValueError, KeyError, TypeError):
        raise SwitchError(f"{place.file} was not written by this switchboard: delete it.") from None
    return [name for name in names if name in FAULTS]


def is_on(place: Place, name: str) -> bool:
    """Whether this failure is played now."""
    asked = FAULTS[name].is_on
    return asked() if asked else name in switched_on(place)


def switch(place: Place, name: str, on: bool) -> bool:
    """Throw one switch; whether it was the other way before. Raises SwitchError."""
    if name not in FAULTS:
        raise SwitchError(f"There is no fault {name}; there are: {', '.join(FAULTS)}.")
    if is_on(place, name) == on:
        return False
    fault = FAULTS[name]
    if fault.throw:
        fault.throw(on)
        return True
    names = switched_on(place)
    document = merged([*names, name] if on else [each for each in names if each != name])
    half = place.file.with_name(".faults.json.half")
    half.write_text(json.dumps(document, indent=4) + "\n")
    half.chmod(0o644)  # guests read it through a user namespace
    half.replace(place.file)
    if "nodes" in fault.document.get("gpu", {}):
        lay(CARDS, place.dev, document.get("gpu", {}).get("nodes", {}))
    return True


def _listed(place: Place) -> str:
    width = max(map(len, FAULTS))
    rows = [
        f"{name:<{width}}  {'on ' if is_on(place, name) else 'off'}  {fault.what}" for name, fault in FAULTS.items()
    ]
    return "\n".join(rows)


def main(words: list[str], place: Place | None = None) -> int:
    """The command line. A switch that is already as wanted says "already"."""
    place = place or Place()
    try:
        if words == ["list"]:
            print(_listed(place))
        elif words == ["all", "off"]:
            changed = [name for name in FAULTS if is_on(place, name) and switch(place, name, on=False)]
            print(f"off: {', '.join(changed)}" if changed else "already off: all")
        elif len(words) == 2 and words[1] in ("on", "off"):
            changed_it = switch(place, words[0], words[1] == "on")
            print(f"{'' if changed_it else 'already '}{words[1]}: {words[0]}: {FAULTS[words[0]].what}")
        else:
            raise SwitchError("Say `list`, `NAME on`, `NAME off` or `all off`.")
    except SwitchError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
