"""Open SGLang's custom allreduce for PCIe GPUs in an installed package, and close it again to the byte.

`plan` looks and decides without touching anything; `execute` carries a plan out. Beside the package lies
`sglang-servelab-patch/` with the original files and a manifest. Files are replaced one by one by rename, the gate's
file last (first when reverting): after an interruption at any point the gate is still closed, and the next run
finishes.
"""

from __future__ import annotations

import ast
import base64
import csv
import hashlib
import json
import os
import re
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .sglang_patch_shapes import MARK, PATCH_VERSION, SHAPES, Edit, Marker, Shape
from .sglang_release import Release, ReleaseError, read_version

SCHEMA = "servelab.sglang_patch/1"
State = Literal["present", "absent"]


class PatchRefused(ValueError):
    """The package cannot be patched or reverted, and nothing was changed. The text names release, file and reason."""


@dataclass(frozen=True)
class Change:
    """One file: `path` relative to the package, its bytes now and as they are to be."""

    path: str
    before: bytes
    after: bytes


@dataclass(frozen=True)
class Plan:
    """What has to be done.

    `final` is how the files are to be, in the order of writing; `changes` are those of them that differ now.
    `manifest` is what will be on disk afterwards: None when the patch will be absent. `originals` are the files to
    keep for reverting. `final` and `originals` map a path relative to the package to bytes.
    """

    package_dir: Path
    release: str
    shape: str
    final: dict[str, bytes]
    changes: tuple[Change, ...]
    manifest: dict[str, Any] | None
    originals: dict[str, bytes]
    stale: bool = False
    """The manifest on disk is not about these files (they were reverted, or SGLang was installed anew)."""

    @property
    def changed(self) -> bool:
        """Whether execute() would write anything."""
        store = store_dir(self.package_dir)
        if self.manifest is None:
            return bool(self.changes) or store.exists()
        return bool(self.changes) or _read(store, "manifest.json") != _manifest_bytes(self.manifest)


def store_dir(package_dir: Path) -> Path:
    """Return the directory that holds the manifest and the originals of the package in `package_dir`."""
    return package_dir.parent / f"{package_dir.name}-servelab-patch"


def plan(package_dir: Path, state: State) -> Plan:
    """Decide what `state` needs. Raises PatchRefused; writes nothing."""
    try:
        release = read_version(package_dir)
    except ReleaseError as error:
        raise PatchRefused(str(error)) from error
    manifest = _read_manifest(package_dir, release)
    if manifest is None:
        return _plan_without_manifest(package_dir, release, state)
    originals = _originals(package_dir, release, manifest)
    if state == "absent":
        final = {path: originals[path] for path in reversed(originals)}
        return Plan(package_dir, release, manifest["shape"], final, _changes(package_dir, final), None, {})
    shape = next((shape for shape in SHAPES if shape.name == manifest["shape"]), None)
    if shape is None:
        raise PatchRefused(
            f"sglang {release} was patched as shape {manifest['shape']}, which this collection does not know. "
            f"Reinstall sglang=={release}, then patch again."
        )
    patched = patch_files(originals, shape, release)
    wanted = _manifest(release, shape, originals, patched)
    changes = _changes(package_dir, patched)
    return Plan(package_dir, release, shape.name, patched, changes, wanted, originals)


def _plan_without_manifest(package_dir: Path, release: str, state: State) -> Plan:
    sources = {path: _read(package_dir, path) for shape in SHAPES for path in shape.files}
    marked = [path for path, source in sources.items() if MARK.encode() in source]
    if marked:
        raise PatchRefused(
            f"sglang {release}: {', '.join(marked)} carries the patch, but its manifest in {store_dir(package_dir)} is "
            f"missing, so it cannot be reverted or checked. Reinstall sglang=={release}."
        )
    if state == "absent":
        return Plan(package_dir, release, _name_or_unknown(package_dir, release), {}, (), None, {}, stale=True)
    shape = detect(package_dir, release)
    originals = {path: sources[path] for path in shape.files}
    _refuse_edited(package_dir, release, originals)
    patched = patch_files(originals, shape, release)
    wanted = _manifest(release, shape, originals, patched)
    changes = _changes(package_dir, patched)
    return Plan(package_dir, release, shape.name, patched, changes, wanted, originals, stale=True)


def _refuse_edited(package_dir: Path, release: str, originals: dict[str, bytes]) -> None:
    """Compare the files with the RECORD that pip keeps of what it installed; without a RECORD nothing is compared."""
    record = package_dir.parent / f"sglang-{release}.dist-info" / "RECORD"
    if not record.is_file():
        return
    with record.open(encoding="utf-8", newline="") as file:
        installed = {row[0]: row[1] for row in csv.reader(file) if len(row) > 1}
    for path, source in originals.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(source).digest()).rstrip(b"=").decode()
        if installed.get(f"{package_dir.name}/{path}", f"sha256={digest}") != f"sha256={digest}":
            raise PatchRefused(
                f"sglang {release}: {path} is not what the wheel installed (somebody edited it), so it was left as it "
                f"is. Reinstall sglang=={release}, then patch again."
            )


