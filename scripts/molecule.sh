#!/usr/bin/env bash
# Run molecule's scenarios one after the other on one lab: all of them, or those of one role.
#   scripts/molecule.sh [SCENARIO…]    none: all of `lanes`; one of `shared`: two labs share its tests
#   KEEP=1: on one lab, which stays up for the next time
# The lab is another one than the demo's; it is brought up once, and goes at the end, whatever happens.
set -euo pipefail
cd "$(dirname "$0")/.."
export SERVELAB_LAB="${TEST_LAB:-test}"

# What `make test` runs: what was seen to pass together, on two labs side by side, as a scenario waits more than it
# computes. The other scenarios run alone (ROLE=name): lab_node, which compares the machine before and after a lab and wants no
# other lab beside it, and cuda_toolkit and sglang_env_otherwise, for their time and what they download.
lanes=(
    "site common sglang_env bench bench_otherwise gpu_clean sglang_allreduce gpu_p2p sglang_nodes collectives"
    "pve_container pve_gpu_host gpu_clean_hard nvidia_userspace sglang_router sglang_router_otherwise sglang_server sglang_server_otherwise collectives_otherwise"
)
# Those whose tests take much longer than what comes before them.
shared=" pve_container pve_gpu_host gpu_clean_hard "
labs=("$SERVELAB_LAB" "$SERVELAB_LAB-2")
scenarios=("$@")
for scenario in "${scenarios[@]}"; do
    if [ ! -e "molecule/$scenario/molecule.yml" ]; then
        known=(molecule/*/molecule.yml)
        known=("${known[@]%/molecule.yml}")
        echo "There is no scenario $scenario; there are: ${known[*]#molecule/}." >&2
        exit 2
    fi
done

why=$(scripts/preflight.sh --why)
if [ -n "$why" ]; then
    [ "${#scenarios[@]}" -gt 0 ] || read -ra scenarios <<< "${lanes[*]}"
    echo "== skipped, because $why: ${scenarios[*]}"
    echo "== instead: the two commands over a local connection (tests/local)"
    exec pytest tests/local
fi

if [ "${#scenarios[@]}" -eq 1 ] && [ -z "${KEEP:-}${SERVELAB_SHARE:-}" ] && [[ "$shared" == *" ${scenarios[0]} "* ]]; then
    lanes=("${scenarios[0]}" "${scenarios[0]}")
    shares=(1/2 2/2)
    scenarios=()
fi
if [ "${#scenarios[@]}" -eq 0 ]; then
    # Each lane is a job of its own, which a Ctrl-C reaches as if it ran in front, so that it removes its lab.
    set -m
    jobs=()
    readers=()
    said=()
    trap 'for job in "${jobs[@]}"; do kill -INT -- "-$job" 2> /dev/null || true; done' INT TERM
    mkdir -p .ansible/molecule
    for lane in "${!lanes[@]}"; do
        said+=(".ansible/molecule/${labs[lane]}.log")
        exec {out}> >(trap '' INT TERM; sed --unbuffered "s/^/[$((lane + 1))] /" | tee "${said[lane]}")
        readers+=("$!")
        # shellcheck disable=SC2086 # names of scenarios, one word each
        TEST_LAB="${labs[lane]}" SERVELAB_SHARE="${shares[lane]:-1/1}" "$0" ${lanes[lane]} < /dev/null >&"$out" 2>&1 {out}>&- &
        jobs+=("$!")
        exec {out}>&-
    done
    status=0
    for job in "${jobs[@]}"; do
        wait "$job" || status=$?
        # A signal ends the waiting, not the job.
        while kill -0 "$job" 2> /dev/null; do wait "$job" || status=$?; done
    done
    wait "${readers[@]}" || true
    echo "== both lanes are through after $SECONDS s"
    # Once more at the end, as the lines are far apart, and some who look see the last of them only.
    grep -hE '^\[[0-9]\] (== .*: FAILED|FAILED |ERROR )' "${said[@]}" | cut -c-200 || true
    exit "$status"
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
[ "${scenarios[*]}" = lab_node ] || ansible-playbook playbooks/lab.yml
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
if [ "${#scenarios[@]}" -eq 1 ]; then
    for other in "molecule/${scenarios[0]}"_*/; do
        [ ! -d "$other" ] || echo "== more of this role: make test ROLE=$(basename "$other")"
    done
fi
if [ "${#failed[@]}" -gt 0 ]; then
    echo "These scenarios failed: ${failed[*]}. One alone: make test ROLE=${failed[0]}" >&2
    exit 1
fi
