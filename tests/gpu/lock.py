#!/usr/bin/env python3
"""The part of a release's lock that a stack of pack.py can be held against.

    lock.py LOCK STACK > OUT

What the archive leaves out is left out here, too, and counted on standard error; everything else must be exactly what
is locked, but for torch: PyPI's file is called 2.11.0, that of the machine 2.11.0+cu130.
"""

from __future__ import annotations

import sys
from pathlib import Path

from servelab.shared.run_files import packages
from servelab.shared.stack_lock import normalize, parse


def main() -> None:
    lock = parse(Path(sys.argv[1]).read_text())
    (site,) = Path(sys.argv[2]).glob("lib/python3*/site-packages")
    found = {normalize(name): version for name, version in packages(site).items()}
    print(*(f"# {key}: {value}" for key, values in lock.head.items() for value in values), sep="\n")
    for name, pin in sorted(lock.pins.items()):
        have = found.get(name)
        if have is None:
            continue
        version = have if have == f"{pin.version}+cu130" else pin.version
        print(f"{name}=={version} \\", *(f"    --hash=sha256:{one}" for one in pin.hashes), sep="\n")
    absent = sorted(set(lock.pins) - set(found))
    print(
        f"{len(lock.pins) - len(absent)} of {len(lock.pins)} locked packages are there; not: {', '.join(absent)}",
        file=sys.stderr,
    )


main()
