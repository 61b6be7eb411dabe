"""The command line of `pct`.

SERVELAB_PCT_ROOT moves the node's files (etc/pve, var/lib/lxc, …); SERVELAB_PCT_USER is who asks (root@pam).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from . import create, edit, life, schema, show, snapshots, transfer, values
from .arguments import Arguments, parse
from .errors import BadParameters, PctError, UsageError
from .node import Node
from .values import split_list

_OVERVIEW = """USAGE: pct <COMMAND> [ARGS] [OPTIONS]

       pct clone <vmid> <newid> [OPTIONS]
       pct create <vmid> <ostemplate> [OPTIONS]
       pct destroy <vmid> [OPTIONS]
       pct list 
       pct migrate <vmid> <target> [OPTIONS]
       pct move-volume <vmid> <volume> [<storage>] [<target-vmid>] [<target-volume>] [OPTIONS]
       pct pending <vmid>
       pct resize <vmid> <disk> <size> [OPTIONS]
       pct restore <vmid> <ostemplate> [OPTIONS]
       pct template <vmid>

       pct config <vmid> [OPTIONS]
       pct set <vmid> [OPTIONS]

       pct delsnapshot <vmid> <snapname> [OPTIONS]
       pct listsnapshot <vmid>
       pct rollback <vmid> <snapname> [OPTIONS]
       pct snapshot <vmid> <snapname> [OPTIONS]

       pct reboot <vmid> [OPTIONS]
       pct shutdown <vmid> [OPTIONS]
       pct start <vmid> [OPTIONS]
       pct stop <vmid> [OPTIONS]

       pct enter <vmid>
       pct exec <vmid> [<extra-args>]
       pct pull <vmid> <path> <destination> [OPTIONS]
       pct push <vmid> <file> <destination> [OPTIONS]
       pct status <vmid> [OPTIONS]
       pct unlock <vmid>
