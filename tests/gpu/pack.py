#!/usr/bin/env python3
"""Pack a real SGLang for a GPU machine that has torch and no network: one archive that fits into a few dozen MiB.

    pack.py OUT.tar.xz [--wheels DIR]

The machine brings Python 3.12 and torch 2.11.0+cu130 with what that needs. From PyPI come SGLang 0.5.15 and what it
imports, as that release's lock has it (roles/sglang_env/files/locks). Left out is what one Hopper GPU and a small dense
model never call (kernels for other architectures, debug symbols). Each change to foreign code is in PATCHES and is
refused when its place is not found.
Errors: exit 1 with the place that was not found, or pip's own words.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PINS = [
    "airportsdata==20261103",
    "ansible-core==2.21.5",
    "annotated-types==0.8.0",
    "apache-tvm-ffi==0.1.11",
    "blobfile==3.0.0",
    "cffi==2.1.1",
    "compressed-tensors==0.20.1",
    "cryptography==50.0.2",
    "dill==0.4.1",
    "diskcache==5.6.3",
    "distro==1.9.0",
    "easydict==1.14",
    "einops==0.8.2",
    "fastapi==0.165.0",
    "flashinfer_python==0.6.12",
    "gguf==0.19.0",
    "hatchling==1.28.0",
    "httptools==0.9.0",
    "interegular==0.3.3",
    "jiter==0.19.0",
    "jsonschema-specifications==2025.9.1",
    "jsonschema==4.26.0",
    "lark==1.3.1",
    "llguidance==0.7.30",
    "loguru==0.7.3",
    "msgspec==0.23.0",
    "nest-asyncio==1.6.0",
    "openai==2.6.1",
    "opentelemetry-api==1.45.2",
    "orjson==3.13.0",
    "outlines-core==0.1.26",
    "outlines==0.1.11",
    "partial-json-parser==0.2.1.1.post7",
    "pybase64==1.5.1",
    "pycountry==26.2.16",
    "pycparser==3.12",
    "pydantic-core==2.50.5",
    "pydantic==2.14.4",
    "python-multipart==0.0.34",
    "pyzmq==27.3.0",
    "referencing==0.37.0",
    "resolvelib==1.2.1",
    "rpds-py==2026.9.1",
    "setproctitle==1.3.8",
    "sglang-kernel==0.4.4",
    "sglang==0.5.15",
    "smg-grpc-servicer==0.14.1",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "tokenizers==0.22.2",
    "torch-memory-saver==0.0.10",
    "torchao==0.17.0",
    "trove-classifiers==2026.9.21.13",
    "transformers==5.12.1",
    "typing-inspection==0.4.5",
    "uvicorn==0.54.0",
    "watchfiles==1.3.0",
    "xgrammar==0.2.1",
]

# Whole parts that nothing here calls, as globs below site-packages.
TRIMS = [
    "sgl_kernel/flash_ops*.so",  # FlashAttention 3: 1.7 GB; the Triton backend is used
    "sgl_kernel/flashmla_ops*.so",
    "sgl_kernel/sm100",
    "flashinfer/data/aot",
    "xgrammar/lib",
    "xgrammar/include",
    "pycountry/locales",
    "openai/resources/beta",
    "**/tests",
    "**/__pycache__",
    "ansible_test",
]

# Modules that are imported for names only.
STUBS = {
    "IPython/__init__.py": "",
    "IPython/display.py": "def display(*_args, **_more):\n    pass\n\n\nclass HTML(str):\n    pass\n",
    "datasets/__init__.py": "def load_dataset(*_args, **_more):\n    raise RuntimeError('datasets was not packed')\n",
    "soundfile/__init__.py": '__version__ = "0.13.1"\n',
}

# file below site-packages: (text that stands there exactly once, what takes its place)
PATCHES = {
    # FlashInfer would compile these kernels on first use, which takes minutes of every start on a fresh machine.
    "sgl_kernel/elementwise.py": ("    _has_flashinfer = True", "    _has_flashinfer = False"),
    "sgl_kernel/sampling.py": ("    _has_flashinfer = True", "    _has_flashinfer = False"),
    # EAGLE imports DeepSeek's attention in passing, which needs CUTLASS's Python packages.
    "sglang/jit_kernel/dsa/__init__.py": (
        "from .cutedsl_paged_mqa_logits import CuteDSLPagedMQALogitsRunner, pick_dsl_expand\n",
        "CuteDSLPagedMQALogitsRunner = pick_dsl_expand = None\n",
    ),
    # And to ask whether its draft uses it, its kernels.
    "sglang/srt/layers/attention/dsa_backend.py": ("    import deep_gemm\n", "    deep_gemm = None\n"),
}


def main() -> int:
    parser = argparse.ArgumentParser(description="Pack a real SGLang for a GPU machine without a network.")
    parser.add_argument("out", type=Path)
    parser.add_argument("--wheels", type=Path, default=Path.home() / ".cache/servelab/gpu-wheels")
    options = parser.parse_args()
    options.wheels.mkdir(parents=True, exist_ok=True)
    platforms = ["manylinux1", "manylinux2014", "manylinux_2_17", "manylinux_2_24", "manylinux_2_26", "manylinux_2_27"]
    platforms += ["manylinux_2_28", "manylinux_2_34"]
    tags = [part for name in platforms for part in ("--platform", f"{name}_x86_64")]
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    pip += ["--python-version", "3.12", *tags, "--dest", str(options.wheels), *PINS]
    subprocess.run(pip, check=True)
    with tempfile.TemporaryDirectory(dir=options.wheels) as scratch:
        site = Path(scratch, "site")
        for pin in PINS:
            unpack(options.wheels, pin, site)
        for glob in TRIMS:
            for found in list(site.glob(glob)):
                shutil.rmtree(found) if found.is_dir() else found.unlink()
        for name, text in STUBS.items():
            (site / name).parent.mkdir(exist_ok=True)
            (site / name).write_text(text)
        for name, (old, new) in PATCHES.items():
            text = (site / name).read_text()
            if text.count(old) != 1:
                sys.exit(
                    f"{name} of these pins has {old.strip()!r} {text.count(old)} times, not once: look at it anew."
                )
            (site / name).write_text(text.replace(old, new))
        for library in site.rglob("*.so"):
            subprocess.run(["strip", "--strip-unneeded", str(library)], check=False)
        tar = [
            "tar",
            "--create",
            "--file",
            str(options.out.resolve()),
            "-I",
            "xz -6 -T0",
            "--directory",
            str(site),
            ".",
        ]
        subprocess.run(tar, check=True)
    print(f"{options.out}: {options.out.stat().st_size / 2**20:.1f} MiB")
    return 0


def unpack(wheels: Path, pin: str, site: Path) -> None:
    """Put the wheel of one pin into the folder; scripts and headers (``*.data``) stay out."""
    name, version = pin.split("==")
    # One release can lie there for several platforms; all of them are x86-64 of this Python.
    wheel = sorted(wheels.glob(f"{name.replace('-', '_')}-{version}-*.whl"))[-1]
    with zipfile.ZipFile(wheel) as archive:
        wanted = [one for one in archive.namelist() if ".data/" not in one and not is_trimmed(one)]
        archive.extractall(site, wanted)


def is_trimmed(name: str) -> bool:
    """What is too large to be unpacked first and removed then."""
    return name.startswith("sgl_kernel/flash_ops")


if __name__ == "__main__":
    sys.exit(main())
