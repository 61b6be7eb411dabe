"""Ask a running server for the answers that `correctness` judges, and keep those of the baseline."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .correctness import (
    KEPT_STARTS,
    PROMPTS,
    SCHEMA,
    TOKENS,
    TOP,
    Answer,
    Verdict,
    from_json,
    judge,
    known_problems,
    read_answer,
    to_json,
)
from .readiness_http import ask

# What the server itself says of what it serves; the same answers can be expected only where all of it is the same.
IDENTITY = ("model_path", "revision", "version", "dtype", "quantization", "kv_cache_dtype", "tp_size", "simulated")


def answer(url: str, what: dict[str, Any], tokens: int, timeout: int) -> Answer:
    """One greedy answer. Raises ValueError with a sentence part."""
    sampling = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    body = {**what, "sampling_params": sampling}
    got = ask(f"{url}/generate", timeout, {**body, "return_logprob": True, "top_logprobs_num": TOP})
    if got.status == 400:
        # Some ways to speculate give no log-probabilities; what they say can still be compared.
        got = ask(f"{url}/generate", timeout, body)
    if got.status != 200:
        raise ValueError(got.problem or f"HTTP {got.status}: {str(got.body)[:200]}")
    return read_answer(got.body, tokens)


def identity(url: str, stack: str, timeout: int) -> dict[str, Any]:
    """What is served by what: the key of the record."""
    for place in ("server_info", "get_server_info"):
        got = ask(f"{url}/{place}", timeout)
        if got.status == 200 and isinstance(got.body, dict):
            told = {key: got.body.get(key) for key in IDENTITY}
            return {**told, "stack": str(Path(stack).resolve()) if stack else ""}
    raise ValueError("the server does not say what it serves (/server_info)")


def read_record(file: Path) -> dict[str, Any]:
    """The record, or an empty one; one that cannot be read or is of another form counts as none."""
    try:
        record = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        record = {}
    return record if record.get("schema") == SCHEMA and record.get("prompts") == list(PROMPTS) else {}


def write_record(file: Path, record: dict[str, Any]) -> None:
    """Replace the record in one step."""
    file.parent.mkdir(parents=True, exist_ok=True)
    beside = file.with_name(f".{file.name}.new")
    beside.write_text(json.dumps(record) + "\n", encoding="utf-8")
    beside.replace(file)


def probe(
    url: str,
    record_dir: Path,
    stack: str,
    *,
    record: bool = False,
    keep: bool = True,
    start: str = "",
    known_answers: Sequence[Mapping[str, Any]] = (),
    tokens: int = TOKENS,
    timeout: int = 120,
) -> dict[str, Any]:
    """Ask, judge and, with `record`, keep the answers as those of one more start of the baseline.

    Returns changed, status, reason, figures, record (the file of this model and stack) and text (the first answer).
    With `keep` false nothing is written, and changed says what would be. A server that does not answer is `wrong`,
    never an error.
    """
    file: Path | None = None
    passes: list[list[Answer]] = []
    changed = False
    try:
        who = identity(url, stack, timeout)
        key = hashlib.sha256(json.dumps(who, sort_keys=True).encode()).hexdigest()[:16]
        file = record_dir / f"{key}.json"
        alone = [answer(url, {"text": prompt}, tokens, timeout) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: answer(url, {"text": prompt}, tokens, timeout), PROMPTS))
        passes = [alone, together]
        known = [
            answer(url, {"input_ids": entry["input_ids"]}, len(entry["output_ids"]), timeout) for entry in known_answers
        ]
        # The same start asked again replaces what it said; starts of other lengths cannot be compared.
        starts = [
            earlier
            for earlier in read_record(file).get("starts", [])
            if (not start or earlier["start"] != start) and len(earlier["passes"][0][0]["ids"]) == tokens
        ]
        recorded = [[from_json(one) for one in earlier["passes"]] for earlier in starts]
        verdict = judge(passes, recorded, known_problems(known_answers, known), baseline=record)
        if record and verdict.status == "wrong" and verdict.figures:
            remedy = f" If the model was replaced, remove {file}."
            verdict = Verdict("wrong", verdict.reason + remedy, verdict.figures)
        if known_answers and verdict.status != "wrong":
            verdict.figures["known_answers_right"] = len(known)
        changed = record and verdict.status != "wrong"
        if changed and keep:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            starts.append({"start": start, "time": now, "passes": [to_json(one) for one in passes]})
            kept = {"schema": SCHEMA, "prompts": list(PROMPTS), "identity": who, "starts": starts[-KEPT_STARTS:]}
            write_record(file, kept)
    except ValueError as problem:
        verdict = Verdict("wrong", f"Wrong output: {problem}.", {})
    return {
        "changed": changed,
        "status": verdict.status,
        "reason": verdict.reason,
        "figures": verdict.figures,
        "record": str(file) if file else "",
        "text": passes[0][0].text if passes else "",
    }
