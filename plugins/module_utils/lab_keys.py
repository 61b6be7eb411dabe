"""The ssh keys of a lab: which pairs are whole, and the file of known hosts."""

from __future__ import annotations

from pathlib import Path

__all__ = ["is_whole", "known", "public_path"]


def public_path(private: Path) -> Path:
    """Where the public half of a key lies."""
    return private.with_name(f"{private.name}.pub")


def is_whole(private: Path) -> bool:
    """Whether both halves are there and end as ssh-keygen ends them."""
    ends = ((private, "-----END OPENSSH PRIVATE KEY-----\n"), (public_path(private), "\n"))
    return all(path.is_file() and path.read_text(errors="replace").endswith(end) for path, end in ends)


def known(text: str, host: str, public: str) -> str:
    """known_hosts with this as the host's only key of its type; every other line stays as it is."""
    kind, key = public.split()[:2]
    line = f"{host} {kind} {key}\n"
    lines = text.splitlines(keepends=True)
    kept = [each for each in lines if each == line or each.split()[:2] != [host, kind]]
    if line in kept:
        return "".join(kept)
    if kept and not kept[-1].endswith("\n"):
        kept[-1] += "\n"
    return "".join([*kept, line])
