#!/usr/bin/python
# Copyright (c) The Servelab developers
# Apache-2.0 (see LICENSE or https://www.apache.org/licenses/LICENSE-2.0)

"""Make one Proxmox container reachable over ssh, and read its host keys over a path that nobody can stand in."""

from __future__ import annotations

DOCUMENTATION = r"""
module: pct_bootstrap
short_description: Make one Proxmox container reachable over ssh
version_added: 0.1.0
description:
  - Runs on a Proxmox VE node as root, and works in the running guest through C(pct exec) only, so it needs
    neither ssh nor Python there.
  - Installs Python and the ssh server where they are missing (apt), adds public keys of root, has host keys generated
    and the ssh server running.
  - Returns the guest's host keys as read inside it, for a C(known_hosts) that need not trust the network.
author: The Servelab developers
options:
  vmid:
    description: The number of the guest, which must run.
    type: int
    required: true
  public_keys:
    description: Lines that root's C(authorized_keys) shall hold. Other lines of it are left alone.
    type: list
    elements: str
    default: []
  timeout:
    description: Seconds that one command in the guest may take, and that the guest may take to boot.
    type: int
    default: 600
attributes:
  check_mode:
    description: Tells what would change, without changing it.
    support: full
  diff_mode:
    description: Shows what is done, and the lines added to C(authorized_keys).
    support: full
"""

EXAMPLES = r"""
- name: Let the controller in over ssh
  servelab.sglang.pct_bootstrap:
    vmid: 129
    public_keys: ["{{ lookup('ansible.builtin.file', '~/.ssh/id_ed25519.pub') }}"]
  register: bootstrap
"""

RETURN = r"""
host_keys:
  description: The guest's public host keys without their comments. Empty in check mode as long as none exist.
  returned: always
  type: list
  elements: str
  sample: ["ssh-ed25519 AAAA…"]
did:
  description: What was done (in check mode, would be), one phrase each.
  returned: always
  type: list
  elements: str
limits:
  description:
    - The soft limit of locked memory of the guest's first process, as the kernel shows it, and the size of C(/dev/shm)
      (0 where it is not known). A restart would bring changed ones.
  returned: always
  type: dict
  sample: {"memlock": "unlimited", "shm_kib": 67108864}
"""

import re
import time

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.pct_config import explain
from ansible_collections.servelab.sglang.plugins.module_utils.pct_run import Answer, PctMissing, run_pct

KEYS = "/root/.ssh/authorized_keys"
# One look at everything: each `pct exec` costs a second on a busy node.
LOOK = f"""
printf 'python3=%s\\n' "$(command -v python3)"
printf 'sshd=%s\\n' "$(command -v sshd)"
printf 'active=%s\\n' "$(systemctl is-active ssh.service ssh.socket sshd.service 2>/dev/null | grep -cx active)"
printf 'enabled=%s\\n' "$(systemctl is-enabled ssh.service ssh.socket sshd.service 2>/dev/null | grep -cx enabled)"
printf 'memlock=%s\\n' "$(sed -n 's/^Max locked memory *\\([^ ]*\\).*/\\1/p' /proc/1/limits)"
printf 'shm=%s\\n' "$(df -k --output=size /dev/shm 2>/dev/null | tail -n 1 | tr -d ' ')"
for key in /etc/ssh/ssh_host_*_key.pub; do [ -e "$key" ] && sed 's/^/hostkey=/' "$key"; done
[ -e {KEYS} ] && sed 's/^/authorized=/' {KEYS}
true
"""


