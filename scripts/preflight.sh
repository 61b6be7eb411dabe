#!/bin/sh
# Say in one sentence why the lab cannot run here, before anything is touched; then bring what apt must bring.
set -eu

refuse() {
    echo "servelab: $1" >&2
    exit 1
}

# --removal: what taking a lab away needs. It must work on the full disk that the lab filled.
removal=false
[ "${1:-}" != --removal ] || removal=true
needed_gib=8
packages="lxc mmdebstrap debian-archive-keyring zstd iproute2 iptables openssh-client python3-venv"

[ "$(uname -s)" = Linux ] || refuse "the lab needs Linux, and this is $(uname -s): use a Debian virtual machine."
[ ! -e /etc/pve ] || refuse "/etc/pve exists: this is a real Proxmox node, and the lab never runs on one. Use your own inventory (README, 'Your own node')."
[ "$(id -u)" -eq 0 ] || refuse "the lab starts LXC containers and needs root: run the same command with sudo, or as root."
if $removal; then exit 0; fi
free_kib=$(df -Pk /var | awk 'NR == 2 { print $4 }')
[ "$free_kib" -ge $((needed_gib * 1024 * 1024)) ] ||
    refuse "the lab needs $needed_gib GiB free in /var and $((free_kib / 1024 / 1024)) GiB are: free some or mount a larger disk there."

missing=""
for package in $packages; do
    dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q 'ok installed' || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
command -v apt-get >/dev/null || refuse "these packages are missing and there is no apt-get to bring them:$missing."
echo "servelab: installing with apt:$missing"
export DEBIAN_FRONTEND=noninteractive
apt-get -qq -o DPkg::Lock::Timeout=300 update
# shellcheck disable=SC2086  # the list is meant to be split
apt-get -qq -o DPkg::Lock::Timeout=300 install --yes --no-install-recommends $missing >/dev/null
