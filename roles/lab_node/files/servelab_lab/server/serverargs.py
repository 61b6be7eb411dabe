"""SGLang's own arguments: parsed with the installed release's flags, and resolved as far as the double goes.

A usage error ends the process as argparse does: usage and `sglang serve: error: …` on stderr, exit status 2.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

try:
    from servelab_lab.shared.sglang_flags import FlagsUnreadable, build_parser, read_flags
    from servelab_lab.shared.sglang_release import ReleaseError, read_version
except ModuleNotFoundError:  # In the checkout, where the lab has not copied the shared parsers beside the package.
    from servelab.shared.sglang_flags import FlagsUnreadable, build_parser, read_flags  # type: ignore[no-redef]
    from servelab.shared.sglang_release import ReleaseError, read_version  # type: ignore[no-redef]

from .adaptive import Adaptive, load, unsupported
from .cost import Mode, Profile
from .dialect import Dialect
from .paths import Way

# Draft models that extend the target's own hidden states one step at a time, all served by the same code path.
_EAGLE = ("EAGLE", "EAGLE3", "NEXTN")
# What SGLang sets for speculation when the number is not given.
_SPECULATIVE_MAX_RUNNING = 48
_MAX_RUNNING = 4096
_NGRAM_DRAFT_TOKENS = 12
# What met the story's expert parallelism.
A2A_ASSERTION = "Flashinfer MoE A2A is only supported with flashinfer_cutlass moe runner backend"


class Refused(ValueError):
    """SGLang's launcher ends with an exception: `kind` and the text as Python prints them, exit status 1."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(text)
        self.kind = kind


class Unsupported(ValueError):
    """The flags ask for something that the cost model does not know. The text is one sentence."""


@dataclass(frozen=True)
class ServerArgs:
    """Every field that the installed release has, in its own order, with what it resolved to.

    `notices` are the log lines that the resolution writes.
    """

    values: Mapping[str, Any]
    version: str
    command: str
    notices: tuple[str, ...] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self.values.get(name)

    def __repr__(self) -> str:
        return "ServerArgs(" + ", ".join(f"{key}={value!r}" for key, value in self.values.items()) + ")"

    @property
    def dialect(self) -> Dialect:
        """How the release words its log."""
        return Dialect.of(self.version)


def parse(package: Path, argv: Sequence[str], profile: Profile) -> ServerArgs:
    """Parse `argv` with the flags of the SGLang in `package`; exits with status 2 on a usage error.

    Raises Unsupported when the package cannot be read, and Refused where SGLang would not go on.
    """
    try:
        parser, version = build_parser(read_flags(package)), read_version(package)
    except (FlagsUnreadable, ReleaseError) as error:
        raise Unsupported(str(error)) from error
    values = vars(parser.parse_args(_with_config(list(argv))))
    for name in ("config", "help"):
        values.pop(name, None)
    command = shlex.join([sys.executable, "-m", "sglang.launch_server", *argv])
    notices: list[str] = []
    args = ServerArgs(_resolved(values, profile, Dialect.of(version), notices), version, command, tuple(notices))
    if "cuda_graph_config" not in values:
        return args
    graphs = {"decode": _graphs("full" if graph_max_batch(args) else "disabled", graph_batches(args))}
    graphs["prefill"] = _graphs("disabled", [])
    return replace(args, values={**args.values, "cuda_graph_config": graphs})


def _with_config(argv: list[str]) -> list[str]:
    """What stands in the file behind --config comes before the other words, as with SGLang; here it must be JSON."""
    if "--config" not in argv:
        return argv
    at = argv.index("--config")
    path = Path(argv[at + 1]) if len(argv) > at + 1 else None
    try:
        document = json.loads(path.read_text(encoding="utf-8")) if path else None
    except (OSError, ValueError) as error:
        raise Refused("ValueError", f"Failed to read config file {path}: {type(error).__name__}") from error
    if not isinstance(document, dict):
        raise Refused("ValueError", "Config file must contain a dictionary at root level")
    words = [word for key, value in document.items() for word in (f"--{key.replace('_', '-')}", str(value))]
    return words + argv[:at] + argv[at + 2 :]


def _graphs(backend: str, batches: list[int]) -> dict[str, Any]:
    return {
        "backend": backend,
        "max_bs": max(batches, default=None),
        "bs": batches or None,
        "tc_compiler": "eager",
        "full_prefill_max_req": None,
    }


def _resolved(values: dict[str, Any], profile: Profile, dialect: Dialect, notices: list[str]) -> dict[str, Any]:
    """Fill in what SGLang decides by itself, for the card and the model of the profile."""
    resolved = dict(values)

    def default(name: str, value: Any) -> None:
        if name in resolved and resolved[name] is None:
            resolved[name] = value

    if (resolved.get("tp_size") or 1) % (resolved.get("nnodes") or 1):
        raise Refused("AssertionError", "tp_size must be divisible by number of nodes")
    default("tokenizer_path", resolved["model_path"])
    default("served_model_name", resolved["model_path"])
    default("mem_fraction_static", profile.memory["auto_fraction"])
    default("chunked_prefill_size", 8192)
    default("device", "cuda")
    default("page_size", 1)
    default("random_seed", 42)
    default("attention_backend", "triton")
    default("sampling_backend", "flashinfer")
    default("grammar_backend", "xgrammar")
    if resolved.get("moe_a2a_backend") == "flashinfer":
        _resolve_expert_parallel(resolved, dialect, notices)
    if resolved.get("speculative_algorithm"):
        if resolved.get("max_running_requests") is None:
            notices.append(
                f"Max running requests is reset to {_SPECULATIVE_MAX_RUNNING} for speculative decoding. "
                "You can override this by explicitly setting --max-running-requests."
            )
        default("max_running_requests", _SPECULATIVE_MAX_RUNNING)
        if resolved["speculative_algorithm"].upper() == "NGRAM":
            _resolve_ngram(resolved, notices)
        else:
            _resolve_eagle(resolved, default, dialect, notices)
    return resolved


