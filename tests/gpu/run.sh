#!/usr/bin/env bash
# The collection on a real GPU: each STEP writes a log, and results, into EVIDENCE; a failed step does not stop the next.
#   run.sh EVIDENCE STEP...      STEP: hw holders holder_scan p2p collectives site bench:MODE[:LEVELS[:SECONDS]]
# The machine was prepared by setup.sh. SERVELAB_PREFIX, SERVELAB_TP as in the inventory beside this file.
set -uo pipefail
evidence="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."
export SERVELAB_PREFIX="${SERVELAB_PREFIX:-/srv/servelab}"
stack="$SERVELAB_PREFIX/opt/servelab/stack"
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 ANSIBLE_FORCE_COLOR=0 ANSIBLE_NOCOLOR=1
play() { "$stack/bin/python" -m ansible playbook -i "$here/inventory" -e "bench_results_dir=$evidence/results" "$@"; }

hw() {
    nvidia-smi
    nvidia-smi topo -m
    "$stack/bin/python" -c 'import torch, sglang, sgl_kernel; print(torch.__version__, sglang.__version__, sgl_kernel.__version__)'
}
holders() { "$stack/bin/python" "$here/holders/run.py" --role --json "$evidence/holders.json"; }
holder_scan() { "$stack/bin/python" bench/holders.py; }
p2p() { play playbooks/validate.yml --tags p2p; cp "$SERVELAB_PREFIX/var/lib/servelab/p2p.json" "$evidence/"; }
collectives() { play playbooks/collectives.yml -e "collectives_world_size=$(nvidia-smi --list-gpus | wc -l)" "$@"; }
site() { play site.yml; }
bench() { # MODE [LEVELS] [SECONDS]
    play bench.yml -e "mode=$1" -e campaign=gpu -e "{\"levels\": [${2:-1,2,5,10,30,70,100,250}]}" -e "bench_min_seconds=${3:-10}" -e bench_invalid_ok=true
}

for step in "$@"; do
    IFS=: read -r name one two three <<< "$step"
    log="$evidence/$(echo "$step" | tr ':,' '--').log"
    started=$SECONDS
    # Empty arguments are left out, so that a step's own defaults hold.
    "$name" ${one:+"$one"} ${two:+"$two"} ${three:+"$three"} > "$log" 2>&1
    echo "== $step: exit $? after $((SECONDS - started)) s"
    tail -n 12 "$log"
done
