"""Which way the ranks' sums travel: decided as SGLang decides it, from flags, environment and the installed sources.

All cards are PCIe cards without NVLink. What each way costs is the profile's (cost.py); what is decided here is which
one engages, up to which size, and what the log says about it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .cost import Profile
from .dialect import Dialect

_COMMUNICATORS = "srt/distributed/device_communicators"
# What the project's patch leaves in every place that it changed.
_PATCH_MARK = "servelab-patch"
_FORCE, _MAX_BYTES = "SGLANG_FORCE_CUSTOM_AR_PCIE", "SGLANG_CUSTOM_AR_PCIE_MAX_BYTES"
_DEFAULT_MAX_BYTES = 1024 * 1024
_WORLD_SIZES = [2, 4, 6, 8]
_IPC_WORLD_SIZES = (2, 4, 8)


@dataclass
class Way:
    """The way that engages: `backend` and `nccl` are names of the profile's; above `limit` bytes it is `nccl`.

    `joining` are the lines that every rank writes when the communicators are made, `first` those of rank 0 only.
    """

    backend: str = "nccl"
    nccl: str = "nccl"
    limit: int | None = None
    joining: list[str] = field(default_factory=list)
    first: list[str] = field(default_factory=list)
    built: list[str] = field(default_factory=list)
    checks_p2p: bool = False


def choose(
    args: Any,
    environ: Mapping[str, str],
    package: Path,
    dialect: Dialect,
    profile: Profile,
    rows: int,
    *,
    custom_fails: bool = False,
) -> Way:
    """Decide. `rows` is the widest decode: the largest captured batch times the tokens that each request verifies.

    With `custom_fails` the custom all-reduce cannot be set up, on demand.
    """
    ranks = int(args.tp_size or 1)
    path = Way(nccl=_nccl(environ))
    path.backend = path.nccl
    if ranks == 1:
        return path
    if custom_fails:
        path.joining.append(
            "Setup Custom allreduce failed with CUDART error: peer access is not supported between these two devices. "
            "To silence this warning, specify --disable-custom-all-reduce explicitly."
        )
    elif int(args.nnodes or 1) > 1:
        # Both are for the cards of one machine.
        if not args.disable_custom_all_reduce:
            name = "CustomAllreduce" if dialect.since("0.5.10") else "Custom allreduce"
            path.joining.append(f"{name} is disabled because this process group spans across nodes.")
        return path
    elif not args.disable_custom_all_reduce:
        _custom(path, args, environ, package, dialect, ranks)
    if path.backend == path.nccl:
        _pcie_ipc(path, environ, dialect, profile, ranks, rows)
    if args.enable_torch_symm_mem:
        path.joining.append(
            "TorchSymmMemCommunicator: Device capability 12 not supported, communicator is not available."
        )
    return path


def _nccl(environ: Mapping[str, str]) -> str:
    return "nccl_no_p2p" if environ.get("NCCL_P2P_DISABLE") == "1" else "nccl"


def _custom(path: Way, args: Any, environ: Mapping[str, str], package: Path, dialect: Dialect, ranks: int) -> None:
    version_2 = _version_2(environ, dialect)
    names = []
    if version_2:
        names.append("CustomAllReduceV2")
    # Up to 0.5.12 the older one is not tried where the newer is on.
    legacy = not (version_2 and not dialect.since("0.5.13"))
    if legacy:
        names.append("CustomAllreduce" if dialect.since("0.5.10") else "Custom allreduce")
    if ranks not in _WORLD_SIZES:
        path.joining += [
            f"{name} is disabled due to an unsupported world size: {ranks}. Supported world sizes: {_WORLD_SIZES}. "
            "To silence this warning, specify disable_custom_all_reduce=True explicitly."
            for name in names
        ]
        return
    if ranks == 2:
        # Two cards need no NVLink. The profile's figures are whole machines', so this costs what NCCL costs.
        return
    forced = legacy and environ.get(_FORCE) == "1" and patched(package, dialect)
    refused = names[:-1] if forced else names
    path.joining += [
        f"{name} is disabled because it's not supported on more than two PCIe-only GPUs. "
        "To silence this warning, specify disable_custom_all_reduce=True explicitly."
        for name in refused
    ]
    if not forced:
        return
    path.checks_p2p = bool(args.enable_p2p_check)
    if environ.get("SGLANG_SKIP_P2P_CHECK") == "1":
        path.checks_p2p = False
        path.joining.append("Skipping P2P check and trusting the driver's P2P report.")
    path.backend = "custom_ar"
    path.limit = int(environ.get(_MAX_BYTES) or _DEFAULT_MAX_BYTES)
    path.first.append(f"Custom allreduce is forced over PCIe: world size {ranks}, up to {path.limit} bytes.")


def _version_2(environ: Mapping[str, str], dialect: Dialect) -> bool:
    if dialect.since("0.5.12"):
        return environ.get("SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2", "1").lower() in ("1", "true")
    return dialect.since("0.5.10") and environ.get("SGLANG_USE_JIT_ALL_REDUCE", "0").lower() in ("1", "true")


def patched(package: Path, dialect: Dialect) -> bool:
    """Say whether the gate of the custom all-reduce in the installed sources can be forced."""
    files = ["custom_all_reduce.py"]
    if dialect.since("0.5.10"):
        files.append("custom_all_reduce_utils.py")
    try:
        texts = [(package / _COMMUNICATORS / name).read_text(encoding="utf-8") for name in files]
    except OSError:
        return False
    return all(_PATCH_MARK in text for text in texts)


def _pcie_ipc(path: Way, environ: Mapping[str, str], dialect: Dialect, profile: Profile, ranks: int, rows: int) -> None:
    if environ.get("SGLANG_ENABLE_PCIE_IPC_ALLREDUCE", "0").lower() not in ("1", "true"):
        return
    if not dialect.since("0.5.21") or ranks not in _IPC_WORLD_SIZES:
        return
    if not dialect.since("0.5.22"):
        path.joining.append(
            "SGLANG_ENABLE_PCIE_IPC_ALLREDUCE is set but this FlashInfer build has no pcie_ipc_comm; "
            "falling back to NCCL all-reduce."
        )
        return
    numel = int(environ.get("SGLANG_PCIE_IPC_MAX_NUMEL") or rows * profile.hidden_size)
    tuned = [1 << bit for bit in range(max(numel // profile.hidden_size, 1).bit_length())]
    path.backend, path.limit = "pcie_ipc", numel * profile.bytes_per_element
    path.joining.append(f"FlashInfer PCIe-IPC all-reduce enabled (world={ranks}, workspace sized on first reduction)")
    path.built += [
        f"FlashInfer PCIe-IPC workspace built (world={ranks}, max_numel={numel}, hidden={profile.hidden_size})",
        f"FlashInfer PCIe-IPC all-reduce autotuned {len(tuned)} shape(s) (hidden={profile.hidden_size}, rows={tuned})",
    ]
