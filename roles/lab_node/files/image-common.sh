update-ca-certificates
rm -f /etc/ssh/ssh_host_*
# Empty, not absent: every machine made from the image gets its own, and its first boot asks no questions.
: > /etc/machine-id
# Nobody looks after these machines for months, and their timers would load the host in the middle of a measurement.
systemctl disable apt-daily.timer apt-daily-upgrade.timer dpkg-db-backup.timer e2scrub_all.timer fstrim.timer 2>/dev/null || true
rm -rf /var/lib/apt/lists/* /var/cache/apt/*.bin
