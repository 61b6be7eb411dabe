"""SGLang's own arguments: parsed with the installed release's flags, and resolved as far as the double goes.

A usage error ends the process as argparse does: usage and `sglang serve: error: …` on stderr, exit status 2.
"""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

try:
    from servelab_lab.shared.sglang_flags import FlagsUnreadable, build_parser, read_flags
    from servelab_lab.shared.sglang_release import Release, ReleaseError, read_version
except ModuleNotFoundError:  # In the checkout, where the lab has not copied the shared parsers beside the package.
    from servelab.shared.sglang_flags import FlagsUnreadable, build_parser, read_flags  # type: ignore[no-redef]
    from servelab.shared.sglang_release import Release, ReleaseError, read_version  # type: ignore[no-redef]

from .cost import Mode, Profile

# Draft models that extend the target's own hidden states one step at a time, all served by the same code path.
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")
# What SGLang sets for speculation when the number is not given.
_SPECULATIVE_MAX_RUNNING = 48
_MAX_RUNNING = 4096


class Unsupported(ValueError):
    """The flags ask for something that the cost model does not know. The text is one sentence."""


@dataclass(frozen=True)
class ServerArgs:
    """Every field that the installed release has, in its own order, with what it resolved to."""

    values: Mapping[str, Any]
    version: str
    command: str

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.values.get(name)

    def __repr__(self) -> str:
        return "ServerArgs(" + ", ".join(f"{key}={value!r}" for key, value in self.values.items()) + ")"

    @property
    def old_logs(self) -> bool:
        """Whether the release writes its log as 0.5.15 does; the other layout known is that of 0.5.23."""
        return bool(Release.parse(self.version) <= Release((0, 5, 15)))


def parse(package: Path, argv: Sequence[str], profile: Profile) -> ServerArgs:
    """Parse `argv` with the flags of the SGLang in `package`; exits with status 2 on a usage error.

    Raises Unsupported when the package cannot be read.
    """
    try:
        parser, version = build_parser(read_flags(package)), read_version(package)
    except (FlagsUnreadable, ReleaseError) as error:
        raise Unsupported(str(error)) from error
    values = vars(parser.parse_args(list(argv)))
    for name in ("config", "help"):
        values.pop(name, None)
    command = shlex.join([sys.executable, "-m", "sglang.launch_server", *argv])
    args = ServerArgs(_resolved(values, profile), version, command)
    if "cuda_graph_config" not in values:
        return args
    graphs = {"decode": _graphs("full" if graph_max_batch(args) else "disabled", graph_batches(args))}
    graphs["prefill"] = _graphs("disabled", [])
    return ServerArgs({**args.values, "cuda_graph_config": graphs}, version, command)


def _graphs(backend: str, batches: list[int]) -> dict[str, Any]:
    return {"backend": backend, "max_bs": max(batches, default=None), "bs": batches or None}


def _resolved(values: dict[str, Any], profile: Profile) -> dict[str, Any]:
    """Fill in what SGLang decides by itself, for the card and the model of the profile."""
    resolved = dict(values)

    def default(name: str, value: Any) -> None:
        if name in resolved and resolved[name] is None:
            resolved[name] = value

    default("tokenizer_path", resolved["model_path"])
    default("served_model_name", resolved["model_path"])
    default("mem_fraction_static", profile.memory["auto_fraction"])
    default("chunked_prefill_size", 8192)
    default("device", "cuda")
    default("random_seed", 42)
    default("attention_backend", "triton")
    default("sampling_backend", "flashinfer")
    default("grammar_backend", "xgrammar")
    if resolved.get("speculative_algorithm"):
        _resolve_speculation(resolved, default)
    return resolved


def _resolve_speculation(resolved: dict[str, Any], default: Any) -> None:
    default("max_running_requests", _SPECULATIVE_MAX_RUNNING)
    default("speculative_draft_model_revision", "main")
    default("speculative_num_steps", 3)
    default("speculative_eagle_topk", 1)
    default("speculative_num_draft_tokens", resolved["speculative_num_steps"] + 1)
    if resolved["speculative_eagle_topk"] == 1:
        # A chain has one draft per step, and the target adds one token.
        resolved["speculative_num_draft_tokens"] = resolved["speculative_num_steps"] + 1


def graph_max_batch(args: ServerArgs) -> int:
    """Return the largest decode batch with a CUDA graph; 0 when graphs are off."""
    if args.disable_cuda_graph or args.disable_decode_cuda_graph or args.cuda_graph_backend_decode == "disabled":
        return 0
    sizes = args.cuda_graph_bs_decode or args.cuda_graph_bs
    if sizes:
        return int(max(sizes))
    given = args.cuda_graph_max_bs_decode or args.cuda_graph_max_bs
    if given:
        return int(given)
    # What SGLang takes for cards of 90 to 160 GB.
    default = 512 if args.tp_size >= 4 else 256
    return min(default, args.max_running_requests or default)


def graph_batches(args: ServerArgs) -> list[int]:
    """Return the batch sizes that are captured, ascending."""
    top = graph_max_batch(args)
    given = args.cuda_graph_bs_decode or args.cuda_graph_bs
    if given:
        return sorted(given)
    if args.speculative_algorithm:
        sizes = [*range(1, 9), *range(10, 33, 2), *range(40, 65, 4), *range(72, 257, 8), *range(272, top + 1, 16)]
    else:
        sizes = [1, 2, 4, 8, 12, *range(16, 257, 8), *range(272, 512, 16), *range(512, top + 1, 32)]
    return [size for size in sizes if size <= top]


def mode_of(args: ServerArgs) -> Mode:
    """Return what the flags mean to the cost model. Raises Unsupported."""
    algorithm = args.speculative_algorithm
    if not algorithm:
        return Mode(graph_max_batch=graph_max_batch(args))
    if algorithm.upper() not in _EAGLE:
        raise Unsupported(
            f"The simulated server has no cost model for --speculative-algorithm {algorithm}; "
            f"it knows {', '.join(_EAGLE)}."
        )
    if args.speculative_adaptive:
        raise Unsupported("The simulated server does not simulate --speculative-adaptive; remove it.")
    return Mode(
        graph_max_batch=graph_max_batch(args),
        draft_steps=args.speculative_num_steps,
        draft_tokens=args.speculative_num_draft_tokens,
    )


def max_running(args: ServerArgs) -> int:
    """Return how many requests may run at once."""
    return int(args.max_running_requests or _MAX_RUNNING)
