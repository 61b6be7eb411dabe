"""The flags of the installed SGLang release: read them, parse with them, and turn a mode's args into an argv."""

from __future__ import annotations

from .sglang_flags_model import Flag, build_parser
from .sglang_flags_read import FlagsUnreadable, read_flags
from .sglang_flags_resolve import Resolution, resolve

__all__ = ["Flag", "FlagsUnreadable", "Resolution", "build_parser", "read_flags", "resolve"]
