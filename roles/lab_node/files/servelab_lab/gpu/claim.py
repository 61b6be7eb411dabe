"""Hold a simulated card the way a CUDA process holds a real one.

    from servelab_lab.gpu import claim

    context = claim(3)              # opens /dev/nvidia3: 512 MiB, what a bare CUDA context takes
    weights = claim(3, 47000)       # the process now uses 47000 MiB of card 3
    weights.resize(52000)           # it grew
    weights.release()               # closed; forgetting to is fine, death of the process releases too

From a shell, until it is killed: python3 -m servelab_lab.gpu.claim 3=47000 5

Several claims of one process on one card add up. A claim survives fork and, unlike a real context, is kept over exec
only with `inheritable=True` (for children that must be seen holding a card their parent opened).

Raises FileNotFoundError when the card's node is not there (not passed through), PermissionError when its mode or the
device filter refuses it: what the real thing reports as "no CUDA-capable device".
"""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from types import TracebackType

from .cards import DEV


class Claim:
    """One held card. `card` is the number in /dev/nvidia<card>, `mib` the memory in MiB (None: a bare context)."""

    def __init__(self, card: int, mib: int | None = None, *, dev: Path = Path(DEV), inheritable: bool = False) -> None:
        self.card = card
        self.mib: int | None = None
        self._inheritable = inheritable
        self._memory: int | None = None
        self._node: int | None = os.open(dev / f"nvidia{card}", os.O_RDWR | os.O_CLOEXEC | os.O_NOCTTY)
        os.set_inheritable(self._node, inheritable)
        if mib is not None:
            self.resize(mib)

    def resize(self, mib: int) -> None:
        """Use `mib` MiB instead. The new figure is held before the old one is let go, so that it never reads as 512."""
        if self._node is None:
            raise ValueError(f"the claim on card {self.card} was released")
        if mib < 0:
            raise ValueError(f"memory of card {self.card} must be 0 MiB or more, not {mib}")
        memory = os.memfd_create(f"servelab-gpu{self.card}-{mib}", os.MFD_CLOEXEC)
        os.set_inheritable(memory, self._inheritable)
        if self._memory is not None:
            os.close(self._memory)
        self._memory, self.mib = memory, mib

    def fileno(self) -> int:
        """The descriptor of the open node; -1 after release."""
        return -1 if self._node is None else self._node

    def release(self) -> None:
        """Let the card go. A second call does nothing."""
        for fd in (self._memory, self._node):
            if fd is not None:
                os.close(fd)
        self._memory = self._node = None

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def claim(card: int, mib: int | None = None, *, inheritable: bool = False) -> Claim:
    """Open /dev/nvidia<card> and use `mib` MiB of it (512 when None); keep the handle while the card is held."""
    return Claim(card, mib, inheritable=inheritable)


if __name__ == "__main__":
    held = [
        claim(int(card), int(mib) if mib else None) for card, _, mib in (word.partition("=") for word in sys.argv[1:])
    ]
    while held:
        signal.pause()
