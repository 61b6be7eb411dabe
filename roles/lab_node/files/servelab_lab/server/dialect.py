"""How an SGLang release words its log. Read in the sources of 0.5.8 to 0.5.23; which release changed what is said here.

Between two releases that were read, the older one's words are taken.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

try:
    from servelab_lab.shared.sglang_release import Release
except ModuleNotFoundError:  # In the checkout, where the lab has not copied the shared parsers beside the package.
    from servelab.shared.sglang_release import Release  # type: ignore[no-redef]

# Line of `scheduler = Scheduler(` in srt/managers/scheduler.py, for tracebacks.
_SCHEDULER_LINES = (
    ("0.5.8", 2937), ("0.5.9", 3130), ("0.5.10", 3600), ("0.5.12", 4025), ("0.5.13", 4046), ("0.5.14", 4211),
    ("0.5.15", 4313), ("0.5.19", 5584), ("0.5.20", 5841), ("0.5.23", 6362),
)  # fmt: skip


@dataclass(frozen=True)
class Dialect:
    """The words of one release."""

    release: Release

    @classmethod
    def of(cls, version: str) -> Dialect:
        return cls(Release.parse(version))

    def since(self, version: str) -> bool:
        """Say whether this is `version` or a later release."""
        return bool(self.release >= Release.parse(version))

    # Start

    @property
    def init_begin(self) -> str:
        return "Init parallel begin." if self.since("0.5.23") else "Init torch distributed begin."

    def init_end(self, elapsed: float, gib: float) -> str:
        if self.since("0.5.23"):
            return f"Init parallel ends. elapsed={elapsed:.2f} s"
        took = f"elapsed={elapsed:.2f} s, " if self.since("0.5.9") else ""
        return f"Init torch distributed ends. {took}mem usage={gib:.2f} GB"

    def pool(self, tokens: int, size: str) -> str:
        """`size` is "KV size: 1.00 GB", or "K size: 1.00 GB, V size: 1.00 GB"."""
        kind = "dtype: torch.bfloat16, " if self.since("0.5.13") else ""
        return f"KV Cache is allocated. {kind}#tokens: {tokens}, {size}"

    @property
    def many_graphs(self) -> bool:
        """Whether prefill, verify, draft and extend graphs are each announced by role."""
        return self.since("0.5.14")

    def capture_begin(self, role: str, per_request: int, batches: Sequence[int], free: float) -> str:
        """`role` is "target decode", "target verify", "draft decode" or "draft extend"."""
        if not self.many_graphs:
            return f"Capture {_OLD_ROLES[role]} begin. This can take up to several minutes. avail mem={free:.2f} GB"
        begin = f"Capture {role} CUDA graph begin. backend=full, "
        if self.since("0.5.19"):
            return begin + f"num_tokens_per_req={per_request}, avail mem={free:.2f} GB"
        return begin + f"num_tokens_per_bs={per_request}, bs={list(batches)}, avail mem={free:.2f} GB"

    def capture_end(self, role: str, batches: Sequence[int], elapsed: float, gib: float, free: float) -> str:
        if not self.many_graphs:
            return (
                f"Capture {_OLD_ROLES[role]} end. Time elapsed: {elapsed:.2f} s. "
                f"mem usage={gib:.2f} GB. avail mem={free:.2f} GB."
            )
        listed = f"bs={list(batches)}, " if self.since("0.5.19") and role.startswith("target") else ""
        return (
            f"Capture {role} CUDA graph end. {listed}elapsed={elapsed:.2f} s, "
            f"mem usage={gib:.2f} GB, avail mem={free:.2f} GB."
        )

    @property
    def tree_cache(self) -> str | None:
        if not self.since("0.5.13"):
            return None
        kind = "hicache_attached=False" if self.since("0.5.19") else "hierarchical=False streaming_wrapped=False"
        return f"Tree cache initialized: source=default impl=RadixCache hybrid_swa=False hybrid_ssm=False {kind}"

    # Work

    @property
    def tells_pending(self) -> bool:
        return self.since("0.5.12")

    def accept_rate(self, accept_length: float, draft_tokens: int) -> float:
        """Return the share of drafts that were right. Up to 0.5.10 the sure token is counted on both sides."""
        if draft_tokens < 2:
            return 0.0
        if not self.since("0.5.11"):
            return accept_length / draft_tokens
        return (accept_length - 1) / (draft_tokens - 1)

    # Ends

    @property
    def logs_kills(self) -> bool:
        """Whether a process tree's end is announced, and a crash waits for diagnostics."""
        return self.since("0.5.13")

    def no_room(self, fraction: float, least: float) -> tuple[str, str]:
        """Return the kind and the text of the exception for a KV cache without room; `least` is the fraction needed."""
        if not self.since("0.5.14"):
            return (
                "RuntimeError",
                "Not enough memory. Please try to increase --mem-fraction-static. "
                f"Current value: mem_fraction_static={fraction}",
            )
        return (
            "ValueError",
            f"Loaded weights leave no GPU memory for the KV cache under --mem-fraction-static={fraction}. "
            f"Raise --mem-fraction-static above {-(-least * 1000 // 1) / 1000:.3f} "
            f"(minimum viable = 1 - available/pre = {least:.4f}). "
            "If using speculative decoding, draft weights are now counted.",
        )

    def capture_failed(self, why: str) -> str:
        """Return the exception's text when a decode graph cannot be captured."""
        flag = "--cuda-graph-max-bs-decode" if self.since("0.5.14") else "--cuda-graph-max-bs"
        if self.since("0.5.14"):
            ways = "3. disable decode CUDA graph by --cuda-graph-backend-decode=disabled. "
        else:
            ways = (
                "3. disable torch compile by not using --enable-torch-compile\n4. disable CUDA graph by "
                "--disable-cuda-graph. "
            )
        return (
            f"Capture cuda graph failed: {why}\nPossible solutions:\n"
            "1. set --mem-fraction-static to a smaller value (e.g., 0.8 or 0.7)\n"
            f"2. set {flag} to a smaller value (e.g., 16)\n{ways}(Not recommended. Huge performance loss)\n"
            "Open an issue on GitHub https://github.com/sgl-project/sglang/issues/new/choose \n"
        )

    def scheduler_frame(self, package: str) -> str:
        """Return the traceback's first frame of a scheduler that fails while it starts."""
        line = next((n for version, n in reversed(_SCHEDULER_LINES) if self.since(version)), _SCHEDULER_LINES[0][1])
        call = "Scheduler(server_args, port_args)" if self.since("0.5.23") else "Scheduler("
        return (
            f'  File "{package}/srt/managers/scheduler.py", line {line}, in run_scheduler_process\n'
            f"    scheduler = {call}\n                {'^' * len(call)}\n"
        )


_OLD_ROLES = {
    "target decode": "cuda graph",
    "target verify": "cuda graph",
    "draft decode": "draft cuda graph",
    "draft extend": "draft extend cuda graph",
}
