"""The configuration of --speculative-adaptive: what SGLang would refuse in it, found before a server is started."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def errors(document: Any, args: Mapping[str, Any]) -> list[str]:
    """What is wrong with a configuration (batch size as text → {candidate_steps: [0, 2], …}) for a mode's args."""
    if not isinstance(document, Mapping):
        return ['it must map batch sizes to their candidate steps, as in {"1": {"candidate_steps": [0, 2]}}.']
    slots = {key: entry for key, entry in document.items() if str(key).isdigit()}
    found: list[str] = []
    if not slots:
        found.append('it names no batch size; the least is {"1": {"candidate_steps": [2]}}.')
    steps: set[int] = set()
    for size, entry in slots.items():
        candidates = entry.get("candidate_steps") if isinstance(entry, Mapping) else None
        if not isinstance(candidates, list) or not candidates or not all(map(_is_steps, candidates)):
            found.append(f"batch size {size} needs candidate_steps, a list of whole numbers from 0 on.")
        else:
            steps.update(candidates)
    start = args.get("speculative_num_steps")
    if steps and start is not None and start not in steps:
        found.append(
            f"speculative_num_steps is {start}, but must be one of its candidate steps "
            f"({', '.join(map(str, sorted(steps)))})."
        )
    if args.get("speculative_eagle_topk") not in (None, 1):
        found.append(
            f"speculative_eagle_topk is {args['speculative_eagle_topk']}, and SGLang adapts chains only; set it to 1."
        )
    return found


def _is_steps(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
