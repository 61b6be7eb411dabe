"""The lab's pct says and writes what the real one said and wrote: 329 calls of pve-container 6.1, replayed.

Every call starts from the configuration file it started from, on a fake machine with the same devices, and is compared
in output, error output and resulting file. Exit statuses are compared as zero or not: the real ones leak errno. Those
of `exec` are compared exactly.
"""

import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

from servelab_lab.pct import cli, life
from servelab_lab.pct.backend import Device, Unpacked
from servelab_lab.pct.errors import PctError
from servelab_lab.pct.node import Node

FIXTURES = Path(__file__).parent / "fixtures/pct"
CAPTURES = {
    capture["name"]: capture for capture in map(json.loads, (FIXTURES / "captures.jsonl").read_text().splitlines())
}

NOT_PCT = "not a call of pct"
IN_GUEST = "shows the inside of a guest; checked on a real one in the lab's molecule scenario"
OUT_OF_SCOPE = {
    **dict.fromkeys(["noop_mtime_before", "noop_mtime_after", "noop_mtime_after_fail"], NOT_PCT),
    **dict.fromkeys(["start_dup_path_stderr", "lxcconf_eight_file", "lxcconf_privileged"], NOT_PCT),
    **dict.fromkeys(["exec_103_ls", "run_ls_hotplugged", "push_ls", "start_eight_lsdev"], IN_GUEST),
    **dict.fromkeys(["start_eight_mounts", "start_eight_write_denied", "exec_env", "exec_keepenv0"], IN_GUEST),
    "exec_missing_cmd": "the text is that of the installed lxc-attach",
    "nonroot": "the answer of a cluster service that the lab has not; main() repeats it",
    "status_running_v": "measured values of one moment",
    "template_103": "templates are not part of the double",
    "perm_nopriv": "the double knows no roles, only root@pam and others",
}

DEVICES = {
    **{f"/dev/nvidia{i}": Device("c", 195, i) for i in range(4)},
    "/dev/nvidiactl": Device("c", 195, 255),
    "/dev/nvidia-modeset": Device("c", 195, 254),
    "/dev/nvidia-uvm": Device("c", 511, 0),
    "/dev/nvidia-uvm-tools": Device("c", 511, 1),
    "/dev/nvidia-caps/nvidia-cap1": Device("c", 508, 1),
    "/dev/dri/renderD128": Device("c", 226, 128),
    "/dev/loop9": Device("b", 7, 9),
    "/dev//nvidia0": Device("c", 195, 0),
}
# Calls made while a node of the configuration was gone.
WITHOUT_MODESET = {"set_other_with_missing_dev", "del_missing_dev", "start_missing_dev"}
STORAGE = "dir: local\n\tpath /var/lib/vz\n\nbtrfs: btr\n\tpath /btr\n"

RUNNING = {name for name in CAPTURES if name.startswith("run_")} | {
    *("destroy_running", "exec_nocmd", "exec_nodashes", "exec_ok", "exec_signal", "exec_stdin_tty", "exec_true"),
    *("list_running", "pull_missing", "pull_ok", "reboot_running", "rollback_running", "snapshot_running"),
    *("snap_102_pending", "start_running", "status_after_reboot", "status_running", "stop_103", "stop_eight"),
    *("stop_running",),
    *(name for name in CAPTURES if name.startswith("push_") and name not in {"push_stopped", "push_nonexistent"}),
}

