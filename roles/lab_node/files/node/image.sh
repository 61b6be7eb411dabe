# The ids that unprivileged guests are mapped to.
echo root:100000:65536 > /etc/subuid
echo root:100000:65536 > /etc/subgid
# Where Proxmox keeps templates and hook scripts.
install -d /var/lib/vz/template/cache /var/lib/vz/snippets
# Guests hang on vmbr0, which is there without LXC's own network; and the host's kernel is not the node's to change.
systemctl mask lxc-net.service lxc.service systemd-modules-load.service systemd-sysctl.service \
  systemd-binfmt.service sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount dev-hugepages.mount
