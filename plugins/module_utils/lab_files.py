"""Files, links and directories below one root, brought to a wanted state in one go.

A lab consists of some hundred small files, many of them in the root file system of a container; a module run for each
would take longer than all the rest.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

__all__ = ["EscapeError", "Wanted", "delete", "differs", "place", "put", "surplus", "tree"]

_BYTE_CODE = "__pycache__"


class EscapeError(Exception):
    """A directory on the way is a symbolic link that leaves the root: what looks like a guest's file is the host's."""


@dataclass(frozen=True)
class Wanted:
    """One path relative to the root: a file with `content`, a symbolic link to `link`, or else a directory.

    owner: user and group number; None leaves them as they are.
    """

    path: str
    content: bytes | None = None
    link: str | None = None
    mode: int = 0o755
    owner: int | None = None


def _files(directory: Path) -> Iterable[tuple[Path, Path]]:
    """Files and links below a directory, absolute and relative; byte code is not looked at."""
    for top, directories, names in os.walk(directory):
        if _BYTE_CODE in directories:
            directories.remove(_BYTE_CODE)
        for name in names:
            path = Path(top, name)
            yield path, path.relative_to(directory)


def tree(below: str, source: Path) -> list[Wanted]:
    """The files of a directory as they are wanted under `below`.

    0755 for what its owner may run, else 0644: whatever umask a checkout was made with, every guest can read the copy.
    """
    return [
        Wanted(str(below / relative), path.read_bytes(), mode=0o755 if path.stat().st_mode & 0o100 else 0o644)
        for path, relative in _files(source)
    ]


def surplus(root: Path, trees: Mapping[str, Path], wanted: Iterable[Wanted]) -> list[str]:
    """Files within the trees' copies that nobody wants any more, sorted."""
    there = {str(below / relative) for below in trees for _, relative in _files(root / below)}
    return sorted(there - {item.path for item in wanted})


def differs(root: Path, item: Wanted) -> bool:
    """Whether something has to be done for this path."""
    path = root / item.path
    try:
        # A directory may be a link to another one, as where /var/lib/servelab-lab lies on a larger disk.
        found = path.stat() if item.link is None and item.content is None else path.lstat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    if item.owner is not None and (found.st_uid, found.st_gid) != (item.owner, item.owner):
        return True
    if item.link is not None:
        return not stat.S_ISLNK(found.st_mode) or str(path.readlink()) != item.link
    if stat.S_IMODE(found.st_mode) != item.mode:
        return True
    if item.content is None:
        return not stat.S_ISDIR(found.st_mode)
    return not stat.S_ISREG(found.st_mode) or path.read_bytes() != item.content


def _stay_within(root: Path, directory: Path) -> None:
    if not directory.resolve().is_relative_to(root.resolve()):
        raise EscapeError(f"{directory} leads out of {root} to {directory.resolve()}; nothing is written there.")


def _place(root: Path, path: str) -> Path:
    """The absolute path, its directory made. Raises EscapeError."""
    target = root / path
    _stay_within(root, target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    return target


def put(root: Path, item: Wanted) -> None:
    """Make it so. A file is replaced at once: who opens it sees the old one or the new one, and nothing between."""
    target = _place(root, item.path)
    half = target.with_name(f".{target.name}.half")
    half.unlink(missing_ok=True)
    if item.link is not None:
        half.symlink_to(item.link)
    elif item.content is not None:
        half.touch(mode=0o600, exist_ok=False)
        half.write_bytes(item.content)
        half.chmod(item.mode)
    else:
        _stay_within(root, target)
        target.mkdir(exist_ok=True)
        target.chmod(item.mode)
        half = target
    if item.owner is not None:
        os.chown(half, item.owner, item.owner, follow_symlinks=False)
    if half != target:
        half.replace(target)


def place(root: Path, path: str, source: Path, *, pretend: bool = False) -> bool:
    """Have the large file `source` at `path`: a hard link where the file system is the same, else a copy.

    Whether anything had to be done; with `pretend` it is only told. Time and size tell a copy from another file.
    Raises EscapeError.
    """
    target = root / path.lstrip("/")
    try:
        old, new = target.stat(), source.stat()
        if (old.st_dev, old.st_ino) == (new.st_dev, new.st_ino):
            return False
        if (old.st_size, old.st_mtime_ns) == (new.st_size, new.st_mtime_ns):
            return False
    except FileNotFoundError:
        pass
    if pretend:
        return True
    _place(root, path.lstrip("/"))
    half = target.with_name(f".{target.name}.half")
    half.unlink(missing_ok=True)
    try:
        os.link(source, half)
    except OSError:
        shutil.copy2(source, half)
    half.replace(target)
    return True


def delete(root: Path, path: str) -> None:
    """Delete a file, and the directories that it leaves empty but for byte code."""
    target = _place(root, path)
    target.unlink()
    for directory in target.parents:
        left = [entry for entry in directory.iterdir() if entry.name != _BYTE_CODE]
        if left or directory == root:
            return
        shutil.rmtree(directory)