# Captures without a file of their own: the configurations on the node were these, by container, from other captures.
PLAIN = ("create_ok", "after")
LOCKED = ("del_lock_via_set", "before")
EMPTY_102 = "arch: amd64\nhostname: CT102\nmemory: 512\nostype: debian\nrootfs: btr:102/vm-102-disk-0.raw,size=1G\n"
EMPTY_102 += "swap: 512\nunprivileged: 1\n"
PRIVILEGED_103 = ("create_privileged_dev_mp", "after")
FOUR = {101: PLAIN, 102: EMPTY_102, 103: PRIVILEGED_103, 104: ("create_storage_only", "after")}
STATES = {
    name: state
    for names, state in [
        ("config_current config_snapshot config_snapshot_missing config_current_snap", {101: ("rollback", "before")}),
        ("delsnapshot_missing listsnapshot_two", {101: ("rollback", "before")}),
        ("config_desc_special", {101: ("set_desc_one", "before")}),
        ("config_eight", {101: ("set_dev_ten", "after")}),
        ("config_lxc_lines pending_lxc_lines", {101: ("del_lxc_line", "before")}),
        ("config_many config_many_current pending_many", {101: ("run_digest_good", "before")}),
        (
            "config_pending_change config_pending_change_current pending_change",
            {101: ("run_set_dev2_back", "before")},
        ),
        ("config_pending_del config_pending_del_current pending_del", {101: ("run_del_dev2", "after")}),
        ("create_min_defaults_config start_102 destroy_protected unprotect", {102: EMPTY_102}),
        ("feat_empty_config", {101: ("set_feat_empty", "after")}),
        ("file_crlf_config", {101: CAPTURES["file_crlf_set"]["before"].replace("\n", "\r\n")}),
        ("file_odd_config", {101: ("file_odd_set", "before")}),
        ("file_empty_config file_empty_set", {105: ""}),
        ("file_pending_stopped_pending", {101: ("file_pending_stopped_set", "before")}),
        ("listsnap_102", {102: ("rollback_running", "before")}),
        ("pending_after_del2", {101: CAPTURES["rollback"]["before"].replace("cores: 4\n", "")}),
        ("pending_after_reboot", {101: ("reboot_running", "after")}),
        ("pending_after_revert snapshot_conf_pending", {101: ("delsnap_live", "before")}),
        ("pending_after_start", {101: ("start_apply", "before")}),
        ("pending_template_none start_103_priv stop_103 snapshot_bindmount", {103: PRIVILEGED_103}),
        ("config_locked destroy_locked list_locked snapshot_locked start_locked stop_locked", {101: LOCKED}),
        ("list_empty", {}),
        ("list_many list_mixed", FOUR),
        ("list_running", {101: ("snapshot_1", "before")}),
        ("start_eight start_missing_dev stop_eight", {101: ("set_dev_eight", "after")}),
        ("snapshot_pending", {101: ("snapshot_dup", "before")}),
        ("set_102_dev", {102: ("snap_102", "after")}),
        ("perm_feat_privileged perm_feat_privileged_token", {101: "arch: amd64\nhostname: a\n"}),
        ("create_bad_hostname create_bad_vmid create_dashdash_unknown create_missing_args create_nonnumeric", {}),
        ("create_storage_missing create_template_missing_prefix create_vm_exists", {}),
    ]
    for name in names.split()
}
# "Already exists" without a container of that number: a virtual machine.
VIRTUAL_MACHINES = {"create_vm_exists": 104, "config_is_vm": 104}
RUNNING_VMIDS = {"list_mixed": {103}, "list_running": {101}}
AFTER = {"set_102_dev": ("rollback_102", "before")}
# A network set without hwaddr gets a random one.
MAC_IS_DRAWN = {"create_ok", "set_net1_nobridge", "set_net1_type"}
# Of the README: these lines are the capturing machine's, not pct's.
ARTEFACT = "failed to connect to monitor socket: Connection refused\n"


def text_of(source):
    return source if isinstance(source, str) else CAPTURES[source[0]][source[1]]


