"""python3 -m servelab_lab.pct.startall: start the containers that a node starts at boot (pve-guests.service)."""

from __future__ import annotations

import sys

from .life import start_all
from .lxc import Lxc
from .node import Node


def main() -> int:
    return 0 if start_all(Node(Lxc())) else 1


if __name__ == "__main__":
    sys.exit(main())