def detect(package_dir: Path, release: str) -> Shape:
    """Return the shape of an unpatched package. Raises PatchRefused with the anchor that did not match."""
    mismatches = {shape.name: _mismatches(package_dir, shape) for shape in SHAPES}
    fitting = [shape for shape in SHAPES if not mismatches[shape.name]]
    if len(fitting) == 1:
        return fitting[0]
    nearest = min(SHAPES, key=lambda shape: (not _covers(shape, release), len(mismatches[shape.name])))
    raise PatchRefused(
        f"sglang {release} has no known shape of custom allreduce and was left as it is. The nearest is {nearest.name} "
        f"({nearest.releases[0]} to {nearest.releases[1]}), but {'; '.join(mismatches[nearest.name])}."
    )


def _name_or_unknown(package_dir: Path, release: str) -> str:
    try:
        return detect(package_dir, release).name
    except PatchRefused:
        return "unknown"


def _covers(shape: Shape, release: str) -> bool:
    first, last = map(Release.parse, shape.releases)
    try:
        return first <= Release.parse(release) <= last
    except ReleaseError:
        return False


def _mismatches(package_dir: Path, shape: Shape) -> list[str]:
    found = [text for marker in shape.markers if (text := _marker_mismatch(package_dir, marker))]
    for edit in shape.edits:
        try:
            _locate(_read(package_dir, edit.file), edit)
        except _NoMatch as reason:
            found.append(str(reason))
    return found


def _marker_mismatch(package_dir: Path, marker: Marker) -> str:
    file = package_dir / marker.file
    present = file.is_file() and re.search(marker.pattern, _text(file.read_bytes()), re.MULTILINE) is not None
    if present == marker.present:
        return ""
    what = f"/{marker.pattern}/ in {marker.file}" if marker.pattern else marker.file
    return f"{what} is {'missing' if marker.present else 'there'}"


class _NoMatch(Exception):
    """An edit has no single place. The text is part of a sentence."""


def _locate(source: bytes, edit: Edit) -> re.Match[str]:
    """Return the only match of an edit, inside its function or class."""
    text = _text(source)
    matches = list(re.finditer(edit.pattern, text, re.MULTILINE))
    if len(matches) != 1:
        raise _NoMatch(f"its anchor {edit.name!r} matches {len(matches)} times in {edit.file} instead of once")
    try:
        tree = ast.parse(text)
    except SyntaxError as error:
        raise _NoMatch(f"{edit.file} is not valid Python (line {error.lineno})") from error
    first = text.count("\n", 0, matches[0].start()) + 1
    last = text.count("\n", 0, matches[0].end()) + 1
    if edit.scope and not any(begin <= first and last <= end for begin, end in _extents(tree, edit.scope)):
        raise _NoMatch(f"its anchor {edit.name!r} is not inside {edit.scope} in {edit.file}")
    return matches[0]


def _extents(tree: ast.Module, scope: str) -> list[tuple[int, int]]:
    """Return the line ranges of the function or class with the dotted name `scope`."""
    level: list[ast.stmt] = tree.body
    found: list[ast.FunctionDef | ast.ClassDef] = []
    for name in scope.split("."):
        found = [node for node in level if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name]
        level = [child for node in found for child in node.body]
    return [(node.lineno, node.end_lineno or node.lineno) for node in found]


def patch_files(originals: dict[str, bytes], shape: Shape, release: str) -> dict[str, bytes]:
    """Return the patched form of every file of `shape`, in the order of writing. Raises PatchRefused."""
    patched = {path: originals[path] for path in shape.files}
    for edit in shape.edits:
        try:
            match = _locate(patched[edit.file], edit)
        except _NoMatch as reason:
            raise PatchRefused(f"sglang {release}: {reason}.") from reason
        text = _text(patched[edit.file])
        patched[edit.file] = (text[: match.start()] + match.expand(edit.replacement) + text[match.end() :]).encode()
    for path, source in patched.items():
        try:
            ast.parse(source)
        except SyntaxError as error:  # pragma: no cover - a fault of the shape, found by its test
            raise PatchRefused(f"sglang {release}: {path} would not be valid Python (line {error.lineno}).") from error
    return patched


def _changes(package_dir: Path, wanted: dict[str, bytes]) -> tuple[Change, ...]:
    current = {path: _read(package_dir, path) for path in wanted}
    return tuple(Change(path, current[path], after) for path, after in wanted.items() if current[path] != after)


