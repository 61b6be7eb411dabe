#!/usr/bin/env bash
# The collection on a real GPU: each STEP writes a log, and results, into EVIDENCE; a failed step does not stop the next.
#   run.sh EVIDENCE STEP...      STEP: hw holders holder_scan p2p collectives site bench:MODE[:LEVELS[:SECONDS]]
#                                peer[:LEVELS[:SECONDS]] failures broken proof keys bad_flag arms:ARM,ARM… forced
# The machine was prepared by setup.sh. SERVELAB_PREFIX, SERVELAB_TP as in the inventory beside this file.
set -uo pipefail
evidence="$(mkdir -p "$1" && cd "$1" && pwd)"
shift
here="$(cd "$(dirname "$0")" && pwd)"
cd "$here/../.."
export SERVELAB_PREFIX="${SERVELAB_PREFIX:-/srv/servelab}"
stack="$SERVELAB_PREFIX/opt/servelab/stack"
export PYTHONPATH="$PWD/src" PYTHONUNBUFFERED=1 ANSIBLE_FORCE_COLOR=0 ANSIBLE_NOCOLOR=1
servers="$SERVELAB_PREFIX/var/log/servelab"
play() { "$stack/bin/python" -m ansible playbook -i "$here/inventory" -e "bench_results_dir=$evidence/results" "$@"; }
serve() { play playbooks/serve.yml -e mode=baseline "$@"; }
stop() { play playbooks/stop.yml; }

hw() {
    nvidia-smi
    nvidia-smi topo -m
    "$stack/bin/python" -c 'import torch, sglang, sgl_kernel; print(torch.__version__, sglang.__version__, sgl_kernel.__version__)'
}
holders() { "$stack/bin/python" "$here/holders/run.py" --role --json "$evidence/holders.json"; }
holder_scan() { "$stack/bin/python" bench/holders.py; }
p2p() { play playbooks/validate.yml --tags p2p; cp "$SERVELAB_PREFIX/var/lib/servelab/p2p.json" "$evidence/"; }
collectives() { play playbooks/collectives.yml -e "collectives_world_size=$(nvidia-smi --list-gpus | wc -l)" "$@"; }
# The ways to all-reduce by name, as they come; `forced` first patches SGLang, for good.
arms() { # ARM,ARM…
    "$stack/bin/python" -m servelab collectives --out "$evidence/collectives-$1" --arms "$1" --samples 10 \
        --gpus "$(nvidia-smi --query-gpu=index --format=csv,noheader | paste --serial --delimiters ,)" \
        --model "$SERVELAB_PREFIX/models/target"
}
forced() { play "$here/patch.yml" && arms custom_ar_pcie; }
site() { play site.yml; }
bench() { # MODE [LEVELS] [SECONDS] [OPTION...]
    play bench.yml -e "mode=$1" -e campaign=gpu -e "{\"levels\": [${2:-1,2,5,10,30,70,100,250}]}" -e "bench_min_seconds=${3:-10}" -e bench_invalid_ok=true "${@:4}"
}
# Our client and SGLang's own on one server, in turns. The server's answers are kept as they came over the wire.
peer() { # [LEVELS] [SECONDS]
    serve && "$stack/bin/python" "$here/peer.py" --levels "${1:-10,70}" --seconds "${2:-8}" --out "$evidence/peer" \
        --tokenizer "$SERVELAB_PREFIX/models/target"
    stop
}
# Starts that must fail, one after the other, each by its name; then a server whose scheduler is killed while it serves.
failures() {
    echo "# the pool does not fit"
    serve -e sglang_server_mem_fraction_static=0.005
    echo "# the graphs do not fit"
    serve -e sglang_server_mem_fraction_static=0.997
    echo "# somebody has the port"
    "$stack/bin/python" -m http.server --bind 127.0.0.1 30000 & other=$!
    sleep 1
    serve
    kill "$other"
    echo "# a scheduler is killed"
    serve
    kill -KILL "$(pgrep --oldest --full sglang::scheduler)"
    sleep 4
    play playbooks/status.yml
    newest="$(ls -t "$servers"/baseline/*.log | head -n 1)"
    "$stack/bin/python" -m servelab diagnose "$newest" --exit-status -9
    stop
    tar --create --gzip --file "$evidence/failed-servers.tgz" --directory "$servers" .
}
# A model that says something else than the known answers, which is what a wrong sum comes to.
broken() {
    "$stack/bin/python" "$here/break_model.py" "$SERVELAB_PREFIX/models/target" "$SERVELAB_PREFIX/models/broken"
    bench baseline 1 2 -e campaign=broken -e "sglang_server_model_path=$SERVELAB_PREFIX/models/broken"
}
# torch is the machine's own; to be read with the rest it must lie in the stack, too.
proof() {
    local machine site
    machine="$(cat "$stack"/lib/python3*/site-packages/torch.pth)"
    site="$(echo "$stack"/lib/python3*/site-packages)"
    for one in "$machine"/{torch,torchgen,functorch,triton,nvidia,torch-*,triton-*,nvidia_*}; do
        [ -e "$site/${one##*/}" ] || cp --archive --link "$one" "$site/" 2> /dev/null || cp --archive "$one" "$site/"
    done
    play "$here/proof.yml" -e "proof_out=$evidence/proof.json"
}
# A server with keys: who may ask what, and where the keys stand while it runs and when it has gone.
keys() {
    local file
    file="$(mktemp)"
    "$stack/bin/python" "$here/keys.py" make "$file"
    serve -e "@$file"
    "$stack/bin/python" "$here/keys.py" ask "$file"
    "$stack/bin/python" "$here/keys.py" search "$file" "$evidence" "$SERVELAB_PREFIX"/{etc,run,var,opt/servelab/run}
    stop
    bench baseline 1 2 -e campaign=keys -e "@$file"
    "$stack/bin/python" "$here/keys.py" search "$file" "$evidence" "$SERVELAB_PREFIX"/{etc,run,var,opt/servelab/run}
    local status=$?
    rm "$file"
    return "$status"
}
# A flag that this release does not have: refused before anything is started, and what SGLang itself makes of it.
bad_flag() {
    local words=(--model-path "$SERVELAB_PREFIX/models/target" --speculative-num-step 3 --no-such-flag 1)
    serve -e '{"sglang_server_extra_args": {"attention_backend": "tritone", "speculative_num_stepz": 3, "no_such_flag": 1}}'
    "$stack/bin/python" -m sglang.launch_server "${words[@]}" > "$evidence/bad-flag-server.log" 2>&1
    "$stack/bin/python" -m servelab diagnose "$evidence/bad-flag-server.log" --exit-status $?
}

for step in "$@"; do
    IFS=: read -r name one two three <<< "$step"
    log="$evidence/$(echo "$step" | tr ':,' '--').log"
    started=$SECONDS
    # Empty arguments are left out, so that a step's own defaults hold.
    "$name" ${one:+"$one"} ${two:+"$two"} ${three:+"$three"} 2>&1 | "$here/stamp.py" > "$log"
    echo "== $step: exit $? after $((SECONDS - started)) s"
    tail -n 12 "$log"
done
