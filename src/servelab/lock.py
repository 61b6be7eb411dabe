"""`servelab lock`: resolve the stacks that stacks.toml describes, and write one lock for each of them and each Python.

uv resolves; of what it finds, a lock keeps the wheels that fit the platform, with their hashes. The exact inputs stand
in the lock's head. Needs the network, but downloads no wheel.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from servelab.shared.stack_lock import LockError, Pin, normalize, parse, render

STACKS = Path("roles/sglang_env/files/stacks.toml")
_KEYS = {"cuda", "requirements", "overrides", "extra-index-urls", "pythons", "output"}
_GENERAL = {"uv", "upload-before", "platform", "index-url", "pythons", "locks"}


class CannotLock(Exception):
    """The stacks cannot be resolved. The message is for a person."""


def add_parser(subparsers: Any) -> argparse.ArgumentParser:
    """Declare the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "lock", help="resolve SGLang's stacks into locks with hashes", description=__doc__
    )
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help="what to lock, as in stacks.toml (default: everything)"
    )
    parser.add_argument("--stacks", type=Path, default=STACKS, help="the description (default: %(default)s)")
    parser.add_argument("--uv", default="uv", help="uv's program (default: the one in PATH)")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 where a lock would change")
    return parser


def run(args: argparse.Namespace) -> int:
    """Write, or with --check compare, the locks; 0, 1 (a lock would change) or 2 (it cannot be done)."""
    changed = False
    try:
        plan = read(args.stacks)
        unknown = [name for name in args.names if name not in plan["locks"]]
        if unknown:
            raise CannotLock(f"{args.stacks} has no {', '.join(unknown)}; it has {', '.join(plan['locks'])}.")
        _check_uv(args.uv, plan["uv"])
        for name in args.names or plan["locks"]:
            for python in plan["locks"][name].get("pythons", plan["pythons"]):
                target = target_of(args.stacks, name, plan["locks"][name], python)
                text = lock_text(resolve(args.uv, plan, name, python), plan, name, python)
                before = target.read_text(encoding="utf-8") if target.exists() else ""
                same = before == text
                changed = changed or not same
                if not same and not args.check:
                    target.parent.mkdir(parents=True, exist_ok=True)
                    target.write_text(text, encoding="utf-8")
                print(f"{target}: {'as before' if same else difference(before, text)}")
    except CannotLock as error:
        print(f"servelab lock: {error}", file=sys.stderr)
        return 2
    return 1 if args.check and changed else 0


def read(path: Path) -> dict[str, Any]:
    """The description as a mapping. Raises CannotLock with everything that is wrong with it."""
    try:
        plan = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, tomllib.TOMLDecodeError) as error:
        raise CannotLock(f"{path} cannot be read: {error}") from error
    errors = [f"{path} lacks {key}." for key in sorted(_GENERAL - set(plan))]
    errors += [f"{path} has an unknown key {key}." for key in sorted(set(plan) - _GENERAL)]
    for name, entry in plan.get("locks", {}).items():
        errors += [f"{path}: {name} has an unknown key {key}." for key in sorted(set(entry) - _KEYS)]
        if not entry.get("requirements"):
            errors.append(f"{path}: {name} has no requirements.")
    if errors:
        raise CannotLock(" ".join(errors))
    return plan


def target_of(stacks: Path, name: str, entry: Mapping[str, Any], python: str) -> Path:
    """Where a lock stands, beside the description."""
    output = str(entry.get("output", f"locks/{name}-py{python}.txt"))
    return Path(stacks.parent / output.replace("{python}", python)).resolve()


def resolve(uv: str, plan: Mapping[str, Any], name: str, python: str) -> dict[str, Any]:
    """What uv resolves for one lock, as the content of a pylock.toml. Raises CannotLock with uv's own reason."""
    entry = plan["locks"][name]
    with tempfile.TemporaryDirectory(prefix="servelab-lock-") as directory:
        place = Path(directory)
        (place / "requirements.in").write_text("\n".join(entry["requirements"]) + "\n", encoding="utf-8")
        (place / "overrides.txt").write_text("\n".join(entry.get("overrides", [])) + "\n", encoding="utf-8")
        command = [uv, "pip", "compile", "requirements.in", "--no-config", "--quiet", "--format", "pylock.toml"]
        command += ["--output-file", "pylock.toml", "--overrides", "overrides.txt", "--only-binary", ":all:"]
        command += ["--python-version", python, "--python-platform", plan["platform"]]
        command += ["--exclude-newer", plan["upload-before"], "--default-index", plan["index-url"]]
        # First the extra indexes, as uv takes a package from the first index that has it.
        command += [word for url in entry.get("extra-index-urls", []) for word in ("--index", url)]
        done = subprocess.run(command, cwd=place, capture_output=True, text=True, check=False)
        if done.returncode:
            raise CannotLock(f"uv cannot resolve {name} for Python {python}:\n{done.stderr.strip()}")
        return tomllib.loads((place / "pylock.toml").read_text(encoding="utf-8"))


def lock_text(resolved: Mapping[str, Any], plan: Mapping[str, Any], name: str, python: str) -> str:
    """The lock of a resolved pylock.toml. Raises CannotLock for a package without a wheel."""
    entry = plan["locks"][name]
    pins: dict[str, Pin] = {}
    size = 0
    for package in resolved["packages"]:
        wheels = package.get("wheels", [])
        if not wheels:
            raise CannotLock(f"{package['name']} {package['version']}, which {name} needs, has no wheel for {python}.")
        pins[normalize(package["name"])] = Pin(package["version"], tuple(sorted(w["hashes"]["sha256"] for w in wheels)))
        # Where several fit, the larger one is the compiled one, which installers prefer.
        size += max(wheel.get("size", 0) for wheel in wheels)
    head = [
        ("made-by", f"servelab lock {name}; change stacks.toml and run it again"),
        ("name", name),
        ("python", python),
        *([("cuda", entry["cuda"])] if "cuda" in entry else []),
        *(("requirement", requirement) for requirement in entry["requirements"]),
        *(("override", override) for override in entry.get("overrides", [])),
        ("index", plan["index-url"]),
        *(("extra-index", url) for url in entry.get("extra-index-urls", [])),
        ("upload-before", plan["upload-before"]),
        ("platform", plan["platform"]),
        ("uv", plan["uv"]),
        ("packages", str(len(pins))),
        ("bytes", str(size)),
    ]
    return render(head, pins)


def difference(before: str, after: str) -> str:
    """In words, what another lock would install instead."""
    new = parse(after).pins
    try:
        old = parse(before).pins
    except LockError:
        old = {}
    if not old:
        return f"new, {len(new)} packages"
    words = [f"{name} {old[name].version} → {new[name].version}" for name in sorted(old.keys() & new.keys())
             if old[name].version != new[name].version]  # fmt: skip
    words += [f"+{name} {new[name].version}" for name in sorted(new.keys() - old.keys())]
    words += [f"-{name} {old[name].version}" for name in sorted(old.keys() - new.keys())]
    return ", ".join(words) or "other wheels or inputs of the same versions"


def _check_uv(uv: str, wanted: str) -> None:
    try:
        said: Sequence[str] = subprocess.run(
            [uv, "--version"], capture_output=True, text=True, check=True
        ).stdout.split()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotLock(f"{uv} does not run; install it with `pip install uv=={wanted}`.") from error
    if said[1:2] != [wanted]:
        raise CannotLock(
            f"{' '.join(said)} is installed, but the locks are made with uv {wanted}: pip install uv=={wanted}."
        )
