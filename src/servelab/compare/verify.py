"""What of a speculating step is the verify and what the draft: no server tells it, so it is read off the plain mode.

A verify of C requests with k draft tokens each is one pass over C·k tokens, as a plain step of C·k requests is. The
plain mode's step there, straight between its measured levels in the logarithm of both, stands for the verify; what is
left of the step is the draft and all around it. An estimate, and rather too high for the verify: a plain step of that
many requests also reads that many caches.
"""

from __future__ import annotations

from dataclasses import dataclass

from servelab.collectives.predict import between
from servelab.compare import allreduce
from servelab.compare.answer import Comparison, Row


@dataclass(frozen=True)
class Split:
    """Milliseconds of one speculating step: a pass over ``tokens`` tokens, and the rest."""

    tokens: int
    verify_ms: float
    draft_ms: float


def split(comparison: Comparison, row: Row) -> Split | None:
    """None where the mode checks one token a pass, the plain mode was not measured under as many requests, or its step
    there is the longer one, so that nothing is left to be told."""
    tokens = row.concurrency * allreduce.tokens_of_a_pass(comparison.pairs[0][1])
    steps = [(one.concurrency, one.base_step_ms) for one in comparison.rows if one.base_step_ms]
    verify = between(steps, tokens) if tokens > row.concurrency else None
    if verify is None or row.other_step_ms is None or verify >= row.other_step_ms:
        return None
    return Split(tokens, verify, row.other_step_ms - verify)
