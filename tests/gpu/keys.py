#!/usr/bin/env python3
"""Whether a real server's keys are asked for, and stand nowhere but in their files.

    keys.py make FILE                         two new keys, as variables for ansible-playbook -e @FILE
    keys.py ask FILE                          the running server with no key, the wrong one, each of the two
    keys.py search FILE ROOT...               every file below ROOT, every process's command line and environment

`ask` prints status by route and key; `search` prints where a key stands, by path, and exits 1 where that is not in
a directory etc/servelab/secrets.
"""

from __future__ import annotations

import json
import secrets
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

URL = "http://127.0.0.1:30000"
# route → body: what users ask, what tells the server's settings, and what only an administrator may do.
ROUTES = {
    "/v1/completions": {"model": "known-chains", "prompt": "w11 w12", "max_tokens": 2},
    "/get_server_info": None,
    "/update_weights_from_disk": {"model_path": "/nowhere"},
}


def status(route: str, body: object, key: str | None) -> int:
    posted = None if body is None else json.dumps(body).encode()
    headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
    try:
        with urllib.request.urlopen(urllib.request.Request(URL + route, posted, headers), timeout=60) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as refused:
        return refused.code


def ask(keys: dict[str, str]) -> None:
    who = {"no key": None, "a wrong key": "x" * 20, "the API key": keys["sglang_server_api_key"]}
    who["the admin key"] = keys["sglang_server_admin_api_key"]
    for route, body in ROUTES.items():
        print(route, {name: status(route, body, key) for name, key in who.items()})


def places(roots: list[str]) -> Iterator[tuple[str, bytes]]:
    """(where, what stands there). Archives are looked into by name only where tar reads them as text."""
    for root in roots:
        for path in Path(root).rglob("*"):
            if path.is_file() and not path.is_symlink():
                packed = path.suffixes[-1:] in ([".tgz"], [".gz"], [".xz"])
                yield (
                    str(path),
                    subprocess.run(["tar", "-xOf", path], capture_output=True).stdout if packed else path.read_bytes(),
                )
    for process in Path("/proc").glob("[0-9]*"):
        for name in ("cmdline", "environ"):
            try:
                yield f"{process}/{name} of {(process / 'comm').read_text().strip()}", (process / name).read_bytes()
            except OSError:
                continue


def search(keys: dict[str, str], roots: list[str]) -> int:
    looked = wrong = 0
    for where, text in places(roots):
        looked += 1
        if any(key.encode() in text for key in keys.values()):
            kept = "/etc/servelab/secrets/" in where
            wrong += not kept
            print("kept there:" if kept else "FOUND IN:", where)
    print(f"{looked} files and processes were read; {wrong} of them give a key away")
    return 1 if wrong else 0


def main() -> int:
    what, file, *roots = sys.argv[1:]
    if what == "make":
        names = ("sglang_server_api_key", "sglang_server_admin_api_key")
        Path(file).touch(0o600)
        Path(file).write_text(json.dumps({name: f"SENTINEL-{secrets.token_hex(12)}" for name in names}))
        return 0
    keys = json.loads(Path(file).read_text())
    if what == "search":
        return search(keys, roots)
    ask(keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
