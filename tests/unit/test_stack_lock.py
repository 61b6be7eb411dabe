"""Locks: what servelab writes, what it refuses to read, and that the shipped ones are whole."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from servelab import lock as command
from servelab.shared import stack_lock

FILES = Path(__file__).resolve().parents[2] / "roles/sglang_env/files"
LOCKS = sorted((FILES / "locks").glob("*-py*.txt"))
A, B, C = "a" * 64, "b" * 64, "c" * 64

# As uv writes it, shortened.
PYLOCK = f"""
lock-version = "1.0"
created-by = "uv"
[[packages]]
name = "aiohttp"
version = "3.14.5"
sdist = {{ url = "https://index/aiohttp-3.14.5.tar.gz", size = 8078052, hashes = {{ sha256 = "{C}" }} }}
wheels = [
    {{ url = "https://index/aiohttp-cp313.whl", size = 1800000, hashes = {{ sha256 = "{B}" }} }},
    {{ url = "https://index/aiohttp-3.14.5-py3-none-any.whl", size = 279000, hashes = {{ sha256 = "{A}" }} }},
]
[[packages]]
name = "sglang"
version = "0.5.23"
wheels = [{{ url = "https://index/sglang-0.5.23-cp313.whl", size = 39000000, hashes = {{ sha256 = "{C}" }} }}]
"""
PLAN = {
    "uv": "0.13.9",
    "upload-before": "2026-11-29T00:00:00Z",
    "platform": "x86_64-manylinux_2_36",
    "index-url": "https://index/simple",
    "pythons": ["3.13"],
    "locks": {
        "0.5.23": {"cuda": "13.0", "requirements": ["sglang==0.5.23"], "overrides": ["x ; python_version < '3'"]}
    },
}
TEXT = f"""# made-by: servelab lock 0.5.23; change stacks.toml and run it again
# name: 0.5.23
# python: 3.13
# cuda: 13.0
# requirement: sglang==0.5.23
# override: x ; python_version < '3'
# index: https://index/simple
# upload-before: 2026-11-29T00:00:00Z
# platform: x86_64-manylinux_2_36
# uv: 0.13.9
# packages: 2
# bytes: 40800000
aiohttp==3.14.5 \\
    --hash=sha256:{A} \\
    --hash=sha256:{B}
sglang==0.5.23 \\
    --hash=sha256:{C}
"""


def test_a_lock_holds_the_wheels_that_fit_and_the_inputs():
    assert command.lock_text(tomllib.loads(PYLOCK), PLAN, "0.5.23", "3.13") == TEXT


def test_a_package_without_a_wheel_is_refused():
    resolved = {"packages": [{"name": "outlines-core", "version": "0.1.26"}]}
    with pytest.raises(command.CannotLock, match=r"outlines-core 0.1.26, which 0.5.23 needs, has no wheel for 3.13"):
        command.lock_text(resolved, PLAN, "0.5.23", "3.13")


def test_reading_a_lock():
    lock = stack_lock.parse(TEXT)
    assert lock.pins == {"aiohttp": stack_lock.Pin("3.14.5", (A, B)), "sglang": stack_lock.Pin("0.5.23", (C,))}
    assert lock.one("cuda") == "13.0"
    assert lock.head["requirement"] == ["sglang==0.5.23"]


def test_a_part_of_a_lock_is_a_lock():
    part = stack_lock.parse(stack_lock.subset(TEXT, ["SGLang"]))
    assert list(part.pins) == ["sglang"]
    assert part.one("python") == "3.13"
    with pytest.raises(stack_lock.LockError, match="does not have torch"):
        stack_lock.subset(TEXT, ["torch"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("torch==2.14.1\n", "no hash for torch"),
        ("torch>=2\n", "Line 1 of the lock is 'torch>=2'"),
        ("-e git+https://x\n", "Line 1"),
        (f"--hash=sha256:{A}\n", "Line 1"),
    ],
)
def test_what_is_no_lock_is_refused(text, said):
    with pytest.raises(stack_lock.LockError, match=re.escape(said)):
        stack_lock.parse(text)


def test_a_change_is_told_in_words():
    after = TEXT.replace("3.14.5", "3.14.6").replace("sglang==", "sglang-x==")
    assert command.difference(TEXT, after) == "aiohttp 3.14.5 → 3.14.6, +sglang-x 0.5.23, -sglang 0.5.23"
    assert command.difference("", TEXT) == "new, 2 packages"
    assert command.difference("torch==1\n", TEXT) == "new, 2 packages"


def test_a_wrong_description_is_refused_with_all_that_is_wrong(tmp_path):
    (tmp_path / "stacks.toml").write_text('uv = "1"\nplatfrom = "x"\n[locks.a]\nrequirement = []\n')
    with pytest.raises(command.CannotLock) as caught:
        command.read(tmp_path / "stacks.toml")
    for said in ("lacks platform", "unknown key platfrom", "a has an unknown key requirement", "a has no requirements"):
        assert said in str(caught.value)


def test_another_uv_is_refused(tmp_path, capsys):
    uv = tmp_path / "uv"
    uv.write_text("#!/bin/sh\necho uv 0.1.0\n")
    uv.chmod(0o755)
    args = command.add_parser(__import__("argparse").ArgumentParser().add_subparsers()).parse_args(
        ["--stacks", str(FILES / "stacks.toml"), "--uv", str(uv)]
    )
    assert command.run(args) == 2
    assert (
        "uv 0.1.0 is installed, but the locks are made with uv 0.13.9: pip install uv==0.13.9."
        in capsys.readouterr().err
    )


def test_every_described_lock_is_there():
    plan = command.read(FILES / "stacks.toml")
    wanted = {
        command.target_of(FILES / "stacks.toml", name, entry, python)
        for name, entry in plan["locks"].items()
        for python in entry.get("pythons", plan["pythons"])
    }
    assert all(path.exists() for path in wanted)
    assert {path.resolve() for path in LOCKS} <= wanted
    assert {"0.5.12", "0.5.15", "0.5.23"} <= set(plan["locks"])


@pytest.mark.parametrize("path", LOCKS, ids=lambda path: path.stem)
def test_a_shipped_lock_is_cuda_13_0_throughout(path):
    """By the names and numbers of the wheels; what the install matrix of the releases says."""
    lock = stack_lock.parse(path.read_text())
    versions = {name: pin.version for name, pin in lock.pins.items()}
    release = path.stem.partition("-py")[0]
    torch, kernel, flashinfer, transformers, nccl = {
        "0.5.12": ("2.11.0", "0.4.2.post2", "0.6.11.post1", "5.6.0", "2.28.9"),
        "0.5.15": ("2.11.0", "0.4.4", "0.6.12", "5.12.1", "2.28.9"),
        "0.5.23": ("2.14.1", "0.4.10", "0.7.2", "5.19.0", "2.30.7"),
    }[release]
    assert versions["sglang"] == release
    assert (versions["torch"], versions["sglang-kernel"], versions["flashinfer-python"]) == (torch, kernel, flashinfer)
    assert (versions["transformers"], versions["nvidia-nccl-cu13"]) == (transformers, nccl)
    assert versions["nvidia-cuda-nvcc"] == versions["nvidia-nvvm"] == versions["nvidia-cuda-crt"] == "13.0.88"
    assert versions["nvidia-cuda-runtime"] == "13.0.96"
    assert "sgl-kernel" not in versions
    assert {"triton", "xgrammar", "ninja"} <= set(versions)
    assert ("outlines-core" in versions) == (lock.one("python") != "3.13")
    assert int(lock.one("packages") or 0) == len(lock.pins)
