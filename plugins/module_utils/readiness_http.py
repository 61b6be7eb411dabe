"""Requests to a server on this machine: never through a proxy, never an exception, always a reason."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
import uuid
from pathlib import Path
from typing import Any

from .readiness import Answer

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
_LIMIT = 4 * 1024 * 1024
_SENTENCE = "The quick brown fox jumps over the lazy dog while nine slow servers answer ten short questions. "


_KEY: list[str] = []


def use_key_of(prefix: str) -> None:
    """From now on show the API key that the role keeps on this machine, below `prefix`, if there is one."""
    try:
        key = Path(f"{prefix.rstrip('/')}/etc/servelab/secrets/api_key").read_text(encoding="utf-8").strip()
    except OSError:
        key = ""
    use_key(key)


def use_key(key: str) -> None:
    """From now on show this key; none where it is empty."""
    _KEY.clear()
    if key:
        _KEY.append(key)


def ask(url: str, timeout: float, body: Any = None) -> Answer:
    """GET, or POST of `body` as JSON. `timeout` in seconds; an error status is an Answer, not an error."""
    data = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    if _KEY:
        headers["Authorization"] = f"Bearer {_KEY[0]}"
    request = urllib.request.Request(url, data, headers)
    begin = time.monotonic()
    try:
        with _DIRECT.open(request, timeout=timeout) as response:
            status, raw = response.status, response.read(_LIMIT)
    except urllib.error.HTTPError as error:
        with error:
            status, raw = error.code, error.read(_LIMIT)
    except TimeoutError:
        return Answer(None, None, f"no answer within {timeout:g} s")
    except OSError as error:
        reason = getattr(error, "reason", error)
        return Answer(None, None, "no answer within its time" if isinstance(reason, TimeoutError) else str(reason))
    text = raw.decode("utf-8", "replace")
    try:
        content: Any = json.loads(text)
    except ValueError:
        content = text
    return Answer(status, content, None, time.monotonic() - begin)


def complete(url: str, model: str | None, prompt: str, tokens: int, timeout: float) -> Answer:
    """A greedy completion of exactly `tokens` tokens (ignore_eos is SGLang's own parameter)."""
    body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    return ask(f"{url}/v1/completions", timeout, {**body, "model": model} if model else body)


def long_prompt(words: int) -> str:
    """About `words` words, different at every call, so that no prefix cache can answer for the model."""
    sentence = len(_SENTENCE.split())
    return f"Note {uuid.uuid4().hex}. " + _SENTENCE * max(1, words // sentence)
