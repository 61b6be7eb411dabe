"""Which SGLang release lies in a package directory, and how two releases compare. Nothing is imported from it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_ASSIGNED = re.compile(r"""^__version__\s*(?::\s*str\s*)?=(?:\s*version\s*=)?\s*["']([^"']+)["']""", re.MULTILINE)
_RELEASE = re.compile(r"^(\d+(?:\.\d+)*)(?:\.post(\d+))?(.*)$")


class ReleaseError(ValueError):
    """The directory is not an SGLang package, or its release cannot be told. The text is one sentence."""


@dataclass(frozen=True, order=True)
class Release:
    """A release as a value that sorts: 0.5.10 < 0.5.10.post1 < 0.5.11."""

    numbers: tuple[int, ...]
    post: int = 0

    @classmethod
    def parse(cls, text: str) -> Release:
        """Turn "0.5.10.post1" into a Release; a pre-release or local suffix is ignored. Raises ReleaseError."""
        match = _RELEASE.match(text.strip())
        if match is None:
            raise ReleaseError(f"{text!r} is not a release number such as 0.5.23.")
        return cls(tuple(int(part) for part in match[1].split(".")), int(match[2] or 0))

    def __str__(self) -> str:
        return ".".join(map(str, self.numbers)) + (f".post{self.post}" if self.post else "")


def read_version(package_dir: Path) -> str:
    """Return the release of the SGLang package in `package_dir` (the directory named `sglang`) as text.

    Read from `_version.py` or `version.py`; where those only ask the installed metadata, from the `.dist-info`
    beside the package. Raises ReleaseError when nothing says it.
    """
    if not (package_dir / "srt").is_dir():
        raise ReleaseError(f"{package_dir} is not an SGLang package: it has no directory srt. Install SGLang first.")
    for name in ("_version.py", "version.py"):
        file = package_dir / name
        if file.is_file() and (match := _ASSIGNED.search(file.read_text(encoding="utf-8"))):
            return match[1]
    for metadata in sorted(package_dir.parent.glob("sglang-*.dist-info/METADATA")):
        for line in metadata.read_text(encoding="utf-8").splitlines():
            if line.startswith("Version: "):
                return line.removeprefix("Version: ").strip()
    raise ReleaseError(f"Nothing in {package_dir} or beside it says which SGLang release it is. Reinstall SGLang.")


def find_package(pattern: str) -> Path:
    """Return the only directory that matches `pattern` (a path; wildcards as in a shell: the Python version varies).

    Raises ReleaseError when none or several match.
    """
    wanted = Path(pattern)
    root = Path(wanted.anchor)
    found = sorted(path for path in root.glob(str(wanted.relative_to(root))) if path.is_dir())
    if len(found) == 1:
        return found[0]
    if not found:
        raise ReleaseError(f"No SGLang package is in {pattern}. Install SGLang first.")
    raise ReleaseError(f"{pattern} fits several directories: {', '.join(map(str, found))}. Name one of them.")
