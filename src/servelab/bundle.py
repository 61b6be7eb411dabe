"""Bundles: the directory of one run. Received whole or not at all, checksummed, never overwritten.

The layout and the schemas of the files are in docs/architecture.md, section "Bundle".
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
import tarfile
import tempfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any

from servelab import ledger

RUN_SCHEMA = "servelab.run/1"
SUMS = "SHA256SUMS"
RUN_ID = re.compile(r"\d{8}T\d{6}Z-[A-Za-z0-9][A-Za-z0-9_.-]*")


class BundleError(Exception):
    """A bundle that cannot be used; the message says which, why, and what to do."""


@dataclass(frozen=True)
class Bundle:
    """One run, read from its directory. ``summary`` is None for a run that measured nothing; ``server_info`` is
    what the server told of itself, at the end if it could, and empty if it never did."""

    path: Path
    run: dict[str, Any]
    summary: dict[str, Any] | None
    provenance: dict[str, Any]
    server_info: dict[str, Any] = field(default_factory=dict)

    @property
    def mode(self) -> str:
        return str(self.run["mode"])

    @property
    def simulated(self) -> dict[str, Any] | None:
        simulated: dict[str, Any] | None = self.run.get("simulated")
        return simulated


def read(path: Path) -> Bundle:
    """Read the bundle at *path*.

    Raises BundleError when it is not a bundle of a schema that this version knows.
    """
    run = _json(path / "run.json")
    if run.get("schema") != RUN_SCHEMA:
        raise BundleError(
            f"{path}/run.json has schema {run.get('schema')!r}; this version reads {RUN_SCHEMA!r}: "
            "read it with the version of servelab that wrote it."
        )
    summary = _json(path / "summary.json") if (path / "summary.json").exists() else None
    provenance = _json(path / "provenance.json") if (path / "provenance.json").exists() else {}
    told = _json(path / "server_info.json") if (path / "server_info.json").exists() else {}
    server_info = told.get("after") or told.get("before") or provenance.get("server_info") or {}
    return Bundle(path=path, run=run, summary=summary, provenance=provenance, server_info=server_info)


def runs(campaign: Path) -> list[Bundle]:
    """All bundles of a campaign directory, oldest first (their names begin with a UTC time stamp)."""
    return [read(p) for p in sorted(campaign.iterdir()) if RUN_ID.fullmatch(p.name) and p.is_dir()]


def problems(path: Path) -> list[str]:
    """What is wrong with the checksums of the bundle at *path*: one sentence each, empty when all is well."""
    sums = path / SUMS
    if not sums.is_file():
        return [f"{path} has no {SUMS}: it is not a complete bundle."]
    found = []
    listed: set[str] = set()
    for line in sums.read_text().splitlines():
        digest, _, name = line.partition("  ")
        name = name.removeprefix("./")
        listed.add(name)
        file = path / name
        if not file.is_file():
            found.append(f"{name} is listed in {SUMS} and missing.")
        elif _sha256(file) != digest:
            found.append(f"{name} was changed after the run: its checksum differs from {SUMS}.")
    present = {str(p.relative_to(path)) for p in path.rglob("*") if p.is_file()} - {SUMS}
    found += [f"{name} is not listed in {SUMS}: it does not belong to the run." for name in sorted(present - listed)]
    return found


def receive(tar: Path, campaign: Path) -> Path:
    """Unpack *tar* (made on the guest) into *campaign*, verify it, and give it its name in one step.

    Returns the bundle's path and appends the run to the ledger beside the campaign. Raises BundleError, leaving
    nothing behind, when the archive is damaged or a bundle of that name exists.
    """
    campaign.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".incoming-", dir=campaign) as scratch:
        unpacked = Path(scratch) / "bundle"
        try:
            with tarfile.open(tar) as archive:
                _extract(archive, unpacked)
        except (tarfile.TarError, OSError, EOFError) as error:
            raise BundleError(f"{tar} cannot be unpacked ({error}): fetch it from the guest again.") from error
        if wrong := problems(unpacked):
            raise BundleError(f"{tar} is damaged, nothing was kept: " + " ".join(wrong))
        bundle = read(unpacked)
        run_id = str(bundle.run.get("run_id", ""))
        if not RUN_ID.fullmatch(run_id):
            raise BundleError(f"{tar} names its run {run_id!r}; a run is named <UTC time stamp>-<mode>.")
        target = campaign / run_id
        if target.exists():
            raise BundleError(f"{target} exists, and results are never overwritten: move it away or run again.")
        _flush(unpacked)
        unpacked.rename(target)
    ledger.append(campaign.parent / ledger.FILE, ledger.line_of(read(target)))
    return target


def export(path: Path, into: Path) -> Path:
    """Write the bundle at *path* as one archive that can be given away; return its path.

    Secrets are taken out once more; what names machines and people (a host in the log, a path) stays: read it before
    you publish it. Raises BundleError when the bundle is damaged or the archive exists.
    """
    from servelab.shared.redact import redact

    if wrong := problems(path):
        raise BundleError(f"{path} is damaged and is not given away: " + " ".join(wrong))
    read(path)
    target = into / f"{path.name}.tar.gz"
    if target.exists():
        raise BundleError(f"{target} exists, and results are never overwritten: move it away.")
    with tempfile.TemporaryDirectory(prefix=".export-", dir=into) as scratch:
        copy = Path(scratch) / path.name
        for file in sorted(p for p in path.rglob("*") if p.is_file() and p.name != SUMS):
            clean = copy / file.relative_to(path)
            clean.parent.mkdir(parents=True, exist_ok=True)
            clean.write_text(redact(file.read_text(errors="replace")))
        seal(copy)
        packed = Path(scratch) / target.name
        with tarfile.open(packed, "w:gz") as archive:
            archive.add(copy, arcname=".", filter=_anonymous)
        packed.rename(target)
    return target


def _anonymous(member: tarfile.TarInfo) -> tarfile.TarInfo:
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    return member


def seal(path: Path) -> None:
    """Write SHA256SUMS over every file of the directory *path*."""
    files = sorted(p for p in path.rglob("*") if p.is_file() and p.name != SUMS)
    (path / SUMS).write_text("".join(f"{_sha256(p)}  {p.relative_to(path)}\n" for p in files))


def _extract(archive: tarfile.TarFile, into: Path) -> None:
    """Unpack files and directories; refuse whatever could leave *into*."""
    # Not filter="data": Debian 12's Python 3.11.2 has no filters. A bundle holds nothing but files and directories.
    # What this loop lets through needs none, and where there are filters, saying so keeps them quiet.
    archive.extraction_filter = lambda member, _: member
    for member in archive.getmembers():
        path = PurePosixPath(member.name)
        if not (member.isfile() or member.isdir()) or path.is_absolute() or ".." in path.parts:
            raise tarfile.TarError(f"{member.name!r} is no plain file below the bundle")
        member.mode = 0o755 if member.isdir() else 0o644
        member.uid, member.gid, member.uname, member.gname = os.getuid(), os.getgid(), "", ""
        archive.extract(member, into)


def _json(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise BundleError(f"{path} is missing: {path.parent} is not a bundle.") from error
    except (OSError, ValueError) as error:
        raise BundleError(f"{path} cannot be read as JSON ({error}).") from error
    if not isinstance(value, dict):
        raise BundleError(f"{path} holds no JSON object.")
    return value


def _sha256(path: Path) -> str:
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _flush(directory: Path) -> None:
    """Bring the files to disk before the rename that announces them."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as stream:
                os.fsync(stream.fileno())


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser("bundle", help="receive, export, import, seal or verify the directory of a run")
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    take = actions.add_parser("receive", help="unpack a run fetched from a guest, verify it, enter it in the ledger")
    take.add_argument("--tar", type=Path, required=True)
    take.add_argument("--into", type=Path, required=True, metavar="CAMPAIGN_DIR")
    give = actions.add_parser("export", help="write one archive of a run, secrets taken out, to give away")
    give.add_argument("path", type=Path)
    give.add_argument("--into", type=Path, default=Path(), metavar="DIR")
    get = actions.add_parser("import", help="take in an archive that somebody gave: checksums are verified first")
    get.add_argument("tar", type=Path)
    get.add_argument("--into", type=Path, default=Path("results/imported"), metavar="CAMPAIGN_DIR")
    for name, text in (("seal", "write SHA256SUMS"), ("verify", "compare a bundle with its SHA256SUMS")):
        actions.add_parser(name, help=text).add_argument("path", type=Path)


def run(args: argparse.Namespace) -> int:
    try:
        if args.action == "receive":
            print(receive(args.tar, args.into))
        elif args.action == "export":
            print(export(args.path, args.into))
        elif args.action == "import":
            print(receive(args.tar, args.into))
        elif args.action == "seal":
            seal(args.path)
        else:
            wrong = problems(args.path)
            print("\n".join(wrong) if wrong else f"{args.path}: every file is as it was written.")
            return 1 if wrong else 0
    except BundleError as error:
        print(f"servelab bundle: {error}", file=sys.stderr)
        return 1
    return 0
