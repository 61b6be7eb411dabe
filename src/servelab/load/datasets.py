"""Prompts and traces from files: JSON lines, or one JSON array of the same objects.

| key | meaning |
|---|---|
| `prompt` or `text` | a text, or a list of token ids |
| `input_ids` or `prompt_token_ids` | a list of token ids |
| `messages` | a chat |
| `conversations` | ShareGPT: the first human turn is the prompt, the answer behind it gives the length |
| `output_tokens`, `max_tokens` or `output_length` | length of the response |
| `input_tokens` or `input_length` | length of a prompt to be made, where the object has none |
| `t` (seconds) or `timestamp` (milliseconds) | when a trace sends it |
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Prompt = str | list[int] | list[dict[str, Any]]


class DatasetError(ValueError):
    """The file cannot be used; the message is one sentence for a person."""


@dataclass(frozen=True)
class Entry:
    """One object of a file; None is what it does not say. `time` in seconds."""

    prompt: Prompt | None
    input_tokens: int | None
    output_tokens: int | None
    time: float | None


def read(path: Path, count: Callable[[str], int] | None = None) -> list[Entry]:
    """The entries of a file in its order. `count`: a tokenizer, for the length of ShareGPT's answers.

    Conversations that do not begin with a human and an answer are passed over. Raises DatasetError for anything else
    that is no entry, naming the line.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as problem:
        raise DatasetError(f"{path} cannot be read: {problem}") from problem
    found = []
    for where, value in _objects(path, text):
        if not isinstance(value, dict):
            raise DatasetError(f"{where} is {type(value).__name__}, not an object")
        if "conversations" in value:
            entry = _conversation(value["conversations"], count)
            if entry is not None:
                found.append(entry)
        else:
            found.append(_entry(where, value))
    if not found:
        raise DatasetError(f"{path} holds no prompt")
    return found


def trace(path: Path, entries: list[Entry], speed: float) -> list[float]:
    """When a trace sends its entries, in seconds from the first; `speed` 2 replays it twice as fast.

    Raises DatasetError for entries without a time, or out of order.
    """
    times = []
    for number, entry in enumerate(entries, 1):
        if entry.time is None:
            raise DatasetError(f"{path}: entry {number} has neither t (seconds) nor timestamp (milliseconds)")
        times.append(entry.time)
        if number > 1 and times[-1] < times[-2]:
            raise DatasetError(f"{path}: entry {number} is due before the one above it; sort it by time")
    return [(time - times[0]) / speed for time in times]


def _objects(path: Path, text: str) -> list[tuple[str, Any]]:
    if text.lstrip().startswith("["):
        try:
            return [(f"{path}: entry {number}", value) for number, value in enumerate(json.loads(text), 1)]
        except ValueError as problem:
            raise DatasetError(f"{path} is no JSON: {problem}") from problem
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if line.strip():
            try:
                found.append((f"{path}:{number}", json.loads(line)))
            except ValueError as problem:
                raise DatasetError(f"{path}:{number} is no JSON: {problem}") from problem
    return found


def _entry(where: str, value: dict[str, Any]) -> Entry:
    prompt: Prompt | None = None
    for key in ("prompt", "text", "input_ids", "prompt_token_ids", "messages"):
        if value.get(key) is not None:
            prompt = _prompt(f"{where}: {key}", value[key], chat=key == "messages")
            break
    given = _whole(where, value, "input_tokens", "input_length")
    if prompt is None and given is None:
        raise DatasetError(
            f"{where} has neither a prompt (prompt, input_ids, messages, conversations) nor input_tokens"
        )
    time = _time(where, value)
    return Entry(prompt, given, _whole(where, value, "output_tokens", "max_tokens", "output_length"), time)


def _prompt(where: str, value: Any, *, chat: bool) -> Prompt:
    if chat:
        if isinstance(value, list) and value and all(isinstance(turn, dict) and "role" in turn for turn in value):
            return list(value)
        raise DatasetError(f"{where} is not a list of messages with a role")
    if isinstance(value, str) and value:
        return value
    if isinstance(value, list) and value and all(type(token) is int and token >= 0 for token in value):
        return list(value)
    raise DatasetError(f"{where} is neither a text nor a list of token ids")


def _conversation(turns: Any, count: Callable[[str], int] | None) -> Entry | None:
    if not isinstance(turns, list) or len(turns) < 2 or not all(isinstance(turn, dict) for turn in turns[:2]):
        return None
    (asker, question), (_, answer) = ((turn.get("from"), turn.get("value")) for turn in turns[:2])
    if asker not in ("human", "user") or not question or not answer:
        return None
    return Entry(str(question), None, max(1, count(str(answer))) if count else None, None)


def _whole(where: str, value: dict[str, Any], *keys: str) -> int | None:
    for key in keys:
        if value.get(key) is not None:
            if type(value[key]) is not int or value[key] < 1:
                raise DatasetError(f"{where}: {key} is {value[key]!r}, not a whole number above 0")
            return int(value[key])
    return None


def _time(where: str, value: dict[str, Any]) -> float | None:
    for key, unit in (("t", 1.0), ("timestamp", 0.001)):
        if value.get(key) is not None:
            if isinstance(value[key], bool) or not isinstance(value[key], int | float) or not 0 <= value[key] < 1e13:
                raise DatasetError(f"{where}: {key} is {value[key]!r}, not a time of at least 0")
            return float(value[key]) * unit
    return None
