"""The documents that describe the server: /server_info, /model_info and /v1/models."""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import Any

from .config import Config
from .cost import Profile
from .engine import DecodeReport, Engine
from .memory import Plan
from .serverargs import ServerArgs, max_running
from .startup import context_length

# SGLang keeps a few positions of the longest input free.
_INPUT_MARGIN = 6


class Info:
    """What the server says about itself. `gen_throughput` is the last decode log line's, in tokens per simulated s."""

    def __init__(self, config: Config, args: ServerArgs, profile: Profile, plan: Plan, engine: Engine) -> None:
        self.config, self.args, self.profile, self.plan, self.engine = config, args, profile, plan, engine
        self.gen_throughput = self.input_throughput = 0.0
        self.last_decode: DecodeReport | None = None

    def decoded(self, report: DecodeReport, throughput: float) -> None:
        """Take in a decode log line: the figures that are shown between two of them are the last one's."""
        self.last_decode, self.gen_throughput = report, throughput

    @property
    def context(self) -> int:
        """The longest prompt and answer together."""
        return context_length(self.args, self.profile)

    @property
    def model(self) -> str:
        """The name that the model is served under."""
        return str(self.args.served_model_name)

    def server(self) -> dict[str, Any]:
        """Return /server_info: every argument as resolved, the scheduler's state, and that all this is simulated."""
        context = self.context
        return {
            **self.args.values,
            **({"launch_command": self.args.command} if self.args.dialect.since("0.5.20") else {}),
            "status": "ready",
            "max_total_num_tokens": self.plan.tokens,
            "max_req_input_len": min(context, self.plan.tokens) - _INPUT_MARGIN,
            "internal_states": [self._internal_state(context)],
            "version": self.args.version,
            "kv_events": None,
            "simulated": {"profile": self.profile.name, "time_scale": self.config.time_scale},
            # Nothing real has this: what was measured while it grew is slower than the model.
            "simulated_late_seconds": round(self.engine.late_seconds, 6),
        }

    def _internal_state(self, context: int) -> dict[str, Any]:
        plan, engine = self.plan, self.engine
        state: dict[str, Any] = {
            **self.args.values,
            "context_length": context,
            "pp_max_micro_batch_size": max_running(self.args),
            "max_speculative_num_draft_tokens": engine.widest if engine.speculates else None,
            "last_gen_throughput": self.gen_throughput,
            "memory_usage": {
                "weight": round(plan.weights, 2),
                "kvcache": round(plan.kv, 2),
                "token_capacity": plan.tokens,
                "graph": round(plan.graph, 2),
            },
            "effective_max_running_requests_per_dp": max_running(self.args),
        }
        if engine.total_verify_steps:
            state["avg_spec_accept_length"] = engine.total_accepted / engine.total_verify_steps
        return state

    def model_info(self) -> dict[str, Any]:
        """Return /model_info."""
        return {
            "model_path": self.args.model_path,
            "tokenizer_path": self.args.tokenizer_path,
            "is_generation": True,
            "preferred_sampling_params": None,
            "weight_version": "default",
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "kimi_k25",
            "architectures": [self.profile.model],
        }

    def models(self) -> dict[str, Any]:
        """Return /v1/models."""
        return {"object": "list", "data": [self.card()]}

    def card(self) -> dict[str, Any]:
        """Return the one served model's entry."""
        return {
            "id": self.model,
            "object": "model",
            "created": int(time.time()),
            "owned_by": "sglang",
            "root": self.model,
            "parent": None,
            "max_model_len": self.context,
        }

    def load(self) -> list[dict[str, Any]]:
        """Return /get_load."""
        engine = self.engine
        return [
            {
                "dp_rank": 0,
                "num_reqs": engine.requests,
                "num_waiting_reqs": len(engine.waiting),
                "num_tokens": engine.tokens_held,
                "num_pending_tokens": engine.tokens_pending,
                "ts_tic": time.monotonic(),
            }
        ]

    def loads(self) -> dict[str, Any]:
        """Return /v1/loads."""
        plan, engine = self.plan, self.engine
        return {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": self.args.version,
            "loads": [
                {
                    "dp_rank": 0,
                    "num_running_reqs": len(engine.running),
                    "num_waiting_reqs": len(engine.waiting),
                    "num_waiting_uncached_tokens": engine.tokens_pending,
                    "num_used_tokens": engine.tokens_held,
                    "num_total_tokens": engine.tokens_held + engine.tokens_pending,
                    "max_total_num_tokens": plan.tokens,
                    "max_running_requests": max_running(self.args),
                    "token_usage": round(engine.tokens_held / plan.tokens, 4),
                    "gen_throughput": self.gen_throughput,
                    "cache_hit_rate": engine.hit_rate,
                    "utilization": len(engine.running) / engine.max_running,
                    "memory": {
                        "weight_gb": round(plan.weights, 3),
                        "kv_cache_gb": round(plan.kv, 3),
                        "graph_gb": round(plan.graph, 3),
                        "token_capacity": plan.tokens,
                    },
                    "disaggregation": {
                        "mode": "null",
                        "prefill_bootstrap_queue_reqs": 0,
                        "prefill_inflight_queue_reqs": 0,
                        "decode_prealloc_queue_reqs": 0,
                        "decode_transfer_queue_reqs": 0,
                        "decode_retracted_queue_reqs": 0,
                        "kv_transfer_speed_gb_s": 0.0,
                        "kv_transfer_latency_ms": 0.0,
                    },
                    "queues": {"waiting": len(engine.waiting), "grammar": 0, "paused": 0, "retracted": 0},
                }
            ],
        }
