"""The forms in which SGLang's custom allreduce has been written, as data: where each is changed, and into what.

The meaning of the change is the same in every shape (docs/allreduce.md explains it):

* gate: more than two GPUs without NVLink are let through when SGLANG_FORCE_CUSTOM_AR_PCIE=1, and only then;
* launch: the kernel is told `full_nvlink` when the gate was forced, because it launches nothing at all otherwise;
* size: a forced communicator takes messages up to SGLANG_CUSTOM_AR_PCIE_MAX_BYTES only.
"""

from __future__ import annotations

from dataclasses import dataclass

PATCH_VERSION = 1
FORCE_VARIABLE = "SGLANG_FORCE_CUSTOM_AR_PCIE"
MAX_BYTES_VARIABLE = "SGLANG_CUSTOM_AR_PCIE_MAX_BYTES"
DEFAULT_MAX_BYTES = 1024 * 1024

# Every changed place carries this word, so that a patched file is known for one without its manifest.
MARK = "servelab-patch"

_DIRECTORY = "srt/distributed/device_communicators"
COMMUNICATOR = f"{_DIRECTORY}/custom_all_reduce.py"
HELPERS = f"{_DIRECTORY}/custom_all_reduce_utils.py"
PCIE_IPC = f"{_DIRECTORY}/pcie_ipc_ar.py"


@dataclass(frozen=True)
class Edit:
    """Replace the only match of `pattern` in `file`, which must lie in `scope` (a dotted name; empty: top level)."""

    name: str
    file: str
    scope: str
    pattern: str
    replacement: str


@dataclass(frozen=True)
class Marker:
    """A place that is not changed but tells one shape from another: `pattern` is in `file`, or is not."""

    file: str
    pattern: str
    present: bool = True


@dataclass(frozen=True)
class Shape:
    """One form. `releases` are the first and last published ones seen to have it. The gate is the last edit."""

    name: str
    releases: tuple[str, str]
    edits: tuple[Edit, ...]
    markers: tuple[Marker, ...]

    @property
    def files(self) -> tuple[str, ...]:
        """The files that change, in the order of writing: the gate's file is the last, so that it never opens alone."""
        return tuple(dict.fromkeys(edit.file for edit in self.edits))


_GATE = r"^([ \t]+)if world_size > 2 and not full_nvlink:$"

# Reached on CUDA only, with more than two GPUs and no NVLink only through the forced gate.
_LAUNCH = Edit(
    name="launch",
    file=COMMUNICATOR,
    scope="CustomAllreduce.__init__",
    pattern=r"^([ \t]+)self\._ptr = ops\.init_custom_ar\(\n"
    r"[ \t]+self\.meta_ptrs, self\.rank_data, rank, self\.full_nvlink\n[ \t]+\)\n"
    r"[ \t]+ops\.register_buffer\(self\._ptr, self\.buffer_ptrs\)$",
    replacement=rf"""\1# {MARK}: past the gate without NVLink means that it was forced. With full_nvlink false the
\1# kernel launches nothing on more than two GPUs and leaves the output as it was.
\1self._pcie_forced = world_size > 2 and not self.full_nvlink
\1if self._pcie_forced:
\1    self._pcie_max_bytes = int(os.environ.get("{MAX_BYTES_VARIABLE}") or {DEFAULT_MAX_BYTES})
\1self._ptr = ops.init_custom_ar(
\1    self.meta_ptrs,
\1    self.rank_data,
\1    rank,
\1    self.full_nvlink or self._pcie_forced,
\1)
\1ops.register_buffer(self._ptr, self.buffer_ptrs)
\1# Only now, where nothing but attributes is left to set: this line is evidence.
\1if self._pcie_forced and rank == 0:
\1    logger.info(
\1        "Custom allreduce is forced over PCIe: world size %d, up to %d bytes.",
\1        world_size,
\1        self._pcie_max_bytes,
\1    )""",
)

