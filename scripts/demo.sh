#!/bin/sh
# The whole story in the lab: from nothing to two measured answers, one for each of the lab's profiles.
set -eu
cd "$(dirname "$0")/.."

# Where no container can be started, the same playbooks run on this machine itself.
if [ -n "$(scripts/preflight.sh --why)" ]; then
    export ANSIBLE_INVENTORY=inventory/local
fi

# A busy machine can void a level; the report then shows the others, and why that one is missing.
bench() { # profile mode
    ansible-playbook bench.yml -e mode="$2" -e campaign="demo-$1" -e bench_invalid_ok=true
}

ansible-playbook site.yml
# The lab's own profile comes last, so that it is what the next `site.yml` and `bench.yml` find.
for profile in crossing story; do
    ansible-playbook playbooks/lab.yml --tags lab_node_doubles -e lab_node_profile="$profile"
    bench "$profile" baseline
    bench "$profile" eagle3
done
# The answers last, together, where a person looks.
for profile in story crossing; do
    servelab report "results/demo-$profile"
done
