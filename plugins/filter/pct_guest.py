"""Filters that turn the inventory's description of a guest into arguments of pct_config."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ansible_collections.servelab.sglang.plugins.module_utils.pct_guest import guest_options, raw_lines


class FilterModule:
    def filters(self) -> dict[str, Callable[..., Any]]:
        return {"pct_options": guest_options, "pct_raw_lines": raw_lines}
