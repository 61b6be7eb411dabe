#!/usr/bin/env bash
# Run molecule's scenarios one after the other on one lab: all of them, or those of one role.
#   scripts/molecule.sh [ROLE]    KEEP=1 leaves the lab up for the next time
# The lab is another one than the demo's; it is brought up once, and goes at the end, whatever happens.
set -euo pipefail
cd "$(dirname "$0")/.."
export SERVELAB_LAB="${TEST_LAB:-test}"

role="${1:-}"
# What `make test` runs: what was seen to pass together, `site` first, as it makes what the others use. The other
# scenarios run alone (ROLE=name): lab_node and cuda_toolkit for their time, the rest until they were seen to pass.
scenarios=(site bench gpu_clean sglang_allreduce nvidia_userspace gpu_p2p pve_container pve_gpu_host gpu_clean_hard)
if [ -n "$role" ]; then
    if [ ! -e "molecule/$role/molecule.yml" ]; then
        known=(molecule/*/molecule.yml)
        known=("${known[@]%/molecule.yml}")
        echo "There is no scenario $role; there are: ${known[*]#molecule/}." >&2
        exit 2
    fi
    scenarios=("$role")
fi

why=$(scripts/preflight.sh --why)
if [ -n "$why" ]; then
    echo "== skipped, because $why: ${scenarios[*]}"
    echo "== instead: the two commands over a local connection (tests/local)"
    exec pytest tests/local
fi

finish() {
    status=$?
    # A second Ctrl-C must not leave half a lab.
    trap '' INT TERM
    if [ -n "${KEEP:-}" ]; then
        echo "The lab of the tests stays up: make lab-down removes it."
    else
        ansible-playbook playbooks/lab_down.yml || status=1
        # The scenario lab_node has a lab of its own, which an interruption leaves.
        case " ${scenarios[*]} " in
            *" lab_node "*) SERVELAB_LAB="$SERVELAB_LAB-lab" ansible-playbook playbooks/lab_down.yml || status=1 ;;
        esac
    fi
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

run() { # command scenario [options]
    # Molecule's own place is named after the last part of the checkout's path, so two checkouts would share it.
    MOLECULE_EPHEMERAL_DIRECTORY="$PWD/.ansible/molecule/$SERVELAB_LAB/$2" molecule "$1" --scenario-name "$2" "${@:3}"
}

# The scenario lab_node makes its own.
[ "$role" = lab_node ] || ansible-playbook playbooks/lab.yml
echo "== the lab is up after $SECONDS s"
failed=()
for scenario in "${scenarios[@]}"; do
    # What molecule remembers of an earlier run is about a lab that may be gone.
    rm -rf ".ansible/molecule/$SERVELAB_LAB/$scenario"
    started=$SECONDS
    if run test "$scenario" --destroy never; then
        echo "== $scenario: passed in $((SECONDS - started)) s"
    else
        failed+=("$scenario")
        run cleanup "$scenario" || true
        echo "== $scenario: FAILED after $((SECONDS - started)) s"
    fi
done
if [ "${#failed[@]}" -gt 0 ]; then
    echo "These scenarios failed: ${failed[*]}. One alone: make test ROLE=${failed[0]}" >&2
    exit 1
fi