class Guest:
    def __init__(self, module: AnsibleModule) -> None:
        self.module = module
        self.vmid = str(module.params["vmid"])

    def run(self, script: str, text: str = "", check: bool = True) -> Answer:
        """Run a shell script in the guest. It travels as an argument and holds no secret; `text` is its input."""
        try:
            answer = run_pct(
                "exec", self.vmid, "--", "sh", "-c", script, text=text, timeout=self.module.params["timeout"]
            )
        except PctMissing as missing:
            self.module.fail_json(msg=str(missing))
            raise
        if check and answer.rc != 0:
            self.module.fail_json(
                msg=f"A command in guest {self.vmid} failed: {explain(answer.said, int(self.vmid))}",
                script=script,
                rc=answer.rc,
                stdout=answer.out,
                stderr=answer.err,
            )
        return answer

    def wait_until_booted(self) -> None:
        """Services can be asked only when systemd has got that far; a degraded boot is a boot."""
        deadline = time.monotonic() + self.module.params["timeout"]
        while True:
            answer = self.run("systemctl is-system-running || true", check=False)
            if answer.out.strip() in ("running", "degraded", "maintenance"):
                return
            if time.monotonic() > deadline:
                self.module.fail_json(
                    msg=f"Guest {self.vmid} has not booted: systemd says {answer.said.strip()!r}; look at "
                    f"`pct exec {self.vmid} -- systemctl list-jobs`."
                )
            time.sleep(0.5)

    def look(self) -> dict[str, list[str]]:
        seen: dict[str, list[str]] = {}
        for line in self.run(LOOK).out.splitlines():
            key, _equals, value = line.partition("=")
            seen.setdefault(key, []).append(value)
        return seen


def first(seen: dict[str, list[str]], key: str) -> str:
    return (seen.get(key) or [""])[0]


def host_keys(seen: dict[str, list[str]]) -> list[str]:
    return [" ".join(line.split()[:2]) for line in seen.get("hostkey", []) if re.match(r"^(ssh|ecdsa)-\S+ \S+", line)]


def key_of(line: str) -> str:
    """Type and key of a line of authorized_keys, without its options and its comment."""
    match = re.search(r"\b(?:(?:sk-)?(?:ssh|ecdsa)-\S+) +(\S+)", line)
    return match[0] if match else line.strip()


def main() -> None:
    module = AnsibleModule(
        argument_spec={
            "vmid": {"type": "int", "required": True},
            "public_keys": {"type": "list", "elements": "str", "default": []},
            "timeout": {"type": "int", "default": 600},
        },
        supports_check_mode=True,
    )
    guest = Guest(module)
    guest.wait_until_booted()
    seen = guest.look()
    did: list[str] = []

    packages = [
        package for package, tool in (("python3", "python3"), ("openssh-server", "sshd")) if not first(seen, tool)
    ]
    if packages:
        did.append(f"install {' and '.join(packages)}")
    have = {key_of(line) for line in seen.get("authorized", [])}
    wanted = [line.strip() for line in module.params["public_keys"] if line.strip()]
    added = [line for line in wanted if key_of(line) not in have]
    if added:
        did.append(f"add {len(added)} line(s) to {KEYS}")
    # A fresh server package generates its host keys and starts by itself.
    if not host_keys(seen) and "openssh-server" not in packages:
        did.append("generate host keys")
    if "0" in (first(seen, "active") or "0", first(seen, "enabled") or "0") and "openssh-server" not in packages:
        did.append("enable and start the ssh server")

    if did and not module.check_mode:
        if packages:
            guest.run(
                "export DEBIAN_FRONTEND=noninteractive; apt-get -qq update && "
                f"apt-get -qq -y --no-install-recommends -o DPkg::Lock::Timeout=120 install {' '.join(packages)}"
            )
        if added:
            # A last line without its line break would swallow the first new one.
            guest.run(
                f"umask 077; mkdir -p /root/.ssh && touch {KEYS} && "
                f'{{ [ -z "$(tail -c1 {KEYS})" ] || echo >> {KEYS}; }} && cat >> {KEYS}',
                "".join(f"{line}\n" for line in added),
            )
        if "generate host keys" in did:
            guest.run("ssh-keygen -A")
        if "enable and start the ssh server" in did:
            guest.run("systemctl enable --now ssh.service 2>/dev/null || systemctl enable --now sshd.service")
        seen = guest.look()
        if not host_keys(seen):
            module.fail_json(
                msg=f"Guest {guest.vmid} has no ssh host key even after `ssh-keygen -A`; look into /etc/ssh there."
            )
    module.exit_json(
        changed=bool(did),
        did=did,
        host_keys=host_keys(seen),
        limits={"memlock": first(seen, "memlock"), "shm_kib": int(first(seen, "shm") or 0)},
        diff={"before": "", "after": "".join(f"{line}\n" for line in [*did, *added])},
    )


if __name__ == "__main__":
    main()
