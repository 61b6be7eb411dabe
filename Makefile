# Two commands: `make demo` runs the whole story in the lab, `make test` tests everything.
SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
# The targets share one lab and one environment.
.NOTPARALLEL:

VENV := .venv
export PATH := $(CURDIR)/$(VENV)/bin:$(PATH)
# Molecule looks for scenarios in extensions/ first; ours stand where people look.
export MOLECULE_GLOB := molecule/*/molecule.yml
# The lab of the tests, another one than the demo's.
export TEST_LAB ?= test

.PHONY: help
help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/' | expand -t 14

.PHONY: preflight
preflight:
	@scripts/preflight.sh

$(VENV)/.ready: requirements.txt requirements-dev.txt pyproject.toml scripts/python.sh
	python="$$(scripts/python.sh)" && "$$python" -m venv --clear $(VENV)
	pip install --quiet --disable-pip-version-check -r requirements-dev.txt
	pip install --quiet --disable-pip-version-check --no-build-isolation --no-deps --editable .
	touch $@

.PHONY: venv
venv: $(VENV)/.ready ## the Python environment of the controller

.PHONY: preflight-or-local
preflight-or-local:
	@scripts/preflight.sh --or-local

.PHONY: demo
demo: preflight-or-local venv ## run it: lab, site.yml, bench.yml for two modes and two profiles, report
	scripts/demo.sh

.PHONY: lab lab-down clean
lab: preflight venv ## only the lab and its guest, provisioned
	ansible-playbook site.yml

lab-down: venv ## remove the lab: containers, bridge, rules, state; and what stands in .lab
	ansible-playbook -i inventory/local playbooks/lab_down.yml
	SERVELAB_PREFIX=$(CURDIR)/.lab/test ansible-playbook -i inventory/local playbooks/lab_down.yml
	if [ -n "$$(scripts/preflight.sh --why)" ]; then exit 0; fi; \
	scripts/preflight.sh --removal; \
	status=0; \
	ansible-playbook playbooks/lab_down.yml || status=$$?; \
	SERVELAB_LAB=$(TEST_LAB) ansible-playbook playbooks/lab_down.yml || status=$$?; \
	SERVELAB_LAB=$(TEST_LAB)-2 ansible-playbook playbooks/lab_down.yml || status=$$?; \
	SERVELAB_LAB=$(TEST_LAB)-lab ansible-playbook playbooks/lab_down.yml || status=$$?; \
	exit $$status

clean: lab-down ## lab-down, and the caches, the environment and build products; results stay
	[ -n "$$(scripts/preflight.sh --why)" ] || ansible-playbook playbooks/lab_down.yml -e lab_node_purge_cache=true
	rm -rf $(VENV) build dist .ansible .mypy_cache .pytest_cache .ruff_cache

.PHONY: readme
readme: venv ## write the variables' tables of the roles' READMEs
	scripts/readme.py

.PHONY: test lint unit molecule test-patch-all
# With ROLE=name only that role's scenario; with KEEP=1 the lab of the tests stays up for the next time.
test: preflight-or-local venv $(if $(ROLE),,lint unit) molecule ## test it: all that CI runs; ROLE=name: one role; KEEP=1: keep the lab

lint: venv ## style and types
	ruff check .
	ruff format --check .
	mypy
	yamllint --strict .
	ansible-lint --offline

# They wait more than they compute. With three processes on two cores those that measure time fail.
unit: venv ## the Python code
	pytest --numprocesses 2 --dist loadfile

# On a machine that does nothing else, with two cores: docs/performance.md. PEERS=dir: other clients' environments.
.PHONY: bench-client bench-holders
bench-client: venv ## how wrong and how dear the load client is, against a server with known timing
	python bench/client.py --into docs/performance.md $(addprefix --python ,$(wildcard /usr/bin/python3)) $(if $(PEERS),--peers $(PEERS)) $(LOADS)

.PHONY: bench-roles
bench-roles: venv ## time and round trips of a run that changes nothing, on machines that are converged (INVENTORY=inventory/lab)
	python bench/round_trips.py --inventory $(or $(INVENTORY),inventory/lab)

.PHONY: test-stack
test-stack: preflight venv ## the full stack (4 GB to fetch) in a lab of its own: installed, proved, serving on the CPU
	scripts/test_stack.sh

molecule: preflight-or-local venv ## the roles and the two commands, end to end on real LXC
	scripts/molecule.sh $(ROLE)

# Downloads what is missing, one wheel after the other (about 500 MB once, of which 20 are kept). Not part of CI.
test-patch-all: venv ## the allreduce patch on every published SGLang from 0.4.9 on; prints the matrix
	scripts/patch_matrix.py

bench-holders: venv ## how long it takes to find who holds the GPUs, beside fuser and lsof (root, a C compiler)
	python bench/holders.py