"""  # noqa: W291 - the blank is the real one's

Options = dict[str, str]


@dataclass(frozen=True)
class _Call:
    """One call: the node, the words by the names of their places, the options by name."""

    node: Node
    words: dict[str, str]
    given: Options
    extra: list[str]

    @property
    def vmid(self) -> int:
        return int(self.words["vmid"])

    def flag(self, name: str) -> bool:
        return self.given.get(name) == "1"

    def number(self, name: str, default: int) -> int:
        return int(self.given.get(name, default))


@dataclass(frozen=True)
class _Command:
    """`tail` ends the usage line; `extra` commands take any number of further words."""

    work: Callable[[_Call], int | None]
    places: tuple[str, ...] = ("vmid",)
    options: Options = field(default_factory=dict)
    tail: str = " [OPTIONS]"
    extra: bool = False

    def usage(self, name: str) -> str:
        places = "".join(f" <{place}>" for place in self.places)
        more = " [<extra-args>]" if self.extra else ""
        return f"pct {name}{places}{more}{self.tail}\n"


def _container_options() -> Options:
    return {name: option.kind for name in schema.command_line_options() if (option := schema.option(name))}


def _set(call: _Call) -> None:
    given = dict(call.given)
    deletes, reverts = split_list(given.pop("delete", "")), split_list(given.pop("revert", ""))
    digest = given.pop("digest", None)
    edit.update(call.node, call.vmid, given, deletes, reverts, digest)


_CREATE_EXTRAS: Options = {
    "storage": "string",
    "password": "string",
    "ssh-public-keys": "string",
    "start": "boolean",
    "pool": "string",
    "force": "boolean",
    "unique": "boolean",
    "ignore-unpack-errors": "boolean",
    "bwlimit": "string",
}


def _create(call: _Call) -> None:
    given = {key: value for key, value in call.given.items() if key not in _CREATE_EXTRAS}
    keys = call.given.get("ssh-public-keys")
    try:
        text = Path(keys).read_text() if keys else None
    except OSError as error:
        raise PctError(f"can't open '{keys}' - {error.strerror}") from None
    extras = create.Extras(call.given.get("storage", "local"), call.given.get("password"), text, call.flag("start"))
    create.create(call.node, call.vmid, call.words["ostemplate"], given, extras)


def _exec(call: _Call) -> int:
    if not call.extra:
        raise PctError("missing command at /usr/share/perl5/PVE/CLI/pct.pm line 246.")
    keep = call.given.get("keep-env", "1") == "1"
    return life.run_inside(call.node, call.vmid, call.extra, keep_environment=keep)


def _transfer(work: Callable[..., None], source: str) -> Callable[[_Call], None]:
    def run(call: _Call) -> None:
        owner = {name: call.given.get(name, "root") for name in ("user", "group")}
        perms = call.given.get("perms", "0644")
        work(call.node, call.vmid, call.words[source], call.words["destination"], **owner, perms=perms)

    return run


def _snapshot(call: _Call) -> None:
    snapshots.take(call.node, call.vmid, call.words["snapname"], call.given.get("description"))


def _shutdown(call: _Call) -> None:
    life.shut_down(call.node, call.vmid, timeout=call.number("timeout", 60), force=call.flag("forcestop"))


def _config(call: _Call) -> None:
    show.config(call.node, call.vmid, current=call.flag("current"), snapshot=call.given.get("snapshot"))


_OWNER: Options = {"user": "string", "group": "string", "perms": "string"}
_STOPPING: Options = {"skiplock": "boolean", "overrule-shutdown": "boolean"}
_COMMANDS: dict[str, _Command] = {
    "create": _Command(_create, ("vmid", "ostemplate"), {**_container_options(), **_CREATE_EXTRAS}),
    "destroy": _Command(
        lambda call: create.destroy(call.node, call.vmid, force=call.flag("force")),
        options={"force": "boolean", "purge": "boolean", "destroy-unreferenced-disks": "boolean"},
    ),
    "list": _Command(lambda call: show.list_all(call.node), (), tail=" "),
    "pending": _Command(lambda call: show.pending(call.node, call.vmid), tail=""),
    "resize": _Command(
        lambda call: life.resize(call.node, call.vmid, call.words["disk"], call.words["size"]),
        ("vmid", "disk", "size"),
        {"digest": "string"},
    ),
    "config": _Command(_config, options={"current": "boolean", "snapshot": "string"}),
    "set": _Command(_set, options={**_container_options(), "delete": "list", "revert": "list", "digest": "string"}),
    "delsnapshot": _Command(
        lambda call: snapshots.remove(call.node, call.vmid, call.words["snapname"]),
        ("vmid", "snapname"),
        {"force": "boolean"},
    ),
    "listsnapshot": _Command(lambda call: show.snapshots(call.node, call.vmid), tail=""),
    "rollback": _Command(
        lambda call: snapshots.roll_back(call.node, call.vmid, call.words["snapname"]),
        ("vmid", "snapname"),
        {"start": "boolean"},
    ),
    "snapshot": _Command(_snapshot, ("vmid", "snapname"), {"description": "string"}),
    "reboot": _Command(
        lambda call: life.reboot(call.node, call.vmid, timeout=call.number("timeout", 60)),
        options={"timeout": "string"},
    ),
    "shutdown": _Command(_shutdown, options={"timeout": "string", "forcestop": "boolean"}),
    "start": _Command(
        lambda call: life.start(call.node, call.vmid), options={"skiplock": "boolean", "debug": "boolean"}
    ),
    "stop": _Command(lambda call: life.stop(call.node, call.vmid), options=_STOPPING),
    "enter": _Command(
        lambda call: life.run_inside(call.node, call.vmid, [], keep_environment=True),
        options={"keep-env": "boolean"},
    ),
    "exec": _Command(_exec, options={"keep-env": "boolean"}, extra=True),
    "pull": _Command(_transfer(transfer.pull, "path"), ("vmid", "path", "destination"), _OWNER),
    "push": _Command(_transfer(transfer.push, "file"), ("vmid", "file", "destination"), _OWNER),
    "status": _Command(
        lambda call: show.status(call.node, call.vmid, verbose=call.flag("verbose")), options={"verbose": "boolean"}
    ),
    "unlock": _Command(lambda call: life.unlock(call.node, call.vmid), tail=""),
}

_PLACE_CHECKS: dict[str, list[values.Check]] = {
    "vmid": [values.integer(), values.vm_id],
    "snapname": [values.config_id],
}


def _place(command: _Command, arguments: Arguments) -> dict[str, str]:
    """The words by their places, checked."""
    words = arguments.positional
    if len(words) < len(command.places):
        raise UsageError("400 not enough arguments\n")
    if len(words) > len(command.places) and not command.extra:
        raise UsageError("400 too many arguments\n")
    placed = dict(zip(command.places, words, strict=False))
    wrong: dict[str, str] = {}
    for name, word in placed.items():
        for check in _PLACE_CHECKS.get(name, []):
            try:
                check(word)
            except ValueError as error:
                wrong.setdefault(name, str(error))
    if wrong:
        raise BadParameters(wrong)
    return placed


def run(node: Node, words: list[str]) -> int:
    """One call of `pct`; its exit status."""
    if not words or words[0] not in _COMMANDS:
        what = f"unknown command 'pct {words[0]}'" if words else "no command specified"
        node.warn(f"ERROR: {what}\n{_OVERVIEW}")
        return 255
    command = _COMMANDS[words[0]]
    try:
        arguments = parse(words[1:], command.options)
        placed = _place(command, arguments)
        call = _Call(node, placed, arguments.given, arguments.positional[len(command.places) :])
        return command.work(call) or 0
    except UsageError as error:
        node.warn(f"{error}{command.usage(words[0])}")
    except PctError as error:
        node.warn(str(error))
    return 255


def main(words: list[str]) -> int:
    """Run on this machine, with the real LXC."""
    from .lxc import Lxc

    if os.geteuid() != 0:
        failed = "".join(f"ipcc_send_rec[{i}] failed: Unknown error -1\n" for i in (1, 2, 3))
        sys.stderr.write(f"{failed}Unable to load access control list: Unknown error -1\n")
        return 255
    root = Path(os.environ.get("SERVELAB_PCT_ROOT", "/"))
    user = os.environ.get("SERVELAB_PCT_USER", "root@pam")
    return run(Node(Lxc(root), root=root, user=user), words)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