class FakeMachine:
    """A machine without LXC that has the captures' devices, bridge and directory."""

    def __init__(self, running, devices, guest):
        self.running, self.devices, self.guest = set(running), devices, guest
        self.say = None
        self.done = []

    def device(self, path):
        if path == "/dev/dri":
            raise PctError(f"{path} is not a device")
        return self.devices.get(path)

    def has_bridge(self, name):
        return name == "vmbr0"

    def has_directory(self, path):
        return path == "/srv/models"

    def init_pid(self, vmid):
        return 4711 if vmid in self.running else None

    def unpack(self, vmid, archive, unprivileged):
        return Unpacked("debian", 252, "Total bytes read: 245749760 (235MiB, 429MiB/s)\n")

    def allocate(self, vmid, volume, unprivileged):
        self.done.append(("allocate", volume))

    def prepare(self, vmid, config):
        self.done.append(("prepare", vmid))

    def set_up_access(self, vmid, password, keys):
        pass

    def start(self, vmid, config):
        self.running.add(vmid)

    def stop(self, vmid):
        self.running.discard(vmid)

    def shut_down(self, vmid, timeout):
        self.running.discard(vmid)
        return True

    def remove(self, vmid):
        self.done.append(("remove", vmid))

    def attach(self, vmid, command, keep_environment):
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
        self.say(done.stdout)
        self.warn(done.stderr)
        return done.returncode if done.returncode >= 0 else 128 - done.returncode

    def add_device(self, vmid, config, properties):
        path = properties["path"]
        if any(value.split(",")[0] == path for key, value in config.settings.items() if key.startswith("dev")):
            raise PctError(f"failed to mknod /var/lib/lxc/{vmid}/passthrough{path}: File exists")

    def add_mount(self, vmid, config, properties):
        self.done.append(("mount", properties["mp"]))

    def guest_root(self, vmid):
        return self.guest, None


class Replay:
    """One machine with the files of a capture."""

    def __init__(self, root, name, monkeypatch):
        self.name, self.capture, self.root = name, CAPTURES[name], root
        monkeypatch.setenv("TZ", "UTC")
        self.words = shlex_of(self.capture["cmd"])
        self.configs = root / "etc/pve/lxc"
        self.configs.mkdir(parents=True)
        (root / "etc/pve/storage.cfg").write_text(STORAGE)
        cache = root / "var/lib/vz/template/cache"
        cache.mkdir(parents=True)
        (cache / "debian-12-standard_12.7-1_amd64.tar.zst").touch()
        states = STATES.get(name, {101: PLAIN})
        if self.capture.get("before"):
            states = {self.vmid: self.capture["before"]}
        elif "before" in self.capture:
            states = {}
        for vmid, source in states.items():
            (self.configs / f"{vmid}.conf").write_bytes(text_of(source).encode())
        if name in VIRTUAL_MACHINES:
            (root / "etc/pve/qemu-server").mkdir()
            (root / f"etc/pve/qemu-server/{VIRTUAL_MACHINES[name]}.conf").touch()
        running = RUNNING_VMIDS.get(name, {self.vmid} if name in RUNNING else set())
        devices = dict(DEVICES)
        if name in WITHOUT_MODESET:
            del devices["/dev/nvidia-modeset"]
        guest = root / "guest"
        self.machine = FakeMachine(running, devices, guest)
        self.out, self.err = "", ""
        snaptimes = re.findall(r"snaptime: (\d+)", self.capture.get("after") or "")
        now = max(map(int, snaptimes), default=0)
        self.node = Node(self.machine, root, "pve1", say=self.say, warn=self.warn, now=lambda: now, lock_timeout=0.2)
        self.machine.say, self.machine.warn = self.say, self.warn

    @property
    def vmid(self):
        return next((int(word) for word in self.words if word.isdigit()), 0)

    def say(self, text):
        self.out += text

    def warn(self, text):
        self.err += text

    def run(self):
        return cli.run(self.node, self.words[1:])

    def after(self, vmid=None):
        path = self.configs / f"{vmid or self.vmid}.conf"
        return path.read_text() if path.exists() else ""


def shlex_of(command):
    """The words as they were given: captures quote them as bash does."""
    words = subprocess.run(
        ["bash", "-c", f"for word in {command.rstrip()}; do printf '%s\\0' \"$word\"; done"],
        capture_output=True,
        check=True,
    ).stdout.decode()
    return words.split("\0")[:-1]


def normal(text):
    """Without what is random or measured."""
    text = re.sub(r"Filesystem UUID: \S+", "Filesystem UUID: U", text.replace(ARTEFACT, ""))
    return re.sub(r"Total bytes read: .*", "Total bytes read: N", text)


