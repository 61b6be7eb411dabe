"""Secrets go, everything else stays, and doing it twice changes nothing."""

import json
import random

import pytest

from servelab.shared import redact as redact_module
from servelab.shared.redact import is_secret_name, redact, redact_value

SECRET = "sk-SENTINEL-333"


@pytest.mark.parametrize(
    "text, expected",
    [
        ("server_args=ServerArgs(model_path='/m', api_key='sk-SENTINEL-333', tp_size=8)",
         "server_args=ServerArgs(model_path='/m', api_key='[redacted]', tp_size=8)"),
        ('{"api_key": "plain-words", "port": 30000}', '{"api_key": "[redacted]", "port": 30000}'),
        ("admin_api_key='x y', tp_size=8", "admin_api_key='[redacted]', tp_size=8"),
        ("python -m s --api-key abc123 --port 30000", "python -m s --api-key [redacted] --port 30000"),
        ("--admin-api-key=abc123 --port 1", "--admin-api-key=[redacted] --port 1"),
        ("['--api-key', 'abc123', '--port']", "['--api-key', '[redacted]', '--port']"),
        ("Environment=HF_TOKEN=hf_abc", "Environment=HF_TOKEN=[redacted]"),
        ("HUGGING_FACE_HUB_TOKEN=zzz end", "HUGGING_FACE_HUB_TOKEN=[redacted] end"),
        ("Authorization: Bearer abcdef123", "Authorization: Bearer [redacted]"),
        ("token hf_abcdefghijklmnopqrst leaked", "token [redacted] leaked"),
        ("ssl_keyfile_password='pw'", "ssl_keyfile_password='[redacted]'"),
    ],
)  # fmt: skip
def test_secrets_go(text: str, expected: str) -> None:
    assert redact(text) == expected


@pytest.mark.parametrize(
    "text",
    [
        "api_key=None, admin_api_key=None, ssl_keyfile_password=None",
        '{"api_key": null}',
        "max_total_num_tokens=4400, chunked_prefill_size=8192, tokenizer_path='/m', skip_tokenizer_init=False",
        "Decode batch, #token: 312, token usage: 0.07, gen throughput (token/s): 47.89",
        "--speculative-num-draft-tokens 4 --tokenizer-path /m",
        "task-SENTINEL risk-averse-person",
    ],
)
def test_other_text_stays(text: str) -> None:
    assert redact(text) == text


def test_data_by_key_by_flag_and_by_text() -> None:
    data = {
        "api_key": SECRET,
        "launch_command": ["python", "--api-key", SECRET, "--port", "30000"],
        "internal_states": [{"note": f"key is {SECRET}", "load": 0.5}],
        "admin_api_key": None,
    }
    masked = redact_value(data)
    assert SECRET not in json.dumps(masked)
    assert masked["launch_command"] == ["python", "--api-key", "[redacted]", "--port", "30000"]
    assert masked["internal_states"][0]["load"] == 0.5
    assert masked["admin_api_key"] is None


def test_names() -> None:
    assert all(map(is_secret_name, ["api_key", "--api-key", "HF_TOKEN", "admin-api-key", "ssl_keyfile_password"]))
    assert not any(map(is_secret_name, ["tokenizer_path", "max_total_tokens", "model_path", "keyring", "token_ids"]))


def test_twice_is_once_and_the_sentinel_never_survives() -> None:
    rng = random.Random(7)
    heads = ["api_key=", "--api-key ", '"admin_api_key": "', "HF_TOKEN=", "Bearer ", "api_key='", "--api-key', '"]
    glue = [" ", ", ", "\n", "' ", '" ', ") ", "]", "=", ":", "--port 3 ", "None", "[redacted]", "token ", "\\", "é"]
    for _ in range(3000):
        parts = []
        for _ in range(rng.randint(1, 6)):
            parts.append(rng.choice(heads) + SECRET if rng.random() < 0.5 else rng.choice(heads))
            parts.append(rng.choice(glue))
        text = "".join(parts)
        once = redact(text)
        assert SECRET not in once, text
        assert redact(once) == once, text


def test_every_text_that_is_changed_has_a_trigger() -> None:
    """redact() looks no further where no trigger is: so whatever the patterns change must have one."""
    rng = random.Random(11)
    words = [
        "api",
        "key",
        "hf",
        "token",
        "access",
        "bearer",
        "Secret",
        "client",
        "password",
        "pw",
        "sk",
        "gh",
        "p",
        "auth",
    ]
    for _ in range(4000):
        name = rng.choice(["-", "_", ""]).join(rng.choices(words, k=rng.randint(1, 3)))
        text = rng.choice(["{}={}", "--{} {}", "'{}': '{}'", "{} {}"]).format(name, rng.choice(["x1y2z3a4b5", SECRET]))
        assert (redact_module._once(text) == text) or redact_module._TRIGGER.search(text), text
