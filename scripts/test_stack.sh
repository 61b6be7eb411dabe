#!/usr/bin/env bash
# The full stack, end to end, in a lab of its own: installed from its lock, proved, patched, its units read by SGLang's own parser, and
# the real SGLang serving on the CPU through the same unit, readiness and bench.yml. Only the GPUs are played.
#   scripts/test_stack.sh    KEEP=1 leaves the lab up; needs 4 GB of downloads the first time and 20 GB free in /var
#                            OFFLINE=1 also fills a wheelhouse and installs everything from it with the guest cut off (25 GB more)
set -euo pipefail
cd "$(dirname "$0")/.."
export SERVELAB_LAB="${STACK_LAB:-stack}"
vars=(-e @tests/stack/stack.yml)
times=()

finish() {
    status=$?
    trap '' INT TERM
    [ -n "${KEEP:-}" ] || ansible-playbook playbooks/lab_down.yml || status=1
    exit "$status"
}
trap finish EXIT
trap 'exit 130' INT
trap 'exit 143' TERM

step() { # what command…
    local what="$1" started=$SECONDS
    shift
    echo "== $what"
    "$@"
    times+=("$((SECONDS - started)) s	$what")
}

unchanged() {
    # Not tee /dev/stderr, which begins a log anew that stderr goes to; and not grep -q, which ends early and lets tee die.
    ansible-playbook tests/stack/cut_off.yml "${vars[@]}" | tee >(cat >&2) | grep 'lab-gpu1 .* changed=0 .* failed=0 ' >/dev/null
}

step "lab and guest" ansible-playbook playbooks/lab.yml playbooks/provision.yml
step "toolkit, full stack, patch" ansible-playbook playbooks/guest.yml "${vars[@]}"
step "model" ansible-playbook tests/stack/model.yml "${vars[@]}"
step "site.yml: units, and the mode cpu proved" ansible-playbook site.yml "${vars[@]}"
step "SGLang's own parser reads the units' flags" ansible-playbook tests/stack/parse.yml "${vars[@]}"
step "the answer is the only right one" ansible-playbook tests/stack/answer.yml "${vars[@]}"
step "bench.yml" ansible-playbook bench.yml "${vars[@]}" -e mode=cpu -e campaign=stack -e levels=1,2
step "once more, without a network: nothing changes" unchanged
if [ -n "${OFFLINE:-}" ]; then
    # The guest sees this directory as /var/cache/servelab-lab/full.
    step "wheelhouse" ansible-playbook playbooks/wheelhouse.yml -e wheelhouse=/var/cache/servelab-lab/shared/full
    step "everything from the wheelhouse, without a network" ansible-playbook tests/stack/cut_off.yml "${vars[@]}" -e @tests/stack/offline.yml
fi
ansible-playbook tests/stack/sizes.yml "${vars[@]}"
printf '%s\n' "${times[@]}"
