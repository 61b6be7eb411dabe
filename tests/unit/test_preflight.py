"""scripts/preflight.sh: one sentence where the lab cannot run, and nothing is touched before that is known."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

PREFLIGHT = Path(__file__).resolve().parents[2] / "scripts/preflight.sh"


@pytest.fixture
def machine(tmp_path):
    """A machine of stubs where all is well: root, 100 GiB free, every package there. Returns (run, stub, log)."""
    bin_dir, log = tmp_path / "bin", tmp_path / "log"
    bin_dir.mkdir()

    def stub(name: str, body: str) -> None:
        path = bin_dir / name
        path.write_text(f'#!/bin/sh\necho "{name} $*" >>{log}\n{body}\n')
        path.chmod(0o755)

    stub("uname", "echo Linux")
    stub("id", "echo 0")
    stub("df", 'printf "Filesystem 1024-blocks Used Available Capacity Mounted\\nx 1 1 104857600 1%% /var\\n"')
    stub("dpkg-query", "printf 'install ok installed'")
    stub("apt-get", "true")
    stub("unshare", "true")

    def run(*words: str) -> tuple[int, str]:
        environment = {**os.environ, "PATH": f"{bin_dir}:{os.environ['PATH']}"}
        done = subprocess.run(["sh", PREFLIGHT, *words], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout + done.stderr

    return run, stub, log


needs_no_proxmox = pytest.mark.skipif(Path("/etc/pve").exists(), reason="this is a Proxmox node")


@needs_no_proxmox
def test_a_machine_with_everything_is_left_alone(machine):
    run, _, log = machine
    assert run() == (0, "")
    assert "apt-get" not in log.read_text()


@needs_no_proxmox
def test_the_hosts_cgroups_are_tried_in_a_namespace_of_their_own(machine):
    """A mount of cgroup2 in the host's namespace sets the options of the host's: nsdelegate would be gone."""
    run, _, log = machine
    run("--why")
    tried = [line for line in log.read_text().splitlines() if "cgroup2" in line]
    assert tried and all("--cgroup" in line.partition(" sh ")[0].split() for line in tried)


def cgroup2_options() -> set[str]:
    lines = (line.split() for line in Path("/proc/self/mounts").read_text().splitlines())
    return {option for line in lines if line[2] == "cgroup2" for option in line[3].split(",")}


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.skipif(not {"nsdelegate", "memory_recursiveprot"} & cgroup2_options(), reason="no such option is set here")
def test_the_hosts_cgroups_keep_their_options():
    before = cgroup2_options()
    subprocess.run(["sh", PREFLIGHT, "--why"], check=True, capture_output=True)
    assert cgroup2_options() == before


@needs_no_proxmox
@pytest.mark.parametrize(
    ("name", "body", "sentence"),
    [
        ("uname", "echo Darwin", "servelab: the lab needs Linux, and this is Darwin: use a Debian virtual machine."),
        (
            "id",
            "echo 1000",
            "servelab: the lab starts LXC containers and needs root: run the same command with sudo, or as root.",
        ),
        (
            "df",
            'printf "head\\nx 1 1 3145728 1%% /var\\n"',
            "servelab: the lab needs 8 GiB free in /var and 3 GiB are: free some or mount a larger disk there.",
        ),
    ],
)
def test_what_is_missing_is_one_sentence_and_nothing_is_installed(machine, name, body, sentence):
    run, stub, log = machine
    stub(name, body)
    assert run() == (1, sentence + "\n")
    assert "apt-get" not in log.read_text()


@needs_no_proxmox
@pytest.mark.parametrize(
    ("name", "body", "why"),
    [
        ("id", "echo 1000", "starting LXC containers needs root"),
        (
            "unshare",
            'case "$*" in *fork*) exit 1 ;; esac',
            "this machine does not let root start containers (making namespaces is refused)",
        ),
        (
            "unshare",
            'case "$*" in *cgroup2*) exit 1 ;; esac',
            "this machine does not let root start containers (mounting cgroup2 is refused)",
        ),
        (
            "unshare",
            'case "$*" in *mknod*) exit 1 ;; esac',
            "this machine does not let root start containers (making device nodes is refused)",
        ),
    ],
)
def test_where_no_container_can_be_started_the_demo_says_so_and_runs_without(machine, name, body, why):
    run, stub, log = machine
    stub(name, body)
    assert run("--why") == (0, why + "\n")
    assert run("--or-local") == (
        0,
        f"servelab: {why}, so the playbooks run on this machine itself, below .lab/local, and what needs a node is "
        "skipped by name.\n",
    )
    assert "apt-get" not in log.read_text()
    assert run()[0] == 1, "a lab is refused"


@needs_no_proxmox
def test_where_containers_can_be_started_nothing_is_said(machine):
    run, _, _ = machine
    assert run("--why") == (0, "")
    assert run("--or-local") == (0, "")


@needs_no_proxmox
def test_missing_packages_are_installed_by_name(machine):
    run, stub, log = machine
    stub("dpkg-query", 'case "$*" in *lxc|*zstd) exit 1 ;; *) printf "install ok installed" ;; esac')
    assert run() == (0, "servelab: installing with apt: lxc zstd\n")
    (install,) = [line for line in log.read_text().splitlines() if "install --yes" in line]
    assert install.endswith("--no-install-recommends lxc zstd")


@pytest.mark.skipif(os.geteuid() != 0, reason="an /etc with another content needs root")
def test_a_real_proxmox_node_is_refused(machine, tmp_path):
    _, _, log = machine
    unshare = str(shutil.which("unshare"))
    over = tmp_path / "over"
    over.mkdir()
    # An /etc of its own, in a mount namespace of its own.
    etc = f"mount -t tmpfs tmpfs {over} && mkdir -p {over}/upper/pve {over}/work && "
    etc += f"mount -t overlay overlay -o lowerdir=/etc,upperdir={over}/upper,workdir={over}/work /etc"
    path = f"{tmp_path / 'bin'}:{os.environ['PATH']}"
    done = subprocess.run(
        [unshare, "--mount", "sh", "-c", f"{etc} && exec sh {PREFLIGHT}"],
        env={**os.environ, "PATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    if "mount" in done.stderr:
        pytest.skip(f"no overlay here: {done.stderr.strip()}")
    assert done.returncode == 1
    assert done.stderr.startswith("servelab: /etc/pve exists: this is a real Proxmox node")
    assert "apt-get" not in log.read_text()


@needs_no_proxmox
def test_a_lab_can_be_removed_from_a_full_disk_without_installing_anything(machine):
    run, stub, log = machine
    stub("df", 'printf "head\\nx 1 1 0 100%% /var\\n"')
    stub("dpkg-query", "exit 1")
    assert run("--removal") == (0, "")
    assert "apt-get" not in log.read_text()
