#!/bin/sh
# Say in one sentence why the lab cannot run here, before anything is touched; then bring what apt must bring.
#   scripts/preflight.sh             refuse where no container can be started
#   scripts/preflight.sh --why       only print why none can; nothing where they can
#   scripts/preflight.sh --or-local  say why none can, and that the demo then runs without them
#   scripts/preflight.sh --removal   what taking a lab away needs
set -eu

refuse() {
    echo "servelab: $1" >&2
    exit 1
}

# What LXC does first, each in namespaces of its own, so that nothing of it stays. Prints what is refused.
refused() {
    unshare --mount --net --pid --uts --ipc --fork true 2>/dev/null || { echo "making namespaces"; return; }
    unshare --mount sh -c 'mount -t tmpfs none /mnt' 2>/dev/null || { echo "mounting"; return; }
    # In the host's own cgroup namespace the options of this mount, none, would become those of the host's.
    unshare --mount --cgroup sh -c 'mount -t cgroup2 none /mnt' 2>/dev/null || { echo "mounting cgroup2"; return; }
    # Without ip nothing is known yet: apt brings it.
    ! command -v ip >/dev/null || unshare --net ip link add slabtry type bridge 2>/dev/null || { echo "making a bridge"; return; }
    unshare --mount sh -c 'mount -t tmpfs none /mnt && mknod /mnt/full c 1 7 && : <>/mnt/full' 2>/dev/null || echo "making device nodes"
}

missing_packages() {
    for package in $packages; do
        dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || printf ' %s' "$package"
    done
}

# Why no container can be started here, as a clause; nothing where they can be.
why_not() {
    if [ "$(id -u)" -ne 0 ]; then
        echo "starting LXC containers needs root"
    elif what=$(refused) && [ -n "$what" ]; then
        echo "this machine does not let root start containers ($what is refused)"
    elif what=$(missing_packages) && [ -n "$what" ] && ! command -v apt-get >/dev/null; then
        echo "these packages are missing and there is no apt-get to bring them:$what"
    fi
}

# --removal must work on the full disk that the lab filled.
removal=false
[ "${1:-}" != --removal ] || removal=true
needed_gib=8
packages="lxc mmdebstrap debian-archive-keyring zstd iproute2 iptables openssh-client python3-venv"

[ "$(uname -s)" = Linux ] || refuse "the lab needs Linux, and this is $(uname -s): use a Debian virtual machine."
[ ! -e /etc/pve ] || refuse "/etc/pve exists: this is a real Proxmox node, and the lab never runs on one. Use your own inventory (README, 'Your own node')."
case "${1:-}" in
    --why)
        why_not
        exit 0
        ;;
    --or-local)
        why=$(why_not)
        if [ -n "$why" ]; then
            echo "servelab: $why, so the playbooks run on this machine itself, below .lab/local, and what needs a node is skipped by name."
            exit 0
        fi
        ;;
esac
[ "$(id -u)" -eq 0 ] || refuse "the lab starts LXC containers and needs root: run the same command with sudo, or as root."
if $removal; then exit 0; fi
what=$(refused)
[ -z "$what" ] || refuse "this machine does not let root start containers ($what is refused): make demo runs without them, the lab cannot."
free_kib=$(df -Pk /var | awk 'NR == 2 { print $4 }')
[ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] ||
    refuse "the lab needs $needed_gib GiB free in /var and $((free_kib / 1024 / 1024)) GiB are: free some or mount a larger disk there."

missing=$(missing_packages)
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || refuse "these packages are missing and there is no apt-get to bring them:$missing."
echo "servelab: installing with apt:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 update
# shellcheck disable=SC2086  # the list is meant to be split
apt-get -qq -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends $missing >/dev/null
