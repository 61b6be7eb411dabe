#!/bin/sh
# Print the newest Python that runs here and can make a virtual environment: 3.13, 3.12 or 3.11.
# A name on PATH is not enough: a version manager's shim exists for versions that do not run.
for version in 3.13 3.12 3.11; do
    for python in "python$version" "$HOME/.pyenv/versions/$version".*/bin/python3; do
        if "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
            command -v "$python"
            exit 0
        fi
    done
done
echo "No Python 3.11, 3.12 or 3.13 with the venv module was found: install one (Debian: apt-get install python3-venv)." >&2
exit 1
