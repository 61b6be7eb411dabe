"""Runs in a stack's own Python and prints, as JSON, what the stack is and what it could not do.

Without a GPU: torch's CUDA, that SGLang imports and that its parser builds. With one: a kernel of sglang-kernel and one
that FlashInfer compiles, each against torch's own answer.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

said: dict[str, Any] = {"errors": [], "seconds": {}}


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """One thing that is tried; its failure is a finding, and the next one is tried all the same."""
    started = time.monotonic()
    try:
        yield
    except Exception as error:
        text = " ".join(str(error).split())
        said["errors"].append(f"{name} does not work: {type(error).__name__}: {text[:500]}")
    said["seconds"][name] = round(time.monotonic() - started, 1)


def compare(kernel: Callable[[Any, Any], Any]) -> None:
    """An RMS norm on the GPU against torch's own. Raises ValueError where they differ."""
    import torch

    generator = torch.Generator(device="cuda").manual_seed(1)
    values = torch.randn(64, 4096, device="cuda", dtype=torch.bfloat16, generator=generator)
    weight = torch.randn(4096, device="cuda", dtype=torch.bfloat16, generator=generator)
    right = torch.nn.functional.rms_norm(values.float(), (4096,), weight.float(), 1e-6)
    worst = (kernel(values, weight).float() - right).abs().max().item()
    if worst > 0.1:
        raise ValueError(f"its RMS norm is off by {worst}")


def main() -> None:
    """Try everything, print once."""
    # What imports print belongs into the log, not into the answer.
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    said["python"] = f"{sys.version_info[0]}.{sys.version_info[1]}"
    gpu = False
    with step("torch"):
        import torch

        gpu = torch.cuda.is_available()
        said.update(torch=torch.__version__, torch_cuda=torch.version.cuda, gpu=gpu)
    if not gpu:
        # What is found here is found without a GPU; SGLang asks for the choice before its first import.
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    with step("sglang"):
        import sglang

        said["sglang"] = sglang.__version__
    with step("SGLang's parser"):
        from sglang.srt.server_args import ServerArgs

        parser = argparse.ArgumentParser()
        ServerArgs.add_cli_args(parser)
        said["options"] = sum(len(action.option_strings) for action in parser._actions)
    with step("flashinfer"):
        import flashinfer

        said["flashinfer"] = flashinfer.__version__
    if gpu:
        with step("a kernel of sglang-kernel"):
            import sgl_kernel

            compare(lambda values, weight: sgl_kernel.rmsnorm(values, weight, 1e-6))
        with step("a kernel of FlashInfer"):
            import flashinfer.norm

            compare(lambda values, weight: flashinfer.norm.rmsnorm(values, weight, 1e-6))
    json.dump(said, answer)
    answer.close()


main()
