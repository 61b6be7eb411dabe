#!/usr/bin/env bash
# Make a machine with torch 2.11.0+cu130 and no network ready: the archive of pack.py becomes a stack, and a model is made.
#   setup.sh ARCHIVE [PREFIX]
set -euo pipefail
archive="$1"
prefix="${2:-/srv/servelab}"
here="$(cd "$(dirname "$0")" && pwd)"
torch="$(python3 -c 'import os, torch; print(os.path.dirname(os.path.dirname(torch.__file__)))')"
stack="$prefix/opt/servelab/stack"
mkdir -p "$prefix/opt/servelab" "$prefix/models"
python3 -m venv --without-pip "$stack"
site="$(echo "$stack"/lib/python3*/site-packages)"
tar --extract --file "$archive" --directory "$site"
# Kernels are compiled when the server starts: a unit's PATH begins with the stack.
ln -s "$(command -v ninja)" "$stack/bin/ninja"
# After the stack's own packages, so that those win.
echo "$torch" > "$site/torch.pth"
"$stack/bin/python" "$here/make_model.py" "$prefix/models"