def without_macs(text):
    return re.sub(r"BC:24:11(:[0-9A-F]{2}){3}", "MAC", text)


def assert_same(actual, expected):
    """Equal, or equal up to where the capture was cut."""
    head, cut, _ = expected.partition("[usage text cut]")
    if cut:
        assert actual.startswith(head.rstrip("\n"))
    else:
        assert actual == expected


NEEDS_OTHER_CALL = {"destroy_protected", "set_lock_timeout"}
PERMISSIONS = {name for name in CAPTURES if name.startswith("perm_")} - OUT_OF_SCOPE.keys()
TRANSFERS = {name for name in CAPTURES if name.startswith(("push_", "pull_"))} - OUT_OF_SCOPE.keys()
REPLAYED = sorted(CAPTURES.keys() - OUT_OF_SCOPE.keys() - NEEDS_OTHER_CALL - PERMISSIONS - TRANSFERS)


def test_every_capture_is_accounted_for():
    assert len(CAPTURES) == 329
    assert OUT_OF_SCOPE.keys() <= CAPTURES.keys()
    assert len(OUT_OF_SCOPE) == 19


@pytest.mark.parametrize("name", REPLAYED)
def test_replay(name, tmp_path, monkeypatch):
    replay = Replay(tmp_path, name, monkeypatch)
    capture = replay.capture
    if replay.words[0] == "env":
        replay.words = replay.words[2:]
    rc = replay.run()
    assert_same(normal(replay.err), capture["err"])
    assert_same(normal(replay.out), normal(capture["out"]))
    assert (rc == 0) == (capture["rc"] == 0)
    if name.startswith("exec_") and rc not in {0, 255}:
        assert rc == capture["rc"]
    if "after" in capture:
        after, expected = replay.after(), capture["after"] or ""
        if name in MAC_IS_DRAWN:
            after, expected = without_macs(after), without_macs(expected)
        assert after == expected
    if name in AFTER:
        assert replay.after() == text_of(AFTER[name])


def test_protection_keeps_a_container(tmp_path, monkeypatch):
    replay = Replay(tmp_path, "destroy_protected", monkeypatch)
    first, second = (shlex.split(part) for part in replay.words[2].split("&&"))
    assert cli.run(replay.node, first[1:]) == 0
    assert cli.run(replay.node, second[1:]) != 0
    assert replay.err == replay.capture["err"]
    assert replay.after(102)


def test_lock_timeout(tmp_path, monkeypatch):
    replay = Replay(tmp_path, "set_lock_timeout", monkeypatch)
    other = Node(replay.machine, tmp_path)
    with other.locked(101):
        assert replay.run() != 0
    assert replay.err == replay.capture["err"]
    assert replay.after() == replay.capture["after"]


@pytest.mark.parametrize("name", sorted(PERMISSIONS))
def test_permission(name, tmp_path, monkeypatch):
    """The captures drove the API as another user; here the same user calls pct."""
    replay = Replay(tmp_path, name, monkeypatch)
    _, _, user, vmid, option, value = replay.words
    replay.node.user = user
    rc = cli.run(replay.node, ["set", vmid, f"--{option}", value])
    refusal = re.search(r"(?:STR|ERR)=(.*)", replay.capture["out"])
    assert replay.err == (f"{refusal[1]}\n" if refusal else "")
    assert (rc == 0) == (refusal is None)


@pytest.fixture
def guest(tmp_path):
    """A guest's files: what the captures' guest had at that time."""
    root = tmp_path / "guest"
    (root / "root/x").mkdir(parents=True)
    (root / "etc").mkdir()
    (root / "etc/passwd").write_text("root:x:0:0:root:/root:/bin/bash\n")
    (root / "etc/group").write_text("root:x:0:\ntty:x:5:\n")
    (root / "root/g.txt").write_text("hello\n")
    if os.geteuid() != 0:
        pytest.skip("entering the guest's root needs root")
    return root


