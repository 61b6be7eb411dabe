"""`servelab holders`: who holds the GPUs of this machine, and what to do about it. Changes nothing."""

from __future__ import annotations

import argparse
import json
from typing import Any

from servelab.shared import gpu_lease, nvidia_smi
from servelab.shared.gpu_holders import PROTECT, scan, unit_owners
from servelab.shared.gpu_policy import gpu_ranges, plan, table

NOBODY, SOMEBODY, UNKNOWN = 0, 1, 3


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "holders",
        help="who holds the GPUs of this machine",
        epilog="Exit status: 0 nobody, 1 somebody, 3 it cannot be known (a process may not be looked at).",
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    parser.add_argument(
        "--protect", action="append", default=[], metavar="NAME", help="a program (shell pattern) that may stay"
    )
    parser.add_argument(
        "--unprotect", action="append", default=[], metavar="NAME", help="one of those known to stay that may not"
    )
    parser.add_argument("--timeout", type=float, default=20.0, metavar="SECONDS", help="for nvidia-smi (default: 20)")
    parser.add_argument("--device-dir", default="/dev", help=argparse.SUPPRESS)
    parser.add_argument("--leases", default=gpu_lease.DIRECTORY, help=argparse.SUPPRESS)


def run(args: argparse.Namespace) -> int:
    seen = scan(args.device_dir, protect=(*PROTECT, *args.protect), unprotect=args.unprotect)
    seen["owners"] = unit_owners(holders=seen["holders"])
    decided = plan(seen)
    cards = nvidia_smi.query(args.timeout)
    leases = [gpu_lease.describe(lease) for lease in gpu_lease.read(args.leases)]
    if args.json:
        document = {
            "holders": decided["holders"],
            **{key: seen[key] for key in ("complete", "unreadable", "view", "partial", "nodes", "not_devices")},
            "cards": cards.gpus,
            "diagnosis": cards.diagnosis.as_dict() if cards.diagnosis else None,
            "leases": leases,
        }
        print(json.dumps(document, indent=1))
    else:
        print("\n".join([table(decided), *_memory(cards), *_leases(args.leases), *_doubts(seen)]))
    return SOMEBODY if decided["holders"] else NOBODY if seen["complete"] else UNKNOWN


def _memory(cards: nvidia_smi.Report) -> list[str]:
    said = [
        f"GPU {card['index']}: {'unknown' if card['memory_used_mib'] is None else card['memory_used_mib']} MiB in use"
        + ("" if card["health"] == "ok" else f", {card['health']}")
        for card in cards.gpus
    ]
    if cards.diagnosis:
        said.append(f"nvidia-smi: {cards.diagnosis.cause}; {cards.diagnosis.remedy}")
    return said


def _leases(directory: str) -> list[str]:
    return [f"GPU {gpu_ranges(lease.gpus)} leased: {gpu_lease.describe(lease)}" for lease in gpu_lease.read(directory)]


def _doubts(seen: dict[str, Any]) -> list[str]:
    said = [f"{path} is no device: what a bind mount makes where the node was missing" for path in seen["not_devices"]]
    if not seen["nodes"]:
        said.append("there is no NVIDIA device node here")
    if seen["partial"]:
        said.append("this is a guest: processes of the node and of other guests cannot be seen from here")
    if not seen["complete"]:
        named = ", ".join(f"{one['pid']} ({one['name']})" for one in seen["unreadable"][:5])
        more = f" and {len(seen['unreadable']) - 5} more" if len(seen["unreadable"]) > 5 else ""
        said.append(f"not looked at, so that nobody can say whether they hold a GPU: {named}{more}; run as root")
    return said
