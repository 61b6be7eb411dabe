"""Keeps what Python compiles of Ansible's modules; in the lab's machines only, through a .pth file beside this one.

Ansible sends each module as a zip of sources, and of a zip Python keeps no byte code: each call compiles the same 50
files again, twice, in a quarter of its time. Code is found again by its source and by who compiled it, not by its name.
"""

import contextlib
import importlib.util
import marshal
import os
import sys
import zipimport

# Root's alone: who may write here decides what root runs.
DIRECTORY = f"/var/cache/servelab-lab-compiled/{sys.implementation.cache_tag}"

_compile = zipimport._compile_source


def _kept(pathname, source):
    # What byte code that is not told by time is told by, too.
    path = f"{DIRECTORY}/{importlib.util.source_hash(source).hex()}-{len(source)}"
    # EOFError, ValueError and TypeError: a disk was full, or the file is another's.
    with contextlib.suppress(OSError, EOFError, ValueError, TypeError), open(path, "rb") as file:
        return marshal.load(file)
    code = _compile(pathname, source)
    with contextlib.suppress(OSError):
        os.makedirs(DIRECTORY, exist_ok=True)
        half = f"{path}.{os.getpid()}"
        with open(half, "wb") as file:
            marshal.dump(code, file)
        os.replace(half, path)
    return code


zipimport._compile_source = _kept
