#!/usr/bin/env python3
"""How long a stack takes to install, and what it fetches: uv against pip, cold, warm, and where nothing is to do.

    bench/stack.py LOCK DIRECTORY [--wheelhouse WHEELS] [--only sglang]    # Python as the lock says, uv in PATH

DIRECTORY gets the caches and venvs and should be on the disk that a stack would be on. Prints a row per installation;
the making of the venv does not count. Needs root, the network (several GB for a whole lock) and 20 GB of disk; --only
measures some packages. With a directory that playbooks/wheelhouse.yml filled everything is without a network.
"""

from __future__ import annotations

import argparse
import os
import resource
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


def command_of(tool: str, lock: Path, inside: str, wheelhouse: Path | None) -> list[str]:
    """What the role runs for a full stack (roles/sglang_env/tasks/install.yml)."""
    wheels = ["--no-index", f"--find-links={wheelhouse}"] if wheelhouse else []
    if tool == "uv":
        command = ["uv", "pip", "sync", "--quiet", "--no-config", "--python", inside, "--require-hashes", *wheels]
        return [*command, "--only-binary=:all:", "--link-mode=copy", "--compile-bytecode", str(lock)]
    command = [
        inside,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--require-hashes",
        "--no-deps",
        "--only-binary=:all:",
        *wheels,
    ]
    return [*command, "--disable-pip-version-check", "--progress-bar=off", "-r", str(lock)]


def install(command: list[str], cache: Path) -> tuple[float, float] | None:
    """Wall seconds and processor seconds that one installation took, or None where it failed."""
    # Only what the lock's index gives: no configuration of this machine but its certificates.
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "UV_", "PYTHONPATH"))}
    env |= {"PIP_CONFIG_FILE": os.devnull, "PIP_CACHE_DIR": str(cache), "UV_CACHE_DIR": str(cache)}
    env |= {"UV_SYSTEM_CERTS": "1", "UV_HTTP_TIMEOUT": "300"}
    if "PIP_CERT" in os.environ:
        env["PIP_CERT"] = os.environ["PIP_CERT"]
    started, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    if subprocess.run(command, check=False, env=env).returncode:
        return None
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.monotonic() - started, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("lock", type=Path)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--python", default="python3", help="the Python that the lock is for (default: %(default)s)")
    parser.add_argument("--only", nargs="+", metavar="PACKAGE")
    parser.add_argument("--wheelhouse", type=Path, metavar="WHEELS")
    parser.add_argument("--tools", nargs="+", default=["uv", "pip"])
    parser.add_argument("--keep", action="store_true", help="leave caches and venv where they are")
    args = parser.parse_args()
    args.directory.mkdir(parents=True, exist_ok=True)
    text = args.lock.read_text(encoding="utf-8")
    lock = args.directory / "lock.txt"
    lock.write_text(subset(text, args.only) if args.only else text, encoding="utf-8")
    print(f"{len(parse(lock.read_text(encoding='utf-8')).pins)} packages, load average {os.getloadavg()[0]:.1f}\n")
    print("| installer | state | wall s | processor s | load | MiB installed | MiB in its cache |")
    print("|---|---|---:|---:|---:|---:|---:|")
    for tool in args.tools:
        cache, venv = args.directory / f"cache-{tool}", args.directory / "venv"
        shutil.rmtree(cache, ignore_errors=True)
        for state in ("cold", "warm", "no change"):
            if state != "no change":
                shutil.rmtree(venv, ignore_errors=True)
                subprocess.run([args.python, "-m", "venv", str(venv)], check=True)
            command = command_of(tool, lock, str(venv / "bin/python"), args.wheelhouse)
            network = ""
            # From a wheelhouse, and where nothing is to do, without any interface: who asks the network nevertheless?
            cut = args.wheelhouse or state == "no change"
            took = install(["unshare", "--net", *command], cache) if cut else None
            if cut:
                network = " (asks the network)" if took is None else " (without a network)"
            if took is None and not args.wheelhouse:
                took = install(command, cache)
            if took is None:
                sys.exit(f"{tool} could not install {lock}.")
            print(
                f"| {tool} | {state}{network} | {took[0]:.1f} | {took[1]:.1f} | {os.getloadavg()[0]:.1f} "
                f"| {mib(venv)} | {mib(cache)} |",
                flush=True,
            )
        if not args.keep:
            shutil.rmtree(cache, ignore_errors=True)
            shutil.rmtree(venv, ignore_errors=True)


if __name__ == "__main__":
    main()
