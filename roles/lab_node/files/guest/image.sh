# Stand-ins for the driver's libraries, as an installed user-space driver of this version would lay them out.
version=580.95.05
libraries=/usr/lib/x86_64-linux-gnu
for name in libcuda libnvidia-ml; do
  gcc -shared -fPIC -O1 -Wl,-soname,$name.so.1 -DSERVELAB_VERSION="\"$version\"" \
    -o $libraries/$name.so.$version /usr/local/src/servelab-lab/driver-double.c
  ln -s $name.so.$version $libraries/$name.so.1
done
ln -s libcuda.so.1 $libraries/libcuda.so
ldconfig
# Unprivileged, it can neither mount these nor load modules; a unit that always fails hides one that failed for a reason.
systemctl mask sys-kernel-debug.mount sys-kernel-tracing.mount sys-kernel-config.mount systemd-modules-load.service
