"""What the scenarios of sglang_env read of a stack, and how they cut a guest off."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Iterator

from conftest import ROOT
from testinfra.host import Host

LINK, STACKS = "/opt/servelab/stack", "/opt/servelab/stacks"
# The lock of a release that the collection ships none for.
OWN_LOCK = ROOT / "molecule/sglang_env_otherwise/files/0.5.10-py3.13.txt"
VALIDATE = ROOT / "playbooks/validate.yml"


def stack_of(guest: Host, link: str = LINK) -> str:
    return guest.check_output(f"readlink {link}")


@contextlib.contextmanager
def cut_off(guest: Host) -> Iterator[None]:
    """The guest without a way out; ssh from the lab's own network still works."""
    route = guest.check_output("ip route show default").splitlines()[0]
    guest.check_output("ip route del default")
    try:
        assert guest.run("python3 -m pip download --no-deps --dest /tmp/none --timeout 2 --retries 0 six").rc != 0
        yield
    finally:
        guest.check_output(f"ip route add {route}")


def assert_holds(guest: Host, release: str, link: str = LINK, stacks: str = STACKS) -> None:
    """The link names the real wheel of this release, alone of its lock."""
    assert re.fullmatch(rf"{stacks}/{re.escape(release)}-light-[0-9a-f]{{8}}", stack_of(guest, link))
    metadata = guest.check_output(f"cat {link}/lib/python3.13/site-packages/sglang-{release}.dist-info/METADATA")
    assert "\nName: sglang\n" in metadata
    assert f"\nVersion: {release}\n" in metadata
    packages = guest.file(f"{link}/lib/python3.13/site-packages").listdir()
    assert "sglang" in packages
    assert not {"torch", "flashinfer", "transformers"} & set(packages)
    wanted = json.loads(guest.file(f"{link}/servelab-proof.json").content_string)["wanted"]
    assert (wanted["sglang"], wanted["profile"], wanted["python"]) == (release, "light", "3.13")
    lock = guest.file(f"{link}/servelab-lock.txt").content_string
    assert re.search(rf"(?m)^sglang=={re.escape(release)} \\\n    --hash=sha256:[0-9a-f]{{64}}$", lock)
    assert lock.count("==") == lock.count("sglang==") + lock.count(
        "# requirement: cuda-toolkit[nvcc,cccl,cudart]==13.0"
    ) + (lock.count("# requirement: nvidia-") + lock.count("# override: "))