@pytest.mark.parametrize("name", sorted(TRANSFERS))
def test_transfer(name, tmp_path, monkeypatch, guest, capfd):
    replay = Replay(tmp_path, name, monkeypatch)
    outside = tmp_path / "node"
    outside.mkdir()
    for file in ("f.txt", "x", "hostname"):
        (outside / file).write_text("hello\n")
    # The captures' files of the node were in /root and /etc.
    *head, first, second = replay.words[:5]
    if replay.words[1] == "push":
        moved = [*head, str(outside / Path(first).name) if "nofile" not in first else first, second]
    else:
        moved = [*head, first, str(outside / Path(second).name)]
    replay.words[:5] = moved
    rc = replay.run()
    assert (rc == 0) == (replay.capture["rc"] == 0)
    assert replay.err + capfd.readouterr().err == replay.capture["err"]


@pytest.mark.parametrize(
    ("name", "path", "mode", "owner"),
    [
        ("push_default", "root/f.txt", 0o644, (0, 0)),
        ("push_perms", "root/g.txt", 0o755, (1000, 100)),
        ("push_perms3", "root/h.txt", 0o640, (0, 5)),
        ("push_relative", "rel.txt", 0o644, (0, 0)),
    ],
)
def test_pushed_file(name, path, mode, owner, tmp_path, monkeypatch, guest):
    """As `ls -ln` showed them in the capture push_ls."""
    replay = Replay(tmp_path, name, monkeypatch)
    (tmp_path / "f.txt").write_text("pushed")
    replay.words[3] = str(tmp_path / "f.txt")
    assert replay.run() == 0
    status = (guest / path).stat()
    assert ((guest / path).read_text(), status.st_mode & 0o7777) == ("pushed", mode)
    assert (status.st_uid, status.st_gid) == owner


def test_a_link_in_the_guest_does_not_lead_out_of_it(tmp_path, monkeypatch, guest):
    (guest / "root/link").symlink_to("/escaped")
    replay = Replay(tmp_path, "push_default", monkeypatch)
    (tmp_path / "f.txt").write_text("pushed")
    replay.words[3:5] = [str(tmp_path / "f.txt"), "/root/link"]
    assert replay.run() == 0
    assert (guest / "escaped").read_text() == "pushed"
    assert not Path("/escaped").exists()


def test_pulled_file(tmp_path, monkeypatch, guest):
    replay = Replay(tmp_path, "pull_ok", monkeypatch)
    replay.words[4] = str(tmp_path / "pulled")
    replay.words += ["--perms", "0600"]
    assert replay.run() == 0
    assert (tmp_path / "pulled").read_text() == "hello\n"
    assert (tmp_path / "pulled").stat().st_mode & 0o7777 == 0o600


def test_a_large_file_comes_whole(tmp_path, monkeypatch, guest):
    (guest / "root/g.txt").write_bytes(b"x" * 3_000_000)
    replay = Replay(tmp_path, "pull_ok", monkeypatch)
    replay.words[4] = str(tmp_path / "pulled")
    assert replay.run() == 0
    assert (tmp_path / "pulled").stat().st_size == 3_000_000


def test_at_boot_containers_start_in_their_order_and_one_failure_holds_up_no_other(tmp_path, monkeypatch):
    replay = Replay(tmp_path, "list_empty", monkeypatch)
    for vmid, settings in {
        101: "onboot: 1\nstartup: order=2",
        102: "onboot: 1",
        103: "onboot: 0",
        104: "onboot: 1\nstartup: 1,up=5",
        105: "onboot: 1\nlock: backup\nstartup: order=1",
    }.items():
        (replay.configs / f"{vmid}.conf").write_text(f"arch: amd64\n{settings}\n")
    assert not life.start_all(replay.node)
    assert replay.machine.done == [("prepare", 104), ("prepare", 101), ("prepare", 102)]
    assert replay.err == "CT 105: CT is locked (backup)\n"
    assert replay.machine.running == {101, 102, 104}
