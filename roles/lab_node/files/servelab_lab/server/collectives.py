"""One rank of the collectives benchmark, without GPUs: what the cost model says of each way to reduce, as the worker of
`servelab collectives` writes it. Whether a way engages is decided as for the simulated server.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

try:
    from servelab_lab.shared.sglang_release import read_version
except ModuleNotFoundError:  # In the checkout, where the lab has not copied the shared parsers beside the package.
    from servelab.shared.sglang_release import read_version  # type: ignore[no-redef]

from .config import Config, ConfigError, load_config
from .cost import load_profile
from .dialect import Dialect
from .paths import choose
from .serverargs import ServerArgs

# Elements of which the check says that they were looked at; nothing is added up here.
_ROUNDS = 3


def events(
    config: Config,
    package: Path,
    backend: str,
    world: int,
    sizes: Sequence[int],
    hidden: int,
    environ: Mapping[str, str],
) -> list[dict[str, Any]]:
    """What rank 0 writes, in its order."""
    profile = load_profile(config.profile)
    release = read_version(package)
    # As wide as the largest size, so that PCIe-IPC's workspace takes all of them.
    rows = max(sizes) // (hidden * profile.bytes_per_element) + 1
    args = ServerArgs({"tp_size": world}, release, "")
    fails = "fell_back_to_nccl" in config.faults
    way = choose(args, environ, package, Dialect.of(release), profile, rows, custom_fails=fails)
    wanted = {"nccl": way.nccl, "custom_ar": "custom_ar", "pcie_ipc": "pcie_ipc"}.get(backend)
    if wanted != way.nccl and way.backend != wanted:
        reason = " ".join(way.joining) or f"{backend} is not in SGLang {release}."
        return [{"event": "refused", "reason": f"{reason} (simulated)"}]
    simulated = {"profile": config.profile, "time_scale": config.time_scale}
    ready = {"world_size": world, "device": "simulated card", "torch": "none", "nccl": "none", "facts": {}}
    told: list[dict[str, Any]] = [{"event": "ready", **ready, "simulated": simulated}]
    limit = way.limit if wanted != way.nccl else None
    garbage = "garbage_output" in config.faults and wanted != way.nccl
    for size in sizes:
        if limit is not None and size > limit:
            told.append({"event": "not_taken", "bytes": size})
            continue
        for mode in ("eager", "graph"):
            elements = size // 2 * world * _ROUNDS
            told.append({"event": "begin", "bytes": size, "what": mode})
            wrong = elements if garbage else 0
            told.append({"event": "check", "bytes": size, "mode": mode, "elements": elements, "wrong": wrong})
            latency = round(profile.backends[str(wanted)].latency_us(size, mode == "graph"), 3)
            figures = {"median_us": latency, "min_us": latency, "p90_us": latency, "samples": 0}
            told.append({"event": "row", "bytes": size, "mode": mode, **figures})
    return [*told, {"event": "end"}]


def main() -> int:
    """Take the worker's options; those that only matter to a real measurement are ignored."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--backend", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--sizes", required=True)
    parser.add_argument("--hidden", type=int, required=True)
    options, _ = parser.parse_known_args()
    if int(os.environ["RANK"]):
        return 0
    sizes = sorted(map(int, options.sizes.split(",")))
    try:
        config = load_config()
        told = events(
            config, config.package(), options.backend, int(os.environ["WORLD_SIZE"]), sizes, options.hidden, os.environ
        )
    except ConfigError as error:
        print(error, file=sys.stderr)
        return 1
    options.out.write_text("".join(json.dumps(event) + "\n" for event in told), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
