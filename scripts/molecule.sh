#!/bin/sh
# Run the named molecule scenarios in a lab of their own, which goes away whatever happens.
set -eu
export SERVELAB_LAB=test
trap 'ansible-playbook playbooks/lab_down.yml' EXIT
trap 'exit 130' INT TERM
# Molecule remembers what it created, and the lab may have been removed behind its back.
molecule reset --all >/dev/null 2>&1 || true
for scenario in "$@"; do
    molecule test --scenario-name "$scenario" --destroy always
done
