"""Start SGLang's router with the keys of a file: given as flags, the command line would show them to everybody.

    python run_router.py [--keys FILE] [--check] -- FLAGS

FLAGS are the router's own, read by its own parser; --check only reads them. FILE is a JSON object: "api-key" is asked
of clients and shown to servers, "admin-api-key" is asked of whoever would add or remove servers.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from sglang_router.launch_router import launch_router, parse_router_args  # type: ignore[import-not-found]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--keys", type=Path)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("flags", nargs="*")
    asked = parser.parse_args()
    settings = parse_router_args(asked.flags)
    if asked.check:
        return
    keys = json.loads(asked.keys.read_text(encoding="utf-8")) if asked.keys else {}
    settings.api_key = keys.get("api-key")
    if "admin-api-key" in keys:
        settings.control_plane_api_keys = [("servelab", "servelab", keys["admin-api-key"], "admin")]
    launch_router(settings)


if __name__ == "__main__":
    main()
