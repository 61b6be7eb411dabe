#!/usr/bin/python3
"""Hold simulated cards, as what a benchmark, a person or a monitor leaves behind does.

holder.py NAME MIB CARDS [deaf] [survivor]

CARDS is "0,1" or "-" (none: a bystander). The PID goes to /run/servelab-test/NAME.pid when the cards are held. `deaf`
ignores SIGTERM. `survivor` forks a deaf child, NAME-survivor, that holds the same cards in its own right.
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

sys.path[:0] = ["/opt/servelab-lab", "/srv/servelab-lab"]

from servelab_lab.gpu import claim  # noqa: E402


def hold(name: str, mib: int, cards: list[int], deaf: bool) -> None:
    if deaf:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    claims = [claim(card, mib) for card in cards]
    mark = Path("/run/servelab-test", f"{name}.pid")
    mark.with_suffix(".new").write_text(f"{os.getpid()}\n")
    mark.with_suffix(".new").rename(mark)
    while claims or not cards:  # they hold as long as somebody refers to them
        signal.pause()


name, mib, cards, *options = sys.argv[1:]
numbers = [] if cards == "-" else [int(card) for card in cards.split(",")]
# Whoever started this must not wait for its output.
null = os.open(os.devnull, os.O_RDWR)
for descriptor in (0, 1, 2):
    os.dup2(null, descriptor)
if "survivor" in options and os.fork() == 0:
    hold(f"{name}-survivor", int(mib), numbers, deaf=True)
hold(name, int(mib), numbers, "deaf" in options)
