"""What labs could leave behind, one line each: traces.py ID…. Other labs' belongings come and go: passed over."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

ours = sys.argv[1:]
# Whatever carries six hex digits that are not ours.
foreign = re.compile(rf"(?:slab|slv|servelab-|servelab-lab/|servelab-other/)(?!{'|'.join(ours)})[0-9a-f]{{6}}")


def command(*words: str) -> str:
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout


def links() -> list[str]:
    found = []
    for link in json.loads(command("ip", "-json", "addr")):
        # A lab's ports are named after it or, as those of guests, live in its node's name space.
        found += [f"link {link['ifname']} {address['local']}" for address in link["addr_info"]] or [
            f"link {link['ifname']}"
        ]
    return found


lines = [
    *links(),
    *(f"route {line.strip()}" for line in command("ip", "route", "show", "table", "all").splitlines()),
    *(f"rule {line}" for line in command("iptables-save").splitlines() if line.startswith("-A")),
    *(f"mount {line.split()[4]}" for line in Path("/proc/self/mountinfo").read_text().splitlines()),
    *(f"cgroup {path}" for path in Path("/sys/fs/cgroup").glob("**/lxc.*") if path.is_dir()),
    *(
        f"file {path}"
        for place in ("/var/lib/servelab-lab", "/var/lib/servelab-other", "/run/lxc/lock", "/run/servelab-lab")
        for path in Path(place).glob("*")
    ),
    *(f"file {path}" for path in Path("/run/lxc/lock/var/lib/servelab-lab").glob("*")),
    f"forwarding {Path('/proc/sys/net/ipv4/ip_forward').read_text().strip()}",
]
processes = []
for entry in Path("/proc").iterdir():
    try:
        if entry.name.isdigit() and any(one in (entry / "cgroup").read_text() for one in ours):
            processes.append(f"process {entry.name} {(entry / 'exe').readlink()}")
    except OSError:
        continue
# The last lab to go takes these with it: whether they stay depends on the others.
shared = ("file /run/servelab-lab/", "file /run/lxc/lock/var", "forwarding")
there_are_others = any(foreign.search(line) for line in lines)
for line in sorted(set(lines) | set(processes)):
    if not foreign.search(line) and not (there_are_others and line.startswith(shared)):
        print(line)
