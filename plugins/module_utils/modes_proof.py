"""What was proved to serve: a fingerprint of all that decides it, so that a proof is repeated only when it must be."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

SCHEMA = "servelab.proof/1"


def fingerprint(files: Iterable[Path], stack: Path, package: Path | None) -> str:
    """Hash of the contents of `files` (unit, mode), of where `stack` leads and of every source file of `package`.

    Source files count by name, size and time of change: reading some thousand of them would cost seconds, and whoever
    patches one cannot help changing its time. A missing file counts as missing.
    """
    digest = hashlib.sha256()
    for path in files:
        digest.update(f"{path.name}\0".encode())
        digest.update(path.read_bytes() if path.is_file() else b"missing")
    digest.update(os.path.realpath(stack).encode())
    if package is not None:
        for source in sorted(package.rglob("*.py")):
            state = source.stat()
            digest.update(f"{source.relative_to(package)}\0{state.st_size}\0{state.st_mtime_ns}\n".encode())
    return digest.hexdigest()
