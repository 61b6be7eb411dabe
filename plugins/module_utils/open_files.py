"""What is behind an open descriptor of a process, as the kernel itself knows it.

A scan for holders asks about a million descriptors, and some are files of a server (NFS, FUSE) that is gone: os.stat
would wait for it, for ever. statx() can be told not to, and one call for each descriptor is the least there is:
/proc/PID/fd alone tells no device numbers.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
from collections.abc import Iterable, Iterator
from typing import NamedTuple

_HERE = -100  # AT_FDCWD
_NO_SERVER = ctypes.c_int(0x4000)  # AT_STATX_DONT_SYNC: what is known here, without asking whoever keeps the file
_TYPE = ctypes.c_uint(1)  # STATX_TYPE

# struct statx: its mode at byte 28, its inode at 32; four words from byte 128: the device that it is, the one it is on.
_ANSWER = ctypes.create_string_buffer(256)
_ANSWER_AT = ctypes.byref(_ANSWER)
_MODE = memoryview(_ANSWER).cast("B")[28:30].cast("H")
_INODE, _NUMBERS = struct.Struct("=Q"), struct.Struct("=IIII")
_CHARACTER = stat.S_IFCHR >> 12

_LIBC = ctypes.CDLL(None, use_errno=True)


class CharacterDevice(NamedTuple):
    """A device node: the number of the device that it is, and which node it is."""

    number: int
    inode: tuple[int, int]  # as inode_of() has it


def character_devices(place: int, names: Iterable[str]) -> Iterator[tuple[str, CharacterDevice | OSError]]:
    """Those of `names`, links in the open directory `place`, that lead to a device node or cannot be followed."""
    # A loop without a call of our own for each: that would cost a quarter of what the kernel takes.
    ask, directory = _LIBC.statx, ctypes.c_int(place)
    for name in names:
        if ask(directory, name.encode(), _NO_SERVER, _TYPE, _ANSWER_AT) != 0:
            yield name, _error(name)
        elif _MODE[0] >> 12 == _CHARACTER:
            yield name, _device()


def character_device(path: str) -> CharacterDevice | None:
    """The device node behind `path`; None: something else. Or OSError."""
    _ask(path)
    return _device() if _MODE[0] >> 12 == _CHARACTER else None


def inode_of(path: str) -> tuple[int, int]:
    """(device, number) of whatever is behind `path`, as os.stat has them. Or OSError."""
    _ask(path)
    return _device().inode


def _ask(path: str) -> None:
    if _LIBC.statx(_HERE, os.fsencode(path), _NO_SERVER, _TYPE, _ANSWER_AT) != 0:
        raise _error(path)


def _device() -> CharacterDevice:
    major, minor, on_major, on_minor = _NUMBERS.unpack_from(_ANSWER, 128)
    return CharacterDevice(os.makedev(major, minor), (os.makedev(on_major, on_minor), *_INODE.unpack_from(_ANSWER, 32)))


def _error(path: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), path)
