#!/usr/bin/env python3
"""How long a stack takes to install, and what it fetches: uv against pip, with nothing cached and with everything.

    bench/stack.py LOCK DIRECTORY [--only sglang]    # Python as the lock says, uv in PATH

DIRECTORY gets the caches and venvs and should be on the disk that a stack would be on. Prints a row per installation.
Needs the network, several GB of it for a whole lock; --only measures one package.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "src"))

from servelab.shared.stack_lock import parse, subset  # noqa: E402


def mib(directory: Path) -> int:
    """What a directory takes on its disk."""
    if not directory.exists():
        return 0
    done = subprocess.run(["du", "-sm", str(directory)], capture_output=True, text=True, check=True)
    return int(done.stdout.split()[0])


def install(tool: str, lock: Path, python: str, venv: Path, cache: Path) -> float:
    """Seconds that one installation took, the making of the venv not counted."""
    shutil.rmtree(venv, ignore_errors=True)
    subprocess.run([python, "-m", "venv", str(venv)], check=True)
    inside = str(venv / "bin/python")
    if tool == "uv":
        command = ["uv", "pip", "sync", "--quiet", "--no-config", "--python", inside, "--require-hashes"]
        command += ["--only-binary=:all:", "--link-mode=copy", "--compile-bytecode", str(lock)]
    else:
        command = [inside, "-m", "pip", "install", "--quiet", "--require-hashes", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--progress-bar=off", "-r", str(lock)]
    # Only what the lock's index gives: no configuration of this machine.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHONPATH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_CACHE_DIR": str(cache), "UV_CACHE_DIR": str(cache)}
    started = time.monotonic()
    subprocess.run(command, check=True, env=env)
    return time.monotonic() - started


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", default="python3", help="the Python that the lock is for (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PACKAGE")
    parser.add_argument("--tools", nargs="+", default=["uv", "pip"])
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    text = args.lock.read_text(encoding="utf-8")
    lock = args.directory / "lock.txt"
    lock.write_text(subset(text, args.only) if args.only else text, encoding="utf-8")
    print(f"{len(parse(lock.read_text(encoding='utf-8')).pins)} packages, load average {os.getloadavg()[0]:.1f}")
    for tool in args.tools:
        cache, venv = args.directory / f"cache-{tool}", args.directory / "venv"
        shutil.rmtree(cache, ignore_errors=True)
        for state in ("cold", "warm"):
            seconds = install(tool, lock, args.python, venv, cache)
            print(
                f"| {tool} | {state} | {seconds:.1f} s | {mib(venv)} MiB installed | {mib(cache)} MiB in its cache |",
                flush=True,
            )


if __name__ == "__main__":
    main()
