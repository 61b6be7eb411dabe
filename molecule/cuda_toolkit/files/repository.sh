#!/bin/sh
# A signed Debian repository that looks like NVIDIA's, for the method apt: its packages carry names, and one of them a link to the
# toolchain that the wheels brought. `cuda-toolkit-13-0` pulls a driver, as a metapackage does.
#   repository.sh DIRECTORY TOOLKIT
set -eu
mkdir -p "$1"
cd "$1"
package() { # name depends [toolkit]
    rm -rf build
    mkdir -p build/DEBIAN
    printf 'Package: %s\nVersion: 13.0.88-1\nArchitecture: amd64\nMaintainer: Servelab <none@example.org>\nDepends: %s\nDescription: a stand-in\n' \
        "$1" "$2" | sed '/^Depends: $/d' >build/DEBIAN/control
    if [ -n "${3:-}" ]; then
        mkdir -p build/usr/local
        ln -s "$3" build/usr/local/cuda-13.0
    fi
    dpkg-deb --root-owner-group --build build "$1.deb" >/dev/null
}
package cuda-nvcc-13-0 cuda-crt-13-0 "$2"
package cuda-crt-13-0 ""
package cuda-cccl-13-0 ""
package cuda-cudart-dev-13-0 ""
package cuda-driver-dev-13-0 ""
package cuda-nvrtc-dev-13-0 ""
package libcublas-dev-13-0 ""
package nvidia-open ""
package cuda-toolkit-13-0 "cuda-nvcc-13-0, nvidia-open"
rm -rf build
: >Packages
for deb in *.deb; do
    dpkg-deb -f "$deb" >>Packages
    printf 'Filename: ./%s\nSize: %s\nSHA256: %s\n\n' "$deb" "$(stat -c %s "$deb")" "$(sha256sum "$deb" | cut -d' ' -f1)" >>Packages
done
printf 'Origin: lab\nSuite: lab\nDate: %s\nSHA256:\n %s %s Packages\n' "$(LC_ALL=C date -Ru)" \
    "$(sha256sum Packages | cut -d' ' -f1)" "$(stat -c %s Packages)" >Release
export GNUPGHOME="$1/gnupg"
mkdir -p -m 700 "$GNUPGHOME"
gpg --batch --quiet --passphrase '' --quick-generate-key lab@example.org ed25519 sign never 2>/dev/null || true
gpg --batch --yes --quiet --clearsign --output InRelease Release
gpg --batch --yes --quiet --armor --output key.asc --export lab@example.org
