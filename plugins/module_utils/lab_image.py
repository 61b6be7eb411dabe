"""Recipes of the lab's root file systems: what a cached image was made of is part of its name."""

from __future__ import annotations

import hashlib
import io
import json
import re
import tarfile
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ImageFile", "Recipe", "recipes"]

# Raise it when the way of building changes in a manner that the recipe itself does not show.
FORMAT = 1


@dataclass(frozen=True)
class ImageFile:
    """A file (or, with `link`, a symbolic link) to be put into the image; `path` is absolute in it."""

    path: str
    content: str = ""
    mode: str = "0644"
    link: str | None = None


@dataclass(frozen=True)
class Recipe:
    """One image: what mmdebstrap installs, the files laid over it, the shell lines then run inside it."""

    name: str
    suite: str
    sources: tuple[str, ...]
    packages: tuple[str, ...]
    files: tuple[ImageFile, ...] = field(default=())
    run: str = ""

    @property
    def digest(self) -> str:
        """12 hex digits that change when the image would."""
        stated = [FORMAT, self.name, self.suite, self.sources, sorted(self.packages), self.run]
        laid = sorted([file.path, file.content, file.mode, file.link] for file in self.files)
        return hashlib.sha256(json.dumps([stated, laid]).encode()).hexdigest()[:12]

    @property
    def key(self) -> str:
        """What tells it from the other images of today: name and release."""
        return f"{self.name}-{self.suite}"

    @property
    def file_name(self) -> str:
        return f"{self.key}-{self.digest}.tar.zst"

    def overlay(self) -> bytes:
        """The files as a tar archive owned by root; without directory members, so that no directory's mode changes."""
        buffer = io.BytesIO()
        with tarfile.open(fileobj=buffer, mode="w") as archive:
            for file in self.files:
                info = tarfile.TarInfo(file.path.lstrip("/"))
                data = b""
                if file.link is not None:
                    info.type, info.linkname = tarfile.SYMTYPE, file.link
                else:
                    data = file.content.encode()
                    info.size, info.mode = len(data), int(file.mode, 8)
                archive.addfile(info, io.BytesIO(data))
        return buffer.getvalue()


def recipes(stated: dict[str, Any]) -> list[Recipe]:
    """From the shape that the module `lab_image` takes, one for each suite. SUITE in a source stands for it."""
    return [
        Recipe(
            name=stated["name"],
            suite=suite,
            sources=tuple(re.sub(r"\bSUITE\b", suite, source) for source in stated["sources"]),
            packages=tuple(stated["packages"]),
            files=tuple(
                ImageFile(file["path"], file.get("content") or "", file.get("mode") or "0644", file.get("link"))
                for file in stated.get("files") or []
            ),
            run=stated.get("run") or "",
        )
        for suite in stated["suites"]
    ]
