"""Parts of the lab's pct that no capture shows: what is generated for LXC, and what is written into a guest's files."""

import json
from pathlib import Path

import pytest

from servelab_lab.pct import arguments, guest_files
from servelab_lab.pct.backend import Device
from servelab_lab.pct.config import read
from servelab_lab.pct.edit import network_value
from servelab_lab.pct.errors import UsageError
from servelab_lab.pct.lxc_config import Host, lines

CAPTURES = {
    capture["name"]: capture
    for capture in map(
        json.loads, (Path(__file__).parent / "fixtures/pct/captures.jsonl").read_text(encoding="utf-8").splitlines()
    )
}
DEVICES = {
    "/dev/nvidia0": Device("c", 195, 0),
    "/dev/nvidia1": Device("c", 195, 1),
    "/dev/nvidia3": Device("c", 195, 3),
    "/dev/nvidiactl": Device("c", 195, 255),
    "/dev/nvidia-modeset": Device("c", 195, 254),
    "/dev/nvidia-uvm": Device("c", 511, 0),
    "/dev/nvidia-uvm-tools": Device("c", 511, 1),
    "/dev/nvidia-caps/nvidia-cap1": Device("c", 508, 1),
    "/dev/loop9": Device("b", 7, 9),
}


def parsed(text):
    complaints = []
    config = read(101, text, complaints.append)
    assert complaints == []
    return config


def generated(text, **host):
    return lines(101, parsed(text), Host(Path("/var/lib/lxc/101"), devices=DEVICES, **host))


# Of the real file, what this double writes in another way (see the docstring of lxc_config) or leaves to LXC.
OTHERWISE = (
    *("lxc.include", "lxc.seccomp", "lxc.apparmor", "lxc.mount.auto", "lxc.monitor.unshare", "lxc.rootfs.path"),
    *("lxc.net.0.script.up", "lxc.net.0.mtu", "lxc.mount.entry"),
)


def expected_lines(name):
    return {line for line in CAPTURES[name]["out"].splitlines() if not line.startswith(OTHERWISE)}


def test_the_real_lxc_configuration_of_eight_devices_is_in_ours():
    made = set(generated(CAPTURES["set_dev_ten"]["after"], controllers=frozenset({"memory", "memory.swap"})))
    expected = expected_lines("lxcconf_eight_file")
    assert len(expected) == 27
    assert expected <= made


def test_the_real_lxc_configuration_of_a_privileged_container_is_in_ours():
    text = CAPTURES["create_privileged_dev_mp"]["after"]
    made = set(lines(103, parsed(text), Host(Path("/var/lib/lxc/103"), devices=DEVICES)))
    expected = expected_lines("lxcconf_privileged")
    assert len(expected) == 9
    assert expected <= made
    assert not any(line.startswith("lxc.idmap") for line in made)
    assert "lxc.mount.entry = /srv/models models none bind,create=dir 0 0" in made


def test_no_limit_is_set_where_the_host_cannot():
    made = generated(CAPTURES["set_dev_ten"]["after"])
    assert not [line for line in made if "memory" in line or "cpu" in line]


def test_a_card_brings_the_driver_into_the_guest():
    text = "arch: amd64\nhostname: g\ndev0: /dev/nvidia0\n"
    driver = {
        "lxc.mount.entry = /proc/driver proc/driver none bind,optional 0 0",
        "lxc.mount.entry = /run/servelab-gpu run/servelab-gpu none bind,create=dir 0 0",
    }
    assert driver <= set(generated(text, driver=True))
    assert not driver & set(generated(text, driver=False))
    assert not driver & set(generated("arch: amd64\nhostname: g\ndev0: /dev/loop9\n", driver=True))


def test_a_read_only_path_with_blanks():
    made = generated("arch: amd64\nhostname: g\nmp3: /srv/my models,mp=/my models,ro=1\n")
    assert "lxc.mount.entry = /srv/my\\040models my\\040models none bind,ro,create=dir 0 0" in made


def test_raw_lines_come_last_and_in_order():
    text = "arch: amd64\nhostname: g\nlxc.cap.drop: \nlxc.mount.entry: /a b none bind 0 0\nlxc.cap.drop: mknod\n"
    assert generated(text)[-3:] == ["lxc.cap.drop = ", "lxc.mount.entry = /a b none bind 0 0", "lxc.cap.drop = mknod"]


def test_lxc_sets_up_the_network_of_a_guest_that_cannot():
    text = (
        "arch: amd64\nhostname: g\nnet0: name=eth0,bridge=vmbr0,gw=10.0.0.1,hwaddr=BC:24:11:00:00:01,ip=10.0.0.9/24\n"
    )
    address = {"lxc.net.0.ipv4.address = 10.0.0.9/24", "lxc.net.0.ipv4.gateway = 10.0.0.1"}
    assert address <= set(generated(text, guest_network=False))
    assert not address & set(generated(text, guest_network=True))