def _manifest(release: str, shape: Shape, originals: dict[str, bytes], patched: dict[str, bytes]) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "release": release,
        "shape": shape.name,
        "patch_version": PATCH_VERSION,
        "files": [
            {"path": path, "before": _sha256(originals[path]), "after": _sha256(patched[path])} for path in patched
        ],
    }


def _manifest_bytes(manifest: dict[str, Any]) -> bytes:
    return json.dumps(manifest, indent=2).encode() + b"\n"


def _read_manifest(package_dir: Path, release: str) -> dict[str, Any] | None:
    """Return the manifest that is about the files as they are now.

    None when there is none, or when the package was installed anew since (its files are then all without the patch).
    Raises PatchRefused when the manifest is damaged or a file was edited by somebody else.
    """
    file = store_dir(package_dir) / "manifest.json"
    if not file.is_file():
        return None
    try:
        manifest = json.loads(file.read_bytes())
        entries = [(str(e["path"]), str(e["before"]), str(e["after"])) for e in manifest["files"]]
        manifest_release, _ = str(manifest["release"]), str(manifest["shape"])
    except (ValueError, KeyError, TypeError) as error:
        raise PatchRefused(f"{file} is damaged ({error!r}). Reinstall sglang=={release} and delete it.") from error
    sources = {path: _read(package_dir, path) for path, _, _ in entries}
    if not any(MARK.encode() in source for source in sources.values()) and (
        manifest_release != release or all(_sha256(sources[path]) == before for path, before, _ in entries)
    ):
        return None
    for path, before, after in entries:
        if manifest_release != release or _sha256(sources[path]) not in (before, after):
            raise PatchRefused(
                f"sglang {release}: {path} was changed by somebody else since release {manifest_release} was patched, "
                f"so nothing was touched. Reinstall sglang=={release}, then patch again."
            )
    return dict(manifest)


def _originals(package_dir: Path, release: str, manifest: dict[str, Any]) -> dict[str, bytes]:
    """Return the kept originals in the order of writing, each checked against its hash."""
    originals: dict[str, bytes] = {}
    for entry in manifest["files"]:
        file = store_dir(package_dir) / "originals" / entry["path"]
        source = file.read_bytes() if file.is_file() else b""
        if _sha256(source) != entry["before"]:
            current = _read(package_dir, entry["path"])
            if _sha256(current) != entry["before"]:
                raise PatchRefused(
                    f"sglang {release}: the original of {entry['path']} is missing or damaged in {file}, so the patch "
                    f"cannot be reverted or renewed. Reinstall sglang=={release}."
                )
            source = current
        originals[entry["path"]] = source
    return originals


def execute(todo: Plan) -> None:
    """Carry out a plan. Interrupted at any point, it leaves a state that the next plan finishes."""
    store = store_dir(todo.package_dir)
    if todo.stale and store.exists():
        shutil.rmtree(store)
    if todo.manifest is not None:
        if not todo.stale and _read(store, "manifest.json") != _manifest_bytes(todo.manifest):
            # A newer form of the patch: between the two manifests only originals are known to both.
            for path in reversed(todo.originals):
                _write(todo.package_dir / path, todo.originals[path])
        for path, source in todo.originals.items():
            _write(store / "originals" / path, source)
        _write(store / "manifest.json", _manifest_bytes(todo.manifest))
    for path, source in todo.final.items():
        _write(todo.package_dir / path, source)
    if todo.manifest is None and store.exists():
        (store / "manifest.json").unlink(missing_ok=True)
        shutil.rmtree(store)


def describe(package_dir: Path) -> dict[str, Any]:
    """Return the patch's state for a run's provenance: state, release, shape, patch_version, manifest_sha256."""
    release = read_version(package_dir)
    manifest = _read_manifest(package_dir, release)
    if manifest is None:
        return {"state": "absent", "release": release, "shape": _name_or_unknown(package_dir, release)}
    return {
        "state": "present" if not plan(package_dir, "present").changed else "incomplete",
        "release": release,
        "shape": manifest["shape"],
        "patch_version": manifest["patch_version"],
        "manifest_sha256": _sha256((store_dir(package_dir) / "manifest.json").read_bytes()),
    }


def _read(package_dir: Path, path: str) -> bytes:
    file = package_dir / path
    return file.read_bytes() if file.is_file() else b""


def _text(source: bytes) -> str:
    return source.decode("utf-8")


def _sha256(source: bytes) -> str:
    return hashlib.sha256(source).hexdigest()


def _write(path: Path, content: bytes) -> None:
    """Replace `path` in one step, keeping owner and mode; a no-op when it already has this content."""
    if path.is_file() and path.read_bytes() == content:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f".{path.name}.servelab-new")
    with beside.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    if path.exists():
        shutil.copymode(path, beside)
        owner = path.stat()
        os.chown(beside, owner.st_uid, owner.st_gid)
    else:
        beside.chmod(0o644)
    beside.replace(path)
