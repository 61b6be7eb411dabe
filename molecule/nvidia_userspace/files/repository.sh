#!/bin/bash
# A flat repository in /srv/repository, and an installer as NVIDIA's in /srv/repository/driver.run.
#   repository.sh RIGHT NEWER    versions of the driver's libraries
set -euo pipefail
right=$1 newer=$2
repository=/srv/repository
lib=usr/lib/x86_64-linux-gnu
mkdir -p "$repository" && cd "$repository"

package() { # name version depends [library]
    local root
    root=$(mktemp -d)
    mkdir -p "$root/DEBIAN" "$root/$lib"
    printf 'Package: %s\nVersion: %s-1\nArchitecture: amd64\nMaintainer: Lab <lab@example.org>\nDescription: double\n' "$1" "$2" > "$root/DEBIAN/control"
    [ -z "$3" ] || echo "Depends: $3" >> "$root/DEBIAN/control"
    if [ -n "${4:-}" ]; then
        cp "/$lib/$4.so.$right" "$root/$lib/$4.so.$2"
        ln -s "$4.so.$2" "$root/$lib/$4.so.1"
    fi
    dpkg-deb --build "$root" "$1_$2.deb" > /dev/null
    {
        dpkg-deb -f "$1_$2.deb"
        echo "Filename: ./$1_$2.deb"
        echo "Size: $(stat -c %s "$1_$2.deb")"
        echo "SHA256: $(sha256sum "$1_$2.deb" | cut -d' ' -f1)"
        echo
    } >> Packages.new
    rm -rf "$root"
}

rm -f Packages.new
for version in "$right" "$newer"; do
    package lab-libcuda1 "$version" "" libcuda
    package lab-libnvidia-ml1 "$version" "" libnvidia-ml
    package lab-everything "$version" nvidia-kernel-dkms
    package nvidia-kernel-dkms "$version" ""
done
mv Packages.new Packages

cat > driver.run <<RUN
#!/bin/sh
if [ "\$1" = --info ]; then
    echo "  Identification : NVIDIA Accelerated Graphics Driver for Linux-x86_64 \${FAKE_VERSION:-$right}"
    exit 0
fi
echo "\$*" >> /var/tmp/installer-called
case " \$* " in *" --no-kernel-modules "*) ;; *) exit 1 ;; esac
cp $repository/held/libcuda.so.$right /$lib/ && ln -sf libcuda.so.$right /$lib/libcuda.so.1 && ldconfig
RUN
mkdir -p held
cp "/$lib/libcuda.so.$right" held/
echo "deb [trusted=yes] file:$repository ./" > /etc/apt/sources.list.d/lab-driver.list
# apt knows this repository only, and keeps what it read of it here: nothing is fetched over and over, and no list is left behind.
install -d lists && install -d -o _apt -m 700 lists/partial
cat > /etc/apt/apt.conf.d/lab-driver <<CONF
Dir::Etc::sourcelist "/etc/apt/sources.list.d/lab-driver.list";
Dir::Etc::sourceparts "-";
Dir::State::lists "$repository/lists";
CONF
apt-get -qq update
