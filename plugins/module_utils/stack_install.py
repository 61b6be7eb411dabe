"""What installing a stack needs to know: for what there are locks, and why an installer failed."""

from __future__ import annotations

import re

from .stack_rules import order

_MISMATCHES = (
    # pip: "    sglang==0.5.23 from file:///…whl (from -r …):\n        Expected sha256 a…\n             Got        b…"
    r"(?m)^\s*(?P<what>\S.*?)(?: \(from -r .*\))?:\s*\n\s*Expected sha256 (?P<expected>[0-9a-f]{64})"
    r"(?:\s*\n\s*Expected\s+or [0-9a-f]{64})*\s*\n\s*Got\s+(?P<got>[0-9a-f]{64})",
    # uv: "Hash mismatch for `sglang==0.5.23`\n\nExpected:\n  sha256:a…\n\nComputed:\n  sha256:b…"
    r"Hash mismatch for `(?P<what>[^`]+)`[\s\S]*?Expected:\s*sha256:(?P<expected>[0-9a-f]{64})"
    r"[\s\S]*?Computed:\s*sha256:(?P<got>[0-9a-f]{64})",
)


def locks_known(names: list[str]) -> dict[str, list[str]]:
    """Release → the Pythons that it is locked for, both in their order, of lock files' names (0.5.23-py3.13.txt)."""
    known: dict[str, list[str]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+)-py(\d+\.\d+)\.txt", name):
            known.setdefault(match[1], []).append(match[2])
    ordered = sorted(known, key=order)
    return {release: sorted(known[release], key=order) for release in ordered}


def install_failure(text: str) -> str:
    """What pip or uv complained about, in one line: the wheel that is not the locked one, else the last error."""
    for pattern in _MISMATCHES:
        if found := re.search(pattern, text):
            return (
                f"{found['what']} is not what was locked: its sha256 is {found['got']}, and {found['expected']} was "
                "expected. Get it again from a source that you trust, or lock again."
            )
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|cause)", line)]
    return " ".join((errors or lines or ["No reason was given."])[:4])
