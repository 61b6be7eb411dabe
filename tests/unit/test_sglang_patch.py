"""The allreduce patch on the real source of one release per shape: applied, executed, reverted, refused.

The changed functions are taken out of the patched files and run with stand-ins for torch, the process group and the
kernels: what they decide is the release's own code.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import dataclasses
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
from sglang_wheels import published, unpack_communicators

from servelab.shared import sglang_patch
from servelab.shared.sglang_patch import PatchRefused, describe, execute, plan, store_dir
from servelab.shared.sglang_release import Release

COMMUNICATORS = Path("srt/distributed/device_communicators")
CAR = COMMUNICATORS / "custom_all_reduce.py"
UTILS = COMMUNICATORS / "custom_all_reduce_utils.py"
V2 = COMMUNICATORS / "custom_all_reduce_v2.py"

# Every published release → shape, from reading the wheels; a newer one must be read before it may stand here.
PUBLISHED = {
    "A1": "0.4.9 0.4.9.post1 0.4.9.post2 0.4.9.post3 0.4.9.post4 0.4.9.post5 0.4.9.post6 0.4.10 0.4.10.post1 "
    "0.4.10.post2 0.5.1 0.5.1.post1 0.5.1.post2 0.5.1.post3 0.5.2 0.5.3 0.5.3.post1 0.5.3.post2 0.5.3.post3 0.5.4 "
    "0.5.4.post1 0.5.4.post2 0.5.4.post3 0.5.5 0.5.5.post1 "
    "0.5.5.post2",
    "A2": "0.5.5.post3 0.5.6 0.5.6.post1 0.5.6.post2 0.5.7 0.5.8 0.5.8.post1",
    "A3": "0.5.9",
    "B1": "0.5.10 0.5.10.post1 0.5.11",
    "B2": "0.5.12 0.5.12.post1",
    "B3": "0.5.13 0.5.13.post1 0.5.14 0.5.15 0.5.15.post1 0.5.16 0.5.17 0.5.18 0.5.19 0.5.20",
    "B4": "0.5.21 0.5.22 0.5.23",
}
SHAPES = {release: shape for shape, releases in PUBLISHED.items() for release in releases.split()}
FILES = {"A": [CAR], "B": [CAR, UTILS]}
# One of every shape is tried each time; all of them with --all-releases (make test-patch-all).
ALWAYS = ["0.4.9", "0.5.1", "0.5.8", "0.5.9", "0.5.10", "0.5.12", "0.5.15", "0.5.23"]
KIB = 1024
MIB = 1024 * KIB

every_shape = pytest.mark.every_shape
version_2 = pytest.mark.every_shape("B")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    mark = metafunc.definition.get_closest_marker("every_shape")
    if mark is None:
        return
    releases = published("0.4.9") if metafunc.config.getoption("--all-releases") else ALWAYS
    # What is not in the table is tried, too, and fails: somebody has to read it.
    metafunc.parametrize("release", [r for r in releases if SHAPES.get(r, "B?").startswith(mark.args or ("A", "B"))])


@pytest.fixture(scope="session")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    unpacked: dict[str, Path] = {}

    def get(release: str) -> Path:
        if release not in unpacked:
            unpacked[release] = unpack_communicators(release, tmp_path_factory.mktemp(release))
        return unpacked[release]

    return get


@pytest.fixture
def install(wheels: Callable[[str], Path], tmp_path: Path) -> Callable[[str], Path]:
    """install(release) → a fresh copy of what concerns the patch; a second call is a pip install over the first."""

    def copy(release: str) -> Path:
        source, target = wheels(release), tmp_path / "site-packages" / "sglang"
        shutil.rmtree(target, ignore_errors=True)
        for old in target.parent.glob("sglang-*.dist-info"):
            shutil.rmtree(old)
        shutil.copytree(source / COMMUNICATORS, target / COMMUNICATORS)
        for file in source.glob("*version.py"):
            shutil.copy(file, target)
        shutil.copytree(source.parent / f"sglang-{release}.dist-info", target.parent / f"sglang-{release}.dist-info")
        return target

    return copy


def patch(package: Path) -> None:
    execute(plan(package, "present"))


def snapshot(package: Path) -> dict[str, bytes]:
    """Every file beside and in the package."""
    root = package.parent
    return {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*") if file.is_file()}


@functools.cache
def compiled(source: bytes, name: str) -> tuple[Any, frozenset[str]]:
    """The top-level definition `name` alone, as code, and the names it needs."""
    node = next(n for n in ast.parse(source).body if isinstance(n, ast.ClassDef | ast.FunctionDef) and n.name == name)
    needed = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} - set(dir(builtins))
    return compile(ast.Module([node], []), name, "exec"), frozenset(needed)


def run_source(file: Path, name: str, **stands_in: Any) -> Any:
    """Execute the definition `name` of `file`; every name it needs is a stand-in."""
    code, needed = compiled(file.read_bytes(), name)
    namespace: dict[str, Any] = {used: MagicMock(name=used) for used in needed}
    namespace |= {"os": os, "__name__": name, **stands_in}
    exec(code, namespace)
    return namespace[name]


class Torch(MagicMock):
    """torch, as far as a constructor asks: a device is an index, nothing is ever a tensor."""

    class device:
        def __init__(self, index: int) -> None:
            self.index = index


def tensor(size: int) -> Any:
    return SimpleNamespace(numel=lambda: size // 2, element_size=lambda: 2)


class World:
    """A process group of `size` GPUs, and SGLang's communicator built in it from `package`."""

    def __init__(
        self, package: Path, size: int, *, nvlink: bool = False, p2p: bool = True, fails: str = "", log: Any = None
    ) -> None:
        dist = MagicMock()
        dist.get_world_size.return_value = size
        dist.get_rank.return_value = 0
        self.kernels = MagicMock(IS_CUSTOM_AR_AVAILABLE=True)
        self.kernels.meta_size.return_value = 4096
        if fails:
            getattr(self.kernels, fails).side_effect = RuntimeError("invented")
        self.package, self.log = package, log or MagicMock(spec=logging.Logger)
        torch = Torch()
        torch.cuda.device_count.return_value = size
        self.common: dict[str, Any] = {
            "torch": torch,
            "dist": dist,
            "ops": self.kernels,
            "logger": self.log,
            "in_the_same_node_as": lambda *_, **__: [True] * size,
            "is_full_nvlink": lambda *_: nvlink,
            "can_p2p": lambda *_: p2p,
            "_can_p2p": lambda *_: p2p,
            "is_weak_contiguous": lambda _: True,
            "_is_cuda": True,
            "_is_hip": False,
            "_is_musa": False,
            "custom_ar": True,
            "_use_amd_deterministic_impl": lambda: False,
        }
        if "def can_use_custom_all_reduce_with_nvlink" in (package / UTILS).read_text():
            helper = run_source(package / UTILS, "can_use_custom_all_reduce_with_nvlink", **self.common)
            self.common["can_use_custom_all_reduce_with_nvlink"] = helper
        self.car = run_source(package / CAR, "CustomAllreduce", **self.common)
        self.car.create_shared_buffer = staticmethod(lambda *_, **__: [0] * size)
        self.communicator = self.car(group=object(), device=torch.device(0))

    @property
    def launched_as_nvlink(self) -> bool | None:
        """The full_nvlink that the kernel was given; None when it was never asked."""
        calls = self.kernels.init_custom_ar.call_args_list
        return calls[0].args[3] if calls else None

    def takes(self, size: int) -> bool:
        return bool(self.communicator.should_custom_ar(tensor(size)))

    def outcome(self) -> list[Any]:
        sizes = (16, 24, 42 * KIB, MIB, MIB + 16, 8 * MIB - 16, 8 * MIB, 8 * MIB + 16)
        return [self.communicator.disabled, self.launched_as_nvlink, *(self.takes(size) for size in sizes)]


