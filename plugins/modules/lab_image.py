#!/usr/bin/python
# Copyright: The Servelab developers
# Apache License 2.0 (see LICENSE)
"""Root file systems of the lab, built once and cached."""

from __future__ import annotations

DOCUMENTATION = r"""
---
module: lab_image
short_description: Build the lab's root file systems, or find them in the cache
version_added: 0.1.0
description:
  - Each image is a Debian root file system as a C(.tar.zst), built by mmdebstrap. Its name carries a hash of its
    recipe, so an image that is there is the right one. Missing ones are built at the same time.
options:
  cache:
    description: The directory of the images.
    type: path
    required: true
  images:
    description: The recipes.
    type: list
    elements: dict
    required: true
    suboptions:
      name:
        description: Begins the file's name.
        type: str
        required: true
      suites:
        description: Debian's releases, as V(trixie); each makes an image of its own.
        type: list
        elements: str
        required: true
      sources:
        description: One-line apt sources. The word V(SUITE) in them is the release.
        type: list
        elements: str
        required: true
      packages:
        description: What is installed beside the essential packages and apt.
        type: list
        elements: str
        required: true
      files:
        description: Files that are laid over the installed system.
        type: list
        elements: dict
        default: []
        suboptions:
          path:
            description: Absolute in the image.
            type: str
            required: true
          content:
            description: The text. It may carry credentials of a mirror and is shown nowhere.
            type: str
          mode:
            description: Permissions, as V(0644).
            type: str
            default: "0644"
          link:
            description: Makes it a symbolic link to this.
            type: str
      run:
        description: Shell lines to run in the image at the end.
        type: str
        default: ""
attributes:
  check_mode:
    description: Tells which images would be built.
    support: full
  diff_mode:
    description: An image is there or not.
    support: none
author:
  - The Servelab developers
"""

EXAMPLES = r"""
- name: Build what is not in the cache
  servelab.sglang.lab_image:
    cache: /var/cache/servelab-lab/images
    images:
      - name: node
        suites: [trixie]
        sources: ["deb http://deb.debian.org/debian SUITE main"]
        packages: [systemd-sysv, openssh-server]
"""

RETURN = r"""
paths:
  description: Where each image is, by name and release, as V(node-trixie).
  returned: always
  type: dict
built:
  description: Names and releases of the images that were built, or would be.
  returned: always
  type: list
  elements: str
seconds:
  description: How long each build took, by name and release.
  returned: always
  type: dict
"""

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from ansible.module_utils.basic import AnsibleModule
from ansible_collections.servelab.sglang.plugins.module_utils.lab_host import with_sbin
from ansible_collections.servelab.sglang.plugins.module_utils.lab_image import Recipe, recipes


class BuildError(Exception):
    """Building failed; the message says how and where to read more."""


def _die_with_parent() -> None:
    ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG: no build outlives the playbook


def build(wanted: Recipe, cache: Path) -> float:
    """Put the image into the cache unless somebody did; returns the seconds it took (0: it was there).

    The work happens in a directory of its own on the cache's file system. What a cut-off build left goes first.
    """
    final = cache / wanted.file_name
    work = cache / f".{wanted.key}.work"
    with (cache / f".{wanted.key}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if final.exists():
            return 0.0
        shutil.rmtree(work, ignore_errors=True)
        work.mkdir(mode=0o755)
        started = time.monotonic()
        (work / "overlay.tar").write_bytes(wanted.overlay())
        log = cache / f"{wanted.key}.log"
        command = [
            "mmdebstrap",
            "--mode=root",
            "--variant=minbase",
            f"--include={','.join(wanted.packages)}",
            f"--customize-hook=tar-in {work / 'overlay.tar'} /",
            '--customize-hook=chroot "$1" sh -euxc "$SERVELAB_IMAGE_RUN"',
            wanted.suite,
            str(work / "image.tar.zst"),
            *wanted.sources,
        ]
        environment = {**os.environ, "TMPDIR": str(work), "SERVELAB_IMAGE_RUN": wanted.run, "LC_ALL": "C.UTF-8"}
        with log.open("w") as out:
            code = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=_die_with_parent,
                check=False,
            ).returncode
        if code != 0:
            errors = [line for line in log.read_text(errors="replace").splitlines() if line.startswith("E:")]
            raise BuildError(
                f"mmdebstrap could not build the image {wanted.key} (exit {code}): "
                f"{' '.join(errors[-3:]) or 'no error line'} — the whole story is in {log}."
            )
        (work / "image.tar.zst").rename(final)
        shutil.rmtree(work)
        for old in cache.glob(f"{wanted.key}-*.tar.zst"):
            if old != final and time.time() - old.stat().st_mtime > 14 * 86400:
                old.unlink()
        return time.monotonic() - started


def main() -> None:
    file_spec = {
        "path": {"type": "str", "required": True},
        "content": {"type": "str", "no_log": True},
        "mode": {"type": "str", "default": "0644"},
        "link": {"type": "str"},
    }
    image_spec = {
        "name": {"type": "str", "required": True},
        "suites": {"type": "list", "elements": "str", "required": True},
        "sources": {"type": "list", "elements": "str", "required": True},
        "packages": {"type": "list", "elements": "str", "required": True},
        "files": {"type": "list", "elements": "dict", "default": [], "options": file_spec},
        "run": {"type": "str", "default": ""},
    }
    module = AnsibleModule(
        argument_spec={
            "cache": {"type": "path", "required": True},
            "images": {"type": "list", "elements": "dict", "required": True, "options": image_spec},
        },
        supports_check_mode=True,
    )
    os.environ["PATH"] = with_sbin(os.environ.get("PATH", ""))
    cache = Path(module.params["cache"])
    wanted_ones = [one for stated in module.params["images"] for one in recipes(stated)]
    missing = [wanted for wanted in wanted_ones if not (cache / wanted.file_name).exists()]
    seconds = {}
    if missing and not module.check_mode:
        with ThreadPoolExecutor(len(missing)) as pool:
            running = {wanted.key: pool.submit(build, wanted, cache) for wanted in missing}
        failures = [str(error) for job in running.values() if (error := job.exception()) is not None]
        if failures:
            module.fail_json(msg=" ".join(failures))
        seconds = {name: round(job.result(), 1) for name, job in running.items()}
    module.exit_json(
        changed=bool(missing),
        paths={wanted.key: str(cache / wanted.file_name) for wanted in wanted_ones},
        built=[wanted.key for wanted in missing],
        seconds=seconds,
    )


if __name__ == "__main__":
    main()