def test_network_files():
    config = parsed(
        "hostname: gpu1.lan\nnet0: name=eth0,gw=10.0.0.1,hwaddr=BC:24:11:00:00:01,ip=10.0.0.9/24,type=veth\n"
        "net1: name=eth1,bridge=vmbr0,hwaddr=BC:24:11:00:00:02,ip=dhcp,type=veth\n"
    )
    assert guest_files.interfaces(config) == (
        "auto lo\niface lo inet loopback\n\nauto eth0\niface eth0 inet static\n\taddress 10.0.0.9/24\n"
        "\tgateway 10.0.0.1\n\nauto eth1\niface eth1 inet dhcp\n"
    )
    hosts = guest_files.hosts(config, "127.0.0.1 localhost\n")
    assert hosts == "127.0.0.1 localhost\n# --- BEGIN PVE ---\n10.0.0.9 gpu1.lan gpu1\n# --- END PVE ---\n"
    assert guest_files.hosts(config, hosts + "10.0.0.7 other\n") == hosts + "10.0.0.7 other\n"


def test_the_resolver_is_the_node_s_unless_the_container_has_its_own():
    node = "# by hand\nsearch lan\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n"
    assert guest_files.resolver(parsed("arch: amd64\n"), node) == (
        "# --- BEGIN PVE ---\nsearch lan\nnameserver 10.0.0.1\nnameserver 10.0.0.2\n# --- END PVE ---\n"
    )
    own = parsed("nameserver: 9.9.9.9\nsearchdomain: a.lan b.lan\n")
    assert guest_files.resolver(own, node) == (
        "# --- BEGIN PVE ---\nsearch a.lan b.lan\nnameserver 9.9.9.9\n# --- END PVE ---\n"
    )


def test_a_link_in_the_way_is_replaced_and_never_followed(tmp_path):
    outside, rootfs = tmp_path / "outside", tmp_path / "rootfs"
    outside.write_text("untouched")
    (rootfs / "etc").mkdir(parents=True)
    (rootfs / "etc/resolv.conf").symlink_to(outside)
    owner = rootfs.stat().st_uid
    guest_files.put(rootfs, "etc/resolv.conf", "nameserver 1.1.1.1\n", owner)
    assert outside.read_text() == "untouched"
    assert (rootfs / "etc/resolv.conf").read_text() == "nameserver 1.1.1.1\n"
    assert not (rootfs / "etc/resolv.conf").is_symlink()
    (rootfs / "root").symlink_to(tmp_path)
    with pytest.raises(NotADirectoryError):
        guest_files.put(rootfs, "root/.ssh/authorized_keys", "key", owner)


def test_an_unchanged_file_is_not_written_again(tmp_path):
    guest_files.put(tmp_path, "etc/hostname", "a\n", tmp_path.stat().st_uid)
    before = (tmp_path / "etc/hostname").stat().st_ino
    guest_files.put(tmp_path, "etc/hostname", "a\n", tmp_path.stat().st_uid)
    assert (tmp_path / "etc/hostname").stat().st_ino == before


KINDS = {"memory": "string", "mp0": "string", "onboot": "boolean", "delete": "list"}


@pytest.mark.parametrize(
    ("words", "given"),
    [
        (["--memory", "512"], {"memory": "512"}),
        (["-mem=512"], {"memory": "512"}),
        (["--onboot", "--memory", "1"], {"onboot": "1", "memory": "1"}),
        (["--onboot", "off"], {"onboot": "0"}),
        (["--delete", "a", "--delete", "b"], {"delete": "a\0b"}),
        (["--memory", "1", "--memory", "2"], {"memory": "2"}),
        (["--memory", "-1"], {"memory": "-1"}),
    ],
)
def test_options_as_perl_reads_them(words, given):
    assert arguments.parse(["101", *words], KINDS) == arguments.Arguments(["101"], given)


def test_nothing_is_an_option_after_two_dashes():
    found = arguments.parse(["101", "--onboot", "--", "ls", "-l", "--memory"], KINDS)
    assert found == arguments.Arguments(["101", "ls", "-l", "--memory"], {"onboot": "1"})


@pytest.mark.parametrize("words", [["--m", "1"], ["--memory"], ["--other", "1"]])
def test_options_that_are_refused(words):
    with pytest.raises(UsageError, match="400 unable to parse option"):
        arguments.parse(words, KINDS)


def test_a_drawn_hardware_address_is_proxmox_s():
    drawn = iter([0x4C, 0x27, 0x5A])
    assert network_value("name=eth0,ip=dhcp,bridge=vmbr0", lambda: next(drawn)) == (
        "name=eth0,bridge=vmbr0,hwaddr=BC:24:11:4C:27:5A,ip=dhcp,type=veth"
    )


def test_what_the_file_says_is_what_is_written_again():
    text = CAPTURES["run_digest_good"]["after"]
    config = parsed(text)
    assert config.whole() == text
    assert config.digest != ""
    assert sorted(config.snapshots) == ["pending", "with-gpu"]
    assert config.pending_deletes == ["dev1", "mp0"]