WORLDS = [(1, False), (2, False), (2, True), (3, False), (4, False), (4, True), (6, False), (8, False), (8, True)]


@every_shape
def test_the_shape_is_found_and_only_its_files_change(install: Callable[[str], Path], release: str) -> None:
    package = install(release)
    before = snapshot(package)
    todo = plan(package, "present")
    assert release in SHAPES, f"sglang {release} is new: read it, then enter it under its shape ({todo.shape}?)"
    assert (todo.release, todo.shape) == (release, SHAPES[release])
    assert snapshot(package) == before, "planning must not write"
    execute(todo)
    changed = {path for path, content in snapshot(package).items() if before.get(path) != content}
    store = "sglang-servelab-patch"
    assert changed == {
        *(f"sglang/{file}" for file in FILES[SHAPES[release][0]]),
        *(f"{store}/originals/{file}" for file in FILES[SHAPES[release][0]]),
        f"{store}/manifest.json",
    }


@every_shape
def test_without_the_variable_everything_is_as_before(
    install: Callable[[str], Path], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    monkeypatch.delenv("SGLANG_FORCE_CUSTOM_AR_PCIE", raising=False)
    monkeypatch.setenv("SGLANG_CUSTOM_AR_PCIE_MAX_BYTES", "not a number")
    before = [World(package, size, nvlink=nvlink).outcome() for size, nvlink in WORLDS]
    assert before[-2][:2] == [True, None], "eight PCIe GPUs are refused by SGLang itself"
    assert before[-1][:2] == [False, True], "eight NVLink GPUs are taken by SGLang itself"
    patch(package)
    assert [World(package, size, nvlink=nvlink).outcome() for size, nvlink in WORLDS] == before


@every_shape
@pytest.mark.parametrize("value", ["", "0", "true", "yes"])
def test_only_the_value_1_opens_the_gate(
    install: Callable[[str], Path], release: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", value)
    assert World(package, 8).communicator.disabled is True


@every_shape
@pytest.mark.parametrize("size", [4, 6, 8])
def test_forced_the_kernel_is_launched_and_small_messages_are_taken(
    install: Callable[[str], Path], release: str, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    monkeypatch.delenv("SGLANG_CUSTOM_AR_PCIE_MAX_BYTES", raising=False)
    world = World(package, size)
    assert world.communicator.disabled is False
    assert world.launched_as_nvlink is True
    assert world.communicator.full_nvlink is False, "only the kernel is told otherwise"
    assert world.communicator._pcie_forced is True
    assert [world.takes(n) for n in (42 * KIB, MIB, MIB + 16, 8 * MIB, 40)] == [True, True, False, False, False]
    world.log.warning.assert_not_called()
    message, *arguments = world.log.info.call_args.args
    assert message % tuple(arguments) == (
        f"Custom allreduce is forced over PCIe: world size {size}, up to 1048576 bytes."
    )


@every_shape
@pytest.mark.parametrize("step", ["init_custom_ar", "register_buffer"])
def test_a_communicator_that_fails_does_not_say_that_it_is_in_use(
    install: Callable[[str], Path], release: str, step: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    log = MagicMock(spec=logging.Logger)
    with pytest.raises(RuntimeError, match="invented"):
        World(package, 8, fails=step, log=log)
    log.info.assert_not_called()


@every_shape
def test_the_cap_is_a_variable_and_never_above_the_buffer(
    install: Callable[[str], Path], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    monkeypatch.setenv("SGLANG_CUSTOM_AR_PCIE_MAX_BYTES", str(64 * KIB))
    world = World(package, 8)
    assert [world.takes(n) for n in (64 * KIB, 64 * KIB + 16)] == [True, False]
    monkeypatch.setenv("SGLANG_CUSTOM_AR_PCIE_MAX_BYTES", str(64 * MIB))
    world = World(package, 8)
    # Releases up to 0.5.8 leave the last multiple of 16 out for NVLink too.
    assert [world.takes(n) for n in (8 * MIB - 16, 8 * MIB, 8 * MIB + 16)] == [
        True,
        Release.parse(release) >= Release.parse("0.5.9"),
        False,
    ]


@every_shape
def test_forcing_changes_nothing_where_the_gate_was_never_shut(
    install: Callable[[str], Path], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    open_worlds = ((2, False), (2, True), (4, True), (8, True), (3, False))
    original = [World(package, size, nvlink=nvlink).outcome() for size, nvlink in open_worlds]
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    assert [World(package, size, nvlink=nvlink).outcome() for size, nvlink in open_worlds] == original


@every_shape
def test_forced_gpus_without_p2p_are_still_refused(
    install: Callable[[str], Path], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    world = World(package, 8, p2p=False)
    assert (world.communicator.disabled, world.launched_as_nvlink) == (True, None)


@version_2
def test_forced_version_2_stays_refused(
    install: Callable[[str], Path], release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = install(release)
    patch(package)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    for nvlink in (False, True):
        thresholds = SimpleNamespace(one_shot_push_threshold=1, one_shot_pull_threshold=1)
        common = World(package, 8, nvlink=nvlink).common | {
            "get_supported_world_sizes": lambda: [2, 4, 8],
            "THRESHOLD_2_SHOT_MAP": {8: thresholds},
        }
        if SHAPES[release] in ("B3", "B4"):
            allowed = run_source(package / V2, "can_use_custom_all_reduce_v2", **common)(
                group=1, device=Torch.device(0)
            )
        else:
            two = run_source(package / V2, "CustomAllReduceV2", **common)
            two._post_init_obj = lambda _: None
            allowed = not two(group=1, device=Torch.device(0), max_pull_size=1, max_push_size=1).disabled
        assert allowed is nvlink


@every_shape
def test_reverting_restores_every_byte(install: Callable[[str], Path], release: str) -> None:
    package = install(release)
    before = snapshot(package)
    patch(package)
    assert describe(package)["state"] == "present"
    todo = plan(package, "absent")
    assert todo.changed
    execute(todo)
    assert snapshot(package) == before
    assert not plan(package, "absent").changed
    assert describe(package) == {"state": "absent", "release": release, "shape": SHAPES[release]}


@every_shape
def test_a_second_time_nothing_changes(install: Callable[[str], Path], release: str) -> None:
    package = install(release)
    patch(package)
    before = {path: path.stat().st_mtime_ns for path in package.parent.rglob("*")}
    assert not plan(package, "present").changed
    patch(package)
    assert {path: path.stat().st_mtime_ns for path in package.parent.rglob("*")} == before


def test_mode_and_owner_of_a_file_are_kept(install: Callable[[str], Path]) -> None:
    package = install("0.5.23")
    (package / CAR).chmod(0o640)
    if os.geteuid() == 0:
        os.chown(package / CAR, 1234, 2345)
    wanted = [(package / CAR).stat()[i] for i in (0, 4, 5)]
    patch(package)
    assert [(package / CAR).stat()[i] for i in (0, 4, 5)] == wanted


def test_the_manifest_says_what_was_done(install: Callable[[str], Path]) -> None:
    package = install("0.5.23")
    before = {str(file): hashlib.sha256((package / file).read_bytes()).hexdigest() for file in (CAR, UTILS)}
    patch(package)
    file = store_dir(package) / "manifest.json"
    assert json.loads(file.read_text()) == {
        "schema": "servelab.sglang_patch/1",
        "release": "0.5.23",
        "shape": "B4",
        "patch_version": 1,
        "files": [
            {"path": path, "before": digest, "after": hashlib.sha256((package / path).read_bytes()).hexdigest()}
            for path, digest in before.items()
        ],
    }
    assert describe(package) == {
        "state": "present",
        "release": "0.5.23",
        "shape": "B4",
        "patch_version": 1,
        "manifest_sha256": hashlib.sha256(file.read_bytes()).hexdigest(),
    }


class PowerCut(Exception):
    pass


def interrupt(monkeypatch: pytest.MonkeyPatch, todo: sglang_patch.Plan, writes: int) -> None:
    """Execute a plan and cut the power after this many files that really changed."""
    real, done = sglang_patch._write, []

    def write(path: Path, content: bytes) -> None:
        if not path.is_file() or path.read_bytes() != content:
            if len(done) == writes:
                raise PowerCut
            done.append(path)
        real(path, content)

    with monkeypatch.context() as context, contextlib.suppress(PowerCut):
        context.setattr(sglang_patch, "_write", write)
        execute(todo)


@pytest.mark.parametrize("state", ["present", "absent"])
@pytest.mark.parametrize("writes", range(6))
def test_an_interrupted_run_leaves_the_gate_shut_and_the_next_one_finishes(
    install: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch, state: Any, writes: int
) -> None:
    package = install("0.5.23")
    pristine = snapshot(package)
    if state == "absent":
        patch(package)
    interrupt(monkeypatch, plan(package, state), writes)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    world = World(package, 8)
    assert world.communicator.disabled or world.launched_as_nvlink, "open gate without a launched kernel: garbage"
    for final in (state, "present"):
        execute(plan(package, final))
        assert not plan(package, final).changed
    assert World(package, 8).takes(42 * KIB)
    execute(plan(package, "absent"))
    assert snapshot(package) == pristine


def test_a_reinstalled_package_is_patched_again(install: Callable[[str], Path]) -> None:
    patch(install("0.5.23"))
    package = install("0.5.23")
    assert describe(package)["state"] == "absent"
    assert plan(package, "present").changed
    patch(package)
    assert describe(package)["state"] == "present"


def test_another_release_over_a_patched_one_is_patched_as_itself(install: Callable[[str], Path]) -> None:
    patch(install("0.5.23"))
    package = install("0.5.8")
    before = {path: content for path, content in snapshot(package).items() if "servelab" not in path}
    patch(package)
    assert describe(package)["shape"] == "A2"
    assert sorted(p.name for p in (store_dir(package) / "originals").rglob("*.py")) == ["custom_all_reduce.py"]
    execute(plan(package, "absent"))
    assert snapshot(package) == before


@pytest.fixture
def newer_form(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """newer_form() → from now on the patch is of version 2 and says something else in one of its files."""

    def switch() -> None:
        monkeypatch.setattr(sglang_patch, "PATCH_VERSION", 2)
        monkeypatch.setattr(
            sglang_patch,
            "SHAPES",
            tuple(
                dataclasses.replace(
                    shape,
                    edits=tuple(
                        dataclasses.replace(edit, replacement=edit.replacement.replace("forced over", "pushed over"))
                        for edit in shape.edits
                    ),
                )
                for shape in sglang_patch.SHAPES
            ),
        )

    return switch


@pytest.mark.parametrize("writes", range(9))
def test_a_newer_form_of_the_patch_replaces_an_older_one_even_when_interrupted(
    install: Callable[[str], Path], newer_form: Callable[[], None], monkeypatch: pytest.MonkeyPatch, writes: int
) -> None:
    package = install("0.5.23")
    pristine = snapshot(package)
    patch(package)
    newer_form()
    assert plan(package, "present").changed
    interrupt(monkeypatch, plan(package, "present"), writes)
    monkeypatch.setenv("SGLANG_FORCE_CUSTOM_AR_PCIE", "1")
    world = World(package, 8)
    assert world.communicator.disabled or world.launched_as_nvlink
    patch(package)
    assert not plan(package, "present").changed
    assert "pushed over PCIe" in (package / CAR).read_text()
    assert World(package, 8).takes(42 * KIB)
    assert (describe(package)["state"], describe(package)["patch_version"]) == ("present", 2)
    execute(plan(package, "absent"))
    assert snapshot(package) == pristine


def edit(package: Path, file: Path, old: str, new: str) -> None:
    text = (package / file).read_text()
    assert old in text
    (package / file).write_text(text.replace(old, new))


def without_record(package: Path) -> None:
    for record in package.parent.glob("*.dist-info/RECORD"):
        record.unlink()


@pytest.mark.parametrize(
    ("release", "file", "old", "new", "reason"),
    [
        ("0.5.23", UTILS, "if world_size > 2 and not full_nvlink:", "if world_size > 4:", "'gate' matches 0 times"),
        (
            "0.5.23",
            UTILS,
            "    return full_nvlink\n",
            "    if world_size > 2 and not full_nvlink:\n        pass\n    return full_nvlink\n",
            "'gate' matches 2 times",
        ),
        (
            "0.5.23",
            UTILS,
            "def can_use_custom_all_reduce_with_nvlink(",
            "def can_use(",
            "'gate' is not inside can_use_custom_all_reduce_with_nvlink",
        ),
        ("0.5.23", CAR, "inp_size <= self.max_size", "inp_size <= self.limit", "'size' matches 0 times"),
        ("0.5.23", CAR, 'cls_name="CustomAllreduce",', 'cls_name="Car",', "is missing"),
        ("0.5.8", CAR, "rank, self.full_nvlink\n", "rank, True\n", "'launch' matches 0 times"),
        ("0.5.8", CAR, "class CustomAllreduce:", "class CustomAllreduce(:", "is not valid Python"),
    ],
)
def test_a_form_that_is_not_known_is_refused_by_release_file_and_anchor(
    install: Callable[[str], Path], release: str, file: Path, old: str, new: str, reason: str
) -> None:
    package = install(release)
    edit(package, file, old, new)
    without_record(package)
    before = snapshot(package)
    with pytest.raises(PatchRefused) as refusal:
        plan(package, "present")
    for part in (f"sglang {release} has no known shape", str(file), reason):
        assert part in str(refusal.value)
    assert snapshot(package) == before


@every_shape
def test_an_edited_file_is_refused(install: Callable[[str], Path], release: str) -> None:
    package = install(release)
    edit(package, CAR, "import ctypes", "import ctypes  # tuned")
    before = snapshot(package)
    with pytest.raises(PatchRefused, match=rf"sglang {release}: .*custom_all_reduce\.py is not what the wheel"):
        plan(package, "present")
    assert snapshot(package) == before


@pytest.mark.parametrize("state", ["present", "absent"])
def test_a_file_edited_after_patching_is_refused_and_kept(install: Callable[[str], Path], state: Any) -> None:
    package = install("0.5.23")
    patch(package)
    edit(package, UTILS, "import pickle", "import pickle  # tuned")
    before = snapshot(package)
    with pytest.raises(PatchRefused, match=r"custom_all_reduce_utils\.py was changed by somebody else"):
        plan(package, state)
    assert snapshot(package) == before


def test_a_lost_manifest_is_named(install: Callable[[str], Path]) -> None:
    package = install("0.5.23")
    patch(package)
    (store_dir(package) / "manifest.json").unlink()
    for state in ("present", "absent"):
        with pytest.raises(PatchRefused, match=r"carries the patch, but its manifest .* is missing.*Reinstall"):
            plan(package, state)  # type: ignore[arg-type]


def test_a_damaged_manifest_or_original_is_named(install: Callable[[str], Path]) -> None:
    package = install("0.5.23")
    patch(package)
    original = store_dir(package) / "originals" / UTILS
    original.write_bytes(original.read_bytes()[:-1])
    with pytest.raises(PatchRefused, match=r"the original of .*custom_all_reduce_utils\.py is missing or damaged"):
        plan(package, "absent")
    (store_dir(package) / "manifest.json").write_text("{")
    with pytest.raises(PatchRefused, match=r"manifest\.json is damaged"):
        plan(package, "absent")


def test_what_is_not_sglang_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PatchRefused, match="is not an SGLang package"):
        plan(tmp_path, "present")
