"""The lock of a stack: every wheel with its version and hashes, and the inputs that it was resolved from.

A lock is a requirements file that pip and uv install with --require-hashes. Its head holds `# key: value` lines.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

_HEAD = re.compile(r"#\s*([a-z-]+):\s*(.*)$")
_PIN = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)$")
_HASH = re.compile(r"--hash=sha256:([0-9a-f]{64})$")


class LockError(ValueError):
    """A text is not a lock. The message is one sentence."""


@dataclass(frozen=True)
class Pin:
    """One package: its version and the sha256 of the wheels that may be installed."""

    version: str
    hashes: tuple[str, ...]


@dataclass
class Lock:
    """head: key → its values, in order. pins: normalized name → Pin."""

    head: dict[str, list[str]] = field(default_factory=dict)
    pins: dict[str, Pin] = field(default_factory=dict)

    def one(self, key: str) -> str | None:
        """The only value of a head's key, or None."""
        values = self.head.get(key) or []
        return values[0] if len(values) == 1 else None


def normalize(name: str) -> str:
    """A package's name as all tools compare it: Foo_Bar.baz → foo-bar-baz."""
    return re.sub(r"[-_.]+", "-", name).lower()


def parse(text: str) -> Lock:
    """Read a lock. Raises LockError for a line that is neither head, pin nor hash, and for a pin without a hash."""
    lock = Lock()
    hashes: dict[str, list[str]] = {}
    versions: dict[str, str] = {}
    name = ""
    for number, raw in enumerate(text.splitlines(), 1):
        line = raw.strip().removesuffix("\\").strip()
        if not line:
            continue
        if line.startswith("#"):
            if head := _HEAD.match(line):
                lock.head.setdefault(head[1], []).append(head[2].strip())
        elif pin := _PIN.match(line):
            name = normalize(pin[1])
            versions[name], hashes[name] = pin[2], []
        elif (digest := _HASH.match(line)) and name:
            hashes[name].append(digest[1])
        else:
            raise LockError(f"Line {number} of the lock is {raw.strip()!r}, which is no pin, no hash and no comment.")
    bare = [name for name, digests in hashes.items() if not digests]
    if bare:
        raise LockError(f"The lock has no hash for {', '.join(sorted(bare))}; make it with `servelab lock`.")
    lock.pins = {name: Pin(version, tuple(hashes[name])) for name, version in versions.items()}
    return lock


def render(head: Sequence[tuple[str, str]], pins: Mapping[str, Pin]) -> str:
    """The text of a lock."""
    lines = [f"# {key}: {value}".rstrip() for key, value in head]
    for name in sorted(pins):
        pin = pins[name]
        lines.append(
            " \\\n    ".join([f"{name}=={pin.version}", *(f"--hash=sha256:{digest}" for digest in pin.hashes)])
        )
    return "\n".join(lines) + "\n"


def subset(text: str, names: Iterable[str]) -> str:
    """The lock with only the packages `names`. Raises LockError where one of them is not locked."""
    lock = parse(text)
    wanted = [normalize(name) for name in names]
    missing = [name for name in wanted if name not in lock.pins]
    if missing:
        raise LockError(f"The lock does not have {', '.join(missing)}.")
    head = [(key, value) for key, values in lock.head.items() for value in values]
    return render([*head, ("only", " ".join(wanted))], {name: lock.pins[name] for name in wanted})