_SIZE = Edit(
    name="size",
    file=COMMUNICATOR,
    scope="CustomAllreduce.should_custom_ar",
    pattern=r"^([ \t]+)if self\.world_size == 2 or self\.full_nvlink:\n[ \t]+return inp_size (<=?) self\.max_size$",
    replacement=rf"""\1# {MARK}: over PCIe only small messages are worth it.
\1if self._pcie_forced:
\1    return inp_size <= self._pcie_max_bytes and inp_size \2 self.max_size
\1if self.world_size == 2 or self.full_nvlink:
\1    return inp_size \2 self.max_size""",
)

_IMPORT_OS = Edit(
    name="import",
    file=COMMUNICATOR,
    scope="",
    pattern=r"^import logging$",
    replacement=f"import logging\nimport os  # {MARK}",
)

_GATE_IN_COMMUNICATOR = Edit(
    name="gate",
    file=COMMUNICATOR,
    scope="CustomAllreduce.__init__",
    pattern=_GATE,
    replacement=rf"""\1# {MARK}
\1if world_size > 2 and not full_nvlink and os.environ.get("{FORCE_VARIABLE}") != "1":""",
)

# The helper also answers for version 2, which ignores the kernel's own switches and whose pull kernels are reported
# never to finish over PCIe: for it the gate stays as it was.
_GATE_IN_HELPERS = Edit(
    name="gate",
    file=HELPERS,
    scope="can_use_custom_all_reduce_with_nvlink",
    pattern=_GATE,
    replacement=rf"""\1# {MARK}: opened for the legacy communicator only; version 2 is refused as before.
\1forced = cls_name == "CustomAllreduce" and os.environ.get("{FORCE_VARIABLE}") == "1"
\1if world_size > 2 and not full_nvlink and not forced:""",
)

_A_EDITS = (_LAUNCH, _SIZE, _GATE_IN_COMMUNICATOR)
_B_EDITS = (_IMPORT_OS, _LAUNCH, _SIZE, _GATE_IN_HELPERS)

_HAS_OS = Marker(COMMUNICATOR, r"^import os$")
_DISPATCH = r"^def dispatch_custom_allreduce\("
_UP_TO = r"return inp_size <= self\.max_size$"
_V2_CHECK = r"\bcan_use_custom_all_reduce_v2\("
_B_COMMON = (
    Marker(COMMUNICATOR, r"^import os$", present=False),
    Marker(COMMUNICATOR, _GATE, present=False),
    Marker(COMMUNICATOR, r'cls_name="CustomAllreduce",$'),
    Marker(HELPERS, r"^import os$"),
)

SHAPES: tuple[Shape, ...] = (
    Shape("A1", ("0.4.9", "0.5.5.post2"), _A_EDITS, (_HAS_OS, Marker(COMMUNICATOR, _DISPATCH, present=False))),
    Shape(
        "A2",
        ("0.5.5.post3", "0.5.8.post1"),
        _A_EDITS,
        (_HAS_OS, Marker(COMMUNICATOR, _DISPATCH), Marker(COMMUNICATOR, _UP_TO, present=False)),
    ),
    Shape("A3", ("0.5.9", "0.5.9"), _A_EDITS, (_HAS_OS, Marker(COMMUNICATOR, _DISPATCH), Marker(COMMUNICATOR, _UP_TO))),
    Shape("B1", ("0.5.10", "0.5.11"), _B_EDITS, (*_B_COMMON, Marker(COMMUNICATOR, "SGLANG_USE_JIT_ALL_REDUCE"))),
    Shape(
        "B2",
        ("0.5.12", "0.5.12.post1"),
        _B_EDITS,
        (
            *_B_COMMON,
            Marker(COMMUNICATOR, r"SGLANG_OPT_USE_CUSTOM_ALL_REDUCE_V2\b"),
            Marker(COMMUNICATOR, _V2_CHECK, present=False),
        ),
    ),
    Shape(
        "B3",
        ("0.5.13", "0.5.20"),
        _B_EDITS,
        (*_B_COMMON, Marker(COMMUNICATOR, _V2_CHECK), Marker(PCIE_IPC, "", present=False)),
    ),
    Shape("B4", ("0.5.21", "0.5.23"), _B_EDITS, (*_B_COMMON, Marker(COMMUNICATOR, _V2_CHECK), Marker(PCIE_IPC, ""))),
)