def _resolve_expert_parallel(resolved: dict[str, Any], dialect: Dialect, notices: list[str]) -> None:
    """What FlashInfer's all-to-all needs, and the assertion that meets who does not know."""
    tp = resolved["tp_size"]
    if dialect.since("0.5.19"):
        if resolved.get("attn_dp_size") != tp and resolved.get("dp_size") != tp:
            raise Refused(
                "AssertionError",
                "Flashinfer MoE A2A requires --attn-dp-size equal to --tp-size, "
                "except for Muse Spark TP4/EP4 or TP8/EP8 prefill sequence parallelism.",
            )
        return
    resolved["ep_size"] = tp
    notices.append(
        "Flashinfer MoE A2A is enabled. The expert parallel size is adjusted to be the same as the tensor parallel "
        f"size[{tp}]."
    )
    notices.append("Flashinfer MoE A2A is enabled. --disable-shared-experts-fusion is automatically set.")
    if resolved.get("moe_runner_backend") != "flashinfer_cutlass":
        raise Refused("AssertionError", A2A_ASSERTION)


def _resolve_ngram(resolved: dict[str, Any], notices: list[str]) -> None:
    notices.append("The mixed chunked prefill are disabled because of using ngram speculative decoding.")
    if resolved.get("speculative_num_draft_tokens") is None:
        resolved["speculative_num_draft_tokens"] = _NGRAM_DRAFT_TOKENS
        notices.append(
            f"speculative_num_draft_tokens is set to {_NGRAM_DRAFT_TOKENS} by default for ngram speculative decoding. "
            "You can override this by explicitly setting --speculative-num-draft-tokens."
        )
    if resolved.get("speculative_num_steps") is None:
        resolved["speculative_num_steps"] = resolved["speculative_num_draft_tokens"]


def _resolve_eagle(resolved: dict[str, Any], default: Any, dialect: Dialect, notices: list[str]) -> None:
    default("speculative_draft_model_revision", "main")
    if resolved.get("speculative_adaptive"):
        _resolve_adaptive(resolved, dialect, notices)
    default("speculative_num_steps", 3)
    default("speculative_eagle_topk", 1)
    default("speculative_num_draft_tokens", resolved["speculative_num_steps"] + 1)
    if resolved["speculative_eagle_topk"] == 1:
        # A chain has one draft per step, and the target adds one token.
        resolved["speculative_num_draft_tokens"] = resolved["speculative_num_steps"] + 1


def _resolve_adaptive(resolved: dict[str, Any], dialect: Dialect, notices: list[str]) -> None:
    reason = unsupported(ServerArgs(resolved, "", ""))
    if reason is not None:
        notices.append(f"speculative_adaptive disabled: {reason}. Falling back to static speculative params.")
        resolved["speculative_adaptive"] = False
        return
    if not dialect.since("0.5.13"):
        raise Unsupported(
            "The simulated server knows --speculative-adaptive as it is since 0.5.13; take a later release."
        )
    try:
        _, entries = load(resolved.get("speculative_adaptive_config"), dialect)
    except OSError as error:
        raise Refused(type(error).__name__, str(error)) from error
    except ValueError as error:
        raise Refused("ValueError", str(error)) from error
    candidates = sorted({steps for entry in entries.values() for steps in entry["candidate_steps"]})
    if resolved.get("speculative_num_steps") is None:
        resolved["speculative_num_steps"] = candidates[len(candidates) // 2]
    steps = resolved["speculative_num_steps"]
    if steps not in candidates:
        raise Refused(
            "ValueError",
            f"--speculative-num-steps={steps} is not in the adaptive config candidate_steps {candidates}. "
            "Pass one of those values.",
        )


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


def mode_of(args: ServerArgs, way: Way | None = None) -> Mode:
    """Return what the flags and the way of the sums mean to the cost model. Raises Unsupported."""
    mode = Mode(graph_max_batch=graph_max_batch(args))
    if way is not None:
        mode = replace(mode, backend=way.backend, nccl=way.nccl, limit=way.limit)
    algorithm = args.speculative_algorithm
    if not algorithm:
        return mode
    if algorithm.upper() == "NGRAM":
        return replace(mode, ngram=True, draft_tokens=args.speculative_num_draft_tokens)
    if algorithm.upper() not in _EAGLE:
        raise Unsupported(
            f"The simulated server has no cost model for --speculative-algorithm {algorithm}; "
            f"it knows {', '.join((*_EAGLE, 'NGRAM'))}."
        )
    return replace(mode, draft_steps=args.speculative_num_steps, draft_tokens=args.speculative_num_draft_tokens)


def local_ranks(args: ServerArgs) -> range:
    """Return this node's tensor-parallel ranks: each node has as many."""
    here = int(args.tp_size or 1) // int(args.nnodes or 1)
    return range(here * int(args.node_rank or 0), here * (int(args.node_rank or 0) + 1))


def max_running(args: ServerArgs) -> int:
    """Return how many requests may run at once."""
    return int(args.max_running_requests or _MAX_RUNNING)


def adaptive_of(args: ServerArgs) -> Adaptive | None:
    """Return what chooses the draft's length, where that is not fixed."""
    if not args.speculative_algorithm or not args.speculative_adaptive:
        return None
    return Adaptive(args.speculative_num_steps, args.speculative_adaptive_config, args.dialect, graph_batches(args))
