"""Take secrets out of text and data that a person or a file will see.

Pure and idempotent: redacting twice gives the same as redacting once, so that every writer may call it without
knowing whether an earlier one did.
"""

from __future__ import annotations

import re
from typing import Any

MARK = "[redacted]"

# Names whose value is a secret. Bare "token" is not among them: max_total_num_tokens is no secret.
_NAME = (
    r"(?:[a-z0-9]+[_-])*"
    r"(?:api[_-]?keys?|passw(?:or)?d|passphrase|client[_-]?secret|secret[_-]?key"
    r"|(?:hf|hub|huggingface|huggingface[_-]hub|access|auth|bearer|admin|github|gh|api|secret)[_-]?token)"
)
_NAME_ONLY = re.compile(rf"(?i)^-{{0,2}}{_NAME}$")

# api_key='x'   "api_key": "x"   HF_TOKEN=x   api_key: x
_ASSIGNED = re.compile(
    rf"""(?ix)
    (?<![a-z0-9]) (?P<head> {_NAME} ["']? \s* [=:] \s* )
    (?P<value> " (?:[^"\\\n]|\\.)* "  |  ' (?:[^'\\\n]|\\.)* '  |  [^\s,;&'"(){{}}\[\]]+ )
    """
)
# --api-key x   --api-key=x   and the same in a printed list: '--api-key', 'x'
_OPTION = re.compile(
    rf"""(?ix)
    (?P<head> -- {_NAME} (?: ["'] \s* , \s* ["'] | ["']? [\s=]+ ["']? ) )
    (?P<value> [^\s,"'\]]+ )
    """
)
_BEARER = re.compile(r"(?i)(?P<head>\bbearer\s+)(?P<value>[a-z0-9._~+/=-]{6,})")
# Tokens that tell what they are, wherever they stand.
_SHAPES = re.compile(r"(?<![A-Za-z0-9])(?:hf_[A-Za-z0-9]{16,}|sk-[A-Za-z0-9_-]{8,}|gh[pousr]_[A-Za-z0-9]{20,})")
# Cheap to look for, and in every text that has a secret: most lines of a log have none of these.
_TRIGGER = re.compile(
    r"(?i)api[_-]?key|passw|passphrase|secret|bearer|hf_|sk-|gh[pousr]_"
    r"|(?:hf|hub|face|access|auth|admin|github|gh|api)[_-]?token"
)
_NOT_A_SECRET = {"none", "null", "true", "false", "''", '""'}


def _mask(match: re.Match[str]) -> str:
    value = match["value"]
    if value.strip("\"'").lower() in _NOT_A_SECRET or value.lower() in _NOT_A_SECRET or value.startswith("--"):
        return match[0]
    quote = value[0] if value[0] in "\"'" else ""
    return f"{match['head']}{quote}{MARK}{quote}"


def redact(text: str) -> str:
    """`text` with every API key, token and password replaced by `[redacted]`; everything else stays as it is."""
    if not _TRIGGER.search(text):
        return text
    # What is masked already is never looked at again, and the rest is done until nothing changes: each pass that
    # changes something leaves less unmasked text, so this ends, and a second call finds nothing to do.
    while True:
        masked = MARK.join(_once(part) for part in text.split(MARK))
        if masked == text:
            return text
        text = masked


def _once(text: str) -> str:
    for pattern in (_OPTION, _ASSIGNED, _BEARER):
        text = MARK.join(pattern.sub(_mask, part) for part in text.split(MARK))
    return _SHAPES.sub(MARK, text)


def is_secret_name(name: str) -> bool:
    """Whether a flag, variable or key of this name carries a secret (`--api-key`, `HF_TOKEN`, `admin_api_key`)."""
    return bool(_NAME_ONLY.match(name.strip()))


def redact_value(value: Any) -> Any:
    """The same for JSON-like data: mappings by key, argument lists by the flag before, strings by their text."""
    if isinstance(value, dict):
        return {
            key: MARK if is_secret_name(str(key)) and isinstance(item, str) and item else redact_value(item)
            for key, item in value.items()
        }
    if isinstance(value, (list, tuple)):
        masked: list[Any] = []
        for position, item in enumerate(value):
            before = value[position - 1] if position else None
            if isinstance(before, str) and before.startswith("--") and is_secret_name(before) and isinstance(item, str):
                masked.append(MARK)
            else:
                masked.append(redact_value(item))
        return masked
    return redact(value) if isinstance(value, str) else value
