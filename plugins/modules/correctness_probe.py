#!/usr/bin/python
# SPDX-License-Identifier: Apache-2.0
"""Hold a server's greedy answers against those that the baseline gave on the same stack and model."""

from __future__ import annotations

DOCUMENTATION = r"""
module: correctness_probe
short_description: Compare a server's greedy answers with the recorded ones of the baseline
version_added: 0.1.0
description:
  - Asks for greedy answers to fixed prompts with log-probabilities, one after the other and all at once, and compares
    them with those of earlier starts of the baseline on the same model and stack. What may differ is what those starts
    differ by among themselves.
  - Without a record only gross errors are seen (one token repeated, a model that is sure of nothing, answers that are
    others when asked again, known answers that come out wrong), and the best status is V(unverified).
author:
  - The Servelab developers
options:
  host:
    description: Address on which the server listens.
    type: str
    default: 127.0.0.1
  port:
    description: Port on which the server listens.
    type: int
    required: true
  record_dir:
    description: Where the answers of the baseline are kept, a file per model and stack.
    type: path
    default: /var/lib/servelab/correctness
  stack:
    description: The stack that serves; a link is followed.
    type: path
    default: /opt/servelab/stack
  record:
    description:
      - Keep these answers as one more start of the baseline, unless they are wrong. The five newest starts are kept.
      - In check mode nothing is kept.
    type: bool
    default: false
  start:
    description: What tells this start of the server from others, such as systemd's invocation id.
    type: str
    default: ""
  known_answers:
    description: Prompts whose right continuation is known, each with C(input_ids) and C(output_ids).
    type: list
    elements: dict
    default: []
  tokens:
    description: Tokens to ask for.
    type: int
    default: 24
  timeout:
    description: Seconds for one completion.
    type: int
    default: 120
attributes:
  check_mode:
    support: full
    description: Asks in check mode, too, and records nothing.
  diff_mode:
    support: none
    description: There is nothing to show.
"""

EXAMPLES = r"""
- name: See that a patched all-reduce adds up
  servelab.sglang.correctness_probe:
    port: 30000

- name: Keep what this start of the baseline says
  servelab.sglang.correctness_probe:
    port: 30000
    record: true
    start: 0123456789abcdef0123456789abcdef
"""

RETURN = r"""
status:
  description: V(verified) within what restarts of the baseline differ by, V(unverified), or V(wrong).
  returned: always
  type: str
reason:
  description: One sentence.
  returned: always
  type: str
figures:
  description: Share of equal tokens, KL divergence in nats and the tolerances; empty without a record.
  returned: always
  type: dict
record:
  description: The file of this model and stack.
  returned: always
  type: str
text:
  description: The first answer, cut to 300 characters.
  returned: always
  type: str
"""

import hashlib
import json
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.correctness import (
    KEPT_STARTS,
    PROMPTS,
    SCHEMA,
    TOP,
    Answer,
    Verdict,
    from_json,
    judge,
    known_problems,
    read_answer,
    to_json,
)
from ansible_collections.servelab.sglang.plugins.module_utils.readiness_http import ask

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
            return {**told, "stack": str(Path(stack).resolve())}
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


def main() -> None:
    """Entry point of the module."""
    module = AnsibleModule(
        argument_spec={
            "host": {"type": "str", "default": "127.0.0.1"},
            "port": {"type": "int", "required": True},
            "record_dir": {"type": "path", "default": "/var/lib/servelab/correctness"},
            "stack": {"type": "path", "default": "/opt/servelab/stack"},
            "record": {"type": "bool", "default": False},
            "start": {"type": "str", "default": ""},
            "known_answers": {"type": "list", "elements": "dict", "default": []},
            "tokens": {"type": "int", "default": 24},
            "timeout": {"type": "int", "default": 120},
        },
        supports_check_mode=True,
    )
    asked = module.params
    url, tokens, timeout = f"http://{asked['host']}:{asked['port']}", asked["tokens"], asked["timeout"]
    file, passes, record, changed = None, [], {}, False
    try:
        who = identity(url, asked["stack"], timeout)
        key = hashlib.sha256(json.dumps(who, sort_keys=True).encode()).hexdigest()[:16]
        file = Path(asked["record_dir"]) / f"{key}.json"
        record = read_record(file)
        alone = [answer(url, {"text": prompt}, tokens, timeout) for prompt in PROMPTS]
        with ThreadPoolExecutor(len(PROMPTS)) as pool:
            together = list(pool.map(lambda prompt: answer(url, {"text": prompt}, tokens, timeout), PROMPTS))
        passes = [alone, together]
        known = [
            answer(url, {"input_ids": entry["input_ids"]}, len(entry["output_ids"]), timeout)
            for entry in asked["known_answers"]
        ]
        starts = [start for start in record.get("starts", []) if not asked["start"] or start["start"] != asked["start"]]
        # Two starts of different lengths cannot be compared.
        starts = [start for start in starts if len(start["passes"][0][0]["ids"]) == tokens]
        earlier = [[from_json(one) for one in start["passes"]] for start in starts]
        verdict = judge(passes, earlier, known_problems(asked["known_answers"], known), baseline=asked["record"])
        if asked["record"] and verdict.status == "wrong" and verdict.figures:
            remedy = f" If the model was replaced, remove {file}."
            verdict = Verdict("wrong", verdict.reason + remedy, verdict.figures)
        if asked["known_answers"] and verdict.status != "wrong":
            verdict.figures["known_answers_right"] = len(known)
        changed = asked["record"] and verdict.status != "wrong"
        if changed and not module.check_mode:
            now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
            starts.append({"start": asked["start"], "time": now, "passes": [to_json(one) for one in passes]})
            kept = {"schema": SCHEMA, "prompts": list(PROMPTS), "identity": who, "starts": starts[-KEPT_STARTS:]}
            write_record(file, kept)
    except ValueError as problem:
        verdict = Verdict("wrong", f"Wrong output: {problem}.", {})
    module.exit_json(
        changed=changed,
        status=verdict.status,
        reason=verdict.reason,
        figures=verdict.figures,
        record=str(file) if file else "",
        text=passes[0][0].text if passes else "",
    )


if __name__ == "__main__":
    main()
