"""What installing a stack needs to know: for what there are locks, and why an installer failed."""

from __future__ import annotations

import re
from collections.abc import Iterable

from .stack_lock import LockError, parse
from .stack_rules import cuda_of, order

# Since this release SGLang is CUDA 13 on PyPI; an older one is only with a lock that was made with the cu130 indexes.
FIRST_CUDA_13 = "0.5.11"

_MISMATCHES = (
    # pip: "    sglang==0.5.23 from file:///…whl (from -r …):\n        Expected sha256 a…\n             Got        b…"
    r"(?m)^\s*(?P<what>\S.*?)(?: \(from -r .*\))?:\s*\n\s*Expected sha256 (?P<expected>[0-9a-f]{64})"
    r"(?:\s*\n\s*Expected\s+or [0-9a-f]{64})*\s*\n\s*Got\s+(?P<got>[0-9a-f]{64})",
    # uv: "Hash mismatch for `sglang==0.5.23`\n\nExpected:\n  sha256:a…\n\nComputed:\n  sha256:b…"
    r"Hash mismatch for `(?P<what>[^`]+)`[\s\S]*?Expected:\s*sha256:(?P<expected>[0-9a-f]{64})"
    r"[\s\S]*?Computed:\s*sha256:(?P<got>[0-9a-f]{64})",
)

# pip, then uv; which is all that either says where a wheelhouse was filled for something else.
_MISSING = (
    r"Could not find a version that satisfies the requirement (?P<what>\S+)",
    r"not found in the provided package locations and you require (?P<what>[^\s,]+)",
)
# In the same order: a directory that is not there.
_NOWHERE = (r"Location '[^']*' is ignored: it is either a non-exist", r"Failed to read `--find-links` directory")


def locks_known(names: list[str]) -> dict[str, list[str]]:
    """Release → the Pythons that it is locked for, both in their order, of lock files' names (0.5.23-py3.13.txt)."""
    known: dict[str, list[str]] = {}
    for name in names:
        if match := re.fullmatch(r"(.+)-py(\d+\.\d+)\.txt", name):
            known.setdefault(match[1], []).append(match[2])
    ordered = sorted(known, key=order)
    return {release: sorted(known[release], key=order) for release in ordered}


def release_refusal(version: str, known: Iterable[str], name: str = "sglang_version") -> str:
    """What is said of a release for which there is no lock: which there are, and how to get another.

    known: the releases that are locked. name: the variable that says the release.
    """
    supported = f"{name} is {version}, but the supported releases are {', '.join(known)}."
    # "latest" is of no time.
    if version[:1].isdigit() and order(version) < order(FIRST_CUDA_13):
        return (
            f"{supported} Before {FIRST_CUDA_13} SGLang is CUDA 12 on PyPI: it needs a lock made with the cu130 "
            "indexes, named in sglang_env_lock."
        )
    return f"{supported} Another release needs a lock made with `servelab lock`, named in sglang_env_lock."


def lock_refusals(text: str, path: str, version: str) -> list[str]:
    """Why a lock of one's own is not one for a release of SGLang: a sentence each, empty where it is.

    text: the lock's. path: how the sentences call it. For which Python it is, only the machine can say.
    """
    try:
        pins = parse(text).pins
    except LockError as error:
        return [f"sglang_env_lock is {path}, but that is no lock: {error}"]
    locked = pins["sglang"].version if "sglang" in pins else None
    if locked != version:
        return [
            f"sglang_env_lock is {path}, which locks {f'SGLang {locked}' if locked else 'no SGLang'}, but "
            f"sglang_version is {version}; name that release, or make the lock for it with `servelab lock`."
        ]
    torch = pins["torch"].version if "torch" in pins else ""
    if order(version) < order(FIRST_CUDA_13) and (cuda_of(torch) or "").partition(".")[0] != "13":
        return [
            f"sglang_env_lock is {path}, which locks {f'torch {torch}' if torch else 'no torch'}, but before "
            f"{FIRST_CUDA_13} SGLang's torch is CUDA 12 unless its version says +cu130; make the lock again with the "
            "cu130 indexes (extra-index-urls in your stacks.toml)."
        ]
    return []


def install_failure(text: str, wheelhouse: str = "") -> str:
    """What pip or uv complained about, in one line: the wheel that is not the locked one, else the last error.

    wheelhouse: the only directory that was asked, where it was one.
    """
    for pattern in _MISMATCHES:
        if found := re.search(pattern, text):
            return (
                f"{found['what']} is not what was locked: its sha256 is {found['got']}, and {found['expected']} was "
                "expected. Get it again from a source that you trust, or lock again."
            )
    remedy = "fill it with playbooks/wheelhouse.yml for this release and this Python, and bring it to this machine."
    if wheelhouse and any(re.search(pattern, text) for pattern in _NOWHERE):
        return f"The wheelhouse {wheelhouse} does not exist here; {remedy}"
    for pattern in _MISSING if wheelhouse else ():
        if found := re.search(pattern, text):
            return f"The wheelhouse {wheelhouse} has no wheel of {found['what']} that fits; {remedy}"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"(ERROR|error|cause)", line)]
    return " ".join((errors or lines or ["No reason was given."])[:4])
