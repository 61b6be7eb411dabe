"""What is behind a descriptor: device nodes by their numbers, and no waiting for whoever keeps a file."""

from __future__ import annotations

import ctypes
import os
import signal
import stat
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from servelab.shared import gpu_holders, gpu_leftovers
from servelab.shared.open_files import character_device, character_devices, inode_of


def test_a_device_node_is_told_by_its_number_and_its_inode(tmp_path):
    node = tmp_path / "nvidia5"
    try:
        os.mknod(node, stat.S_IFCHR | 0o666, os.makedev(195, 5))
        os.mknod(tmp_path / "far", stat.S_IFCHR, os.makedev(511, 300))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    seen = node.stat()
    assert character_device(str(node)) == (os.makedev(195, 5), (seen.st_dev, seen.st_ino))
    assert character_device(str(tmp_path / "far")).number == os.makedev(511, 300)  # a minor that needs both its halves


def test_what_is_no_device_node_is_none(tmp_path):
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    try:
        os.mknod(tmp_path / "disk", stat.S_IFBLK, os.makedev(195, 0))
    except PermissionError:
        pytest.skip("device nodes cannot be made here")
    assert [character_device(str(path)) for path in (*tmp_path.iterdir(), tmp_path)] == [None] * 4


def test_an_inode_is_that_of_os_stat(tmp_path):
    for path in (tmp_path, Path("/dev/null"), Path("/proc/self/status")):
        seen = path.stat()
        assert inode_of(str(path)) == (seen.st_dev, seen.st_ino)


def test_what_is_gone_is_an_error_with_its_name(tmp_path):
    with pytest.raises(FileNotFoundError, match="gone"):
        character_device(str(tmp_path / "gone"))
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(OSError, match=r"symbolic links.*loop"):
        character_device(str(tmp_path / "loop"))


def test_of_many_descriptors_the_devices_are_told_and_those_that_cannot_be_followed():
    reading, writing = os.pipe()
    with Path("/dev/zero").open("rb") as device:
        place = os.open("/proc/self/fd", os.O_RDONLY | os.O_DIRECTORY)
        asked = [str(reading), str(device.fileno()), "4000000", str(writing)]
        try:
            zero, gone = character_devices(place, asked)
        finally:
            for number in (place, reading, writing):
                os.close(number)
    assert zero[0] == asked[1] and zero[1].number == os.makedev(1, 5)
    assert gone[0] == "4000000" and isinstance(gone[1], FileNotFoundError)


class DeadServer:
    """A FUSE file system with one file, whose server answers until the file is open, and then never again."""

    ROOT, FILE, DONE = 1, 2, 0
    LOOKUP, GETATTR, OPEN, INIT = 1, 3, 14, 26

    def __init__(self, place: Path) -> None:
        self.channel = os.open("/dev/fuse", os.O_RDWR)
        options = f"fd={self.channel},rootmode=40000,user_id=0,group_id=0,allow_other".encode()
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.mount(b"servelab-test", os.fsencode(place), b"fuse", 0, options) != 0:
            os.close(self.channel)
            raise OSError(ctypes.get_errno(), "mount")
        threading.Thread(target=self.serve, daemon=True).start()

    def attributes(self, inode: int) -> bytes:
        mode, links = (stat.S_IFDIR | 0o755, 2) if inode == self.ROOT else (stat.S_IFREG | 0o644, 1)
        return struct.pack("<QQQQQQIIIIIIIIII", inode, *(0,) * 5, *(0,) * 3, mode, links, 0, 0, 0, 4096, 0)

    def serve(self) -> None:
        opened = False
        while not opened:
            request = os.read(self.channel, 1 << 17)
            _, operation, unique, inode = struct.unpack_from("<IIQQ", request)
            # Nothing may be kept: every question about the file comes here.
            if operation == self.INIT:
                said = struct.pack("<IIIIHHIIHHI28x", 7, 31, 0, 0, 0, 0, 4096, 1, 0, 0, 0)
            elif operation == self.LOOKUP:
                said = struct.pack("<QQQQII", self.FILE, 0, 0, 0, 0, 0) + self.attributes(self.FILE)
            elif operation == self.GETATTR:
                said = struct.pack("<QII", 0, 0, 0) + self.attributes(inode)
            elif operation == self.OPEN:
                said, opened = struct.pack("<QII", 0, 0, 0), True
            else:
                os.write(self.channel, struct.pack("<IiQ", 16, -38, unique))
                continue
            os.write(self.channel, struct.pack("<IiQ", 16 + len(said), 0, unique) + said)


@pytest.fixture
def waiting_file(tmp_path: Path) -> Iterator[str]:
    """/proc/PID/fd/N of a process that has a file of a file system open, whose server is gone.

    Its own process, which starts no other: also to close the file means to wait.
    """
    place = tmp_path / "mounted"
    place.mkdir()
    try:
        server = DeadServer(place)
    except OSError as error:
        pytest.skip(f"no FUSE file system can be had here: {error}")
    program = "import os, sys, time; print(os.open(sys.argv[1], os.O_RDONLY), flush=True); time.sleep(60)"
    command = [sys.executable, "-c", program, str(place / "weights")]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"/proc/{process.pid}/fd/{process.stdout.readline().strip()}"
        subprocess.run(["umount", "--lazy", str(place)], check=True)
        os.close(server.channel)  # ends whatever still waits for an answer
        process.kill()


def in_time(look: Callable[[], bool], seconds: float = 20) -> bool:
    """What `look` says, in a process of its own; False when it does not come back."""
    looking = os.fork()
    if looking == 0:
        os._exit(0 if look() else 1)
    deadline = time.monotonic() + seconds
    while (ended := os.waitpid(looking, os.WNOHANG)) == (0, 0):
        if time.monotonic() > deadline:
            os.kill(looking, signal.SIGKILL)
            ended = os.waitpid(looking, 0)
            break
        time.sleep(0.05)
    return ended[1] == 0


def test_nobody_waits_for_a_file_server_that_is_gone(gpu_dir, hold, waiting_file):
    holder = hold(0)
    waiting = waiting_file.split("/")[2]
    shm, proc = gpu_dir.parent / "shm", gpu_dir.parent / "proc"
    for made in (shm, proc):
        made.mkdir()
    (shm / "nccl-AbCdEf").touch()
    (proc / waiting).symlink_to(f"/proc/{waiting}")

    def holders() -> bool:
        seen = gpu_holders.scan(str(gpu_dir))
        unseen = {str(one["pid"]) for one in seen["unreadable"]}
        return [one["pid"] for one in seen["holders"]] == [holder.pid] and waiting not in unseen

    def leftovers() -> bool:
        (left,) = gpu_leftovers.find(str(shm), str(shm / "nowhere"), (), str(proc), min_age=0)
        return left.path == str(shm / "nccl-AbCdEf") and left.kept is None

    asking = subprocess.Popen(["stat", "--dereference", waiting_file])
    assert in_time(holders)
    assert in_time(leftovers)
    assert asking.poll() is None  # still: this is what both would have waited for
    asking.kill()
    asking.wait()
