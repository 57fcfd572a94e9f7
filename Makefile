# `make run` and `make test` are all that a user needs. Each target sets up what it needs.

PYTHON ?= python3
# Set where make was started, it would have every process of a test compile the package anew
export PYTHONDONTWRITEBYTECODE :=
VENV := .venv
# The stack of constraints.txt goes by this; another Python makes the environment anew
PYTHON_RELEASE := $(shell $(PYTHON) -c 'import sys; print("%d.%d" % sys.version_info[:2])')
BIN := $(VENV)/bin
# Of tests that compute, and of those that mostly wait for Slurm
WORKERS ?= auto
WAITING ?= 3
FORK = --fork $(WORKERS) --waiting $(WAITING)
# For `make interop`: the directory of upstream's sources, plain trees with these names. They are put there by other means,
# and read where they are: nothing here fetches, builds or installs them
UPSTREAM := $(or $(MBRIDGE_UPSTREAM),$(or $(XDG_CACHE_HOME),$(HOME)/.cache)/cloudai-mbridge/upstream)
TREES := cloudai megatron-bridge-0.3 megatron-bridge-0.6
SOURCE_cloudai := https://github.com/NVIDIA/cloudai.git 5b5c0f728858c49724dcd22c46effa7401f52314
SOURCE_megatron-bridge-0.3 := https://github.com/NVIDIA-NeMo/Megatron-Bridge.git 21b02e0cfb2f8ff907e0d8baee0c5205876c6812
SOURCE_megatron-bridge-0.6 := https://github.com/NVIDIA-NeMo/Megatron-Bridge.git 51885cf132b2814188b6855c25a8588254274c2a
INTEROP := .venv-interop
# For `make matrix` and `make te`: an environment with the newest stack. Transformer Engine's tests need 3.12
NEWEST_PYTHON ?= $(firstword $(foreach v,3.12 3.13,$(if $(shell python$v -c 'print(1)' 2>/dev/null),python$v) \
  $(lastword $(wildcard $(HOME)/.pyenv/versions/$v.*/bin/python))))
NEWEST := .venv-newest
IS_3_12 = "$(NEWEST_PYTHON)" -c 'import sys; sys.exit(sys.version_info[:2] != (3, 12))' 2>/dev/null
# An archive (.tar.xz) with Transformer Engine's libraries; compiled where it is empty
MBRIDGE_TE_ARCHIVE ?=
# For `make matrix`: the releases of Megatron-Core to test, and what to test
CORES ?= 0.16.1 0.17.1 0.18.2 0.19.2
SUITES ?= training,gpu_check,constraints,estimate,e2e
MARKERS ?= not drill
SANDBOX ?= /tmp/mbridge-sandbox-$(shell id -u)

.PHONY: run check check-tests test test-changed test-long golden docs interop interop-run interop-install upstream-sources bridge-loop bridge-loop-on-3.12 head-to-head rehearse-recipes matrix te newest newest-python environments drill bench gpu-check lint slurm-sandbox slurm-sandbox-stop clean

# Check, train, judge and report a sweep of a tiny GPT on this machine.
run: $(VENV)/.train
	$(BIN)/mbridge run --system-config systems/local.toml --tests-dir test_defs \
	  --test-scenario conf/scenarios/gpt_tiny_sweep.toml

# Run all tests: real training, real Slurm.
test: $(VENV)/.dev
	.ci/install-slurm
	.ci/install-chromium
	$(BIN)/python -m pytest $(FORK) $(PYTEST_ARGS)

# Run the tests that changes since BASE touch, committed or not: by default since the branch left main (tests/changed.py).
test-changed: $(VENV)/.dev
	.ci/install-slurm
	.ci/install-chromium
	$(BIN)/python -m pytest $(FORK) --changed=$(BASE) $(PYTEST_ARGS)

# Write all golden files again (tests/golden.py), or those of the tests that TESTS names: files or folders.
golden: $(VENV)/.dev
	MBRIDGE_WRITE_GOLDEN=1 $(BIN)/python -m pytest -q $(FORK) $(PYTEST_ARGS) $(TESTS)
	@git status --short

# Run the tests that `make test` leaves out for their length.
test-long: $(VENV)/.dev
	.ci/install-slurm
	$(BIN)/python -m pytest $(FORK) -m "long and not drill" $(PYTEST_ARGS)

# Run the tests against the real CloudAI and the real launcher of Megatron-Bridge, in an environment of their own.
interop:
	@found=$$(.ci/find-upstream "$(UPSTREAM)" $(TREES)) && { [ -z "$$found" ] || $(MAKE) --no-print-directory interop-run; }

interop-run: interop-install
	.ci/install-slurm
	$(INTEROP)/bin/python -m pytest $(FORK) $(INTEROP_ARGS) tests/interop
	$(MAKE) bridge-loop
	@.ci/find-upstream "$(UPSTREAM)" $(TREES) >/dev/null

# Print the sources that `make interop` reads: name, repository, commit.
upstream-sources:
	@$(foreach tree,$(TREES),echo $(tree) $(SOURCE_$(tree));)

# The training loop of Megatron-Bridge 0.6 beside ours, on a CPU, where there is a Python 3.12.
bridge-loop:
	@if $(IS_3_12); then $(MAKE) bridge-loop-on-3.12; else \
	  echo "** THE LOOP OF MEGATRON-BRIDGE WAS NOT RUN: no Python 3.12 is found **" >&2; fi

bridge-loop-on-3.12:
	$(MAKE) newest
	$(MAKE) $(NEWEST)/bridge
	PYTHONPATH=$(CURDIR)/$(NEWEST)/bridge $(NEWEST)/bin/python -m pytest $(FORK) tests/interop/bridge_loop

# Rehearse the performance recipes of Megatron-Bridge 0.6 that the loop takes, with Transformer Engine's layers: an hour.
# REHEARSE_ARGS="--ranks ends" builds three ranks of each; "--level step --ranks stages" lets the first of every stage take a step
rehearse-recipes: interop-install
	$(MAKE) newest
	.ci/install-transformer-engine $(NEWEST)/bin/python $(NEWEST)/te "$(MBRIDGE_TE_ARCHIVE)"
	mkdir -p build
	cd tests/interop && PYTHONPATH=$(CURDIR)/$(INTEROP)/megatron-core-0.19:$(CURDIR) $(CURDIR)/$(INTEROP)/bin/python \
	  real_containers.py "$(UPSTREAM)/megatron-bridge-0.6" > $(CURDIR)/build/containers.jsonl
	cd tests/interop && PYTHONPATH=$(CURDIR)/$(INTEROP)/megatron-core-0.19:$(CURDIR) $(CURDIR)/$(INTEROP)/bin/python \
	  judge_containers.py < $(CURDIR)/build/containers.jsonl > $(CURDIR)/build/verdicts.jsonl
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --target $(NEWEST)/emerging --upgrade emerging-optimizers
	PYTHONPATH=$(CURDIR)/$(NEWEST)/te:$(CURDIR)/$(NEWEST)/emerging $(NEWEST)/bin/python -m tests.interop.rehearse_recipes \
	  build/containers.jsonl build/verdicts.jsonl $(REHEARSE_ARGS) > build/rehearsed.jsonl

# CloudAI and mbridge on the same points on one sandbox: time, Slurm calls, exit codes.
head-to-head: interop-install
	.ci/install-slurm
	PYTHONPATH="$(UPSTREAM)/cloudai/src" $(INTEROP)/bin/python -m tests.benchmarks.head_to_head

interop-install: $(INTEROP)/.created-$(PYTHON_RELEASE)
	PIP_CONSTRAINT=constraints-interop.txt $(INTEROP)/bin/python -m pip install --quiet --editable '.[interop]'
	[ ! -d "$(UPSTREAM)/cloudai" ] || $(INTEROP)/bin/python .ci/stub-metadata "$(UPSTREAM)/cloudai"
	$(MAKE) $(INTEROP)/megatron-core-0.19

# What the configuration code of Megatron-Bridge 0.6 is written for; imported from there only, on whatever Python
$(INTEROP)/megatron-core-0.19:
	$(INTEROP)/bin/python -m pip install --quiet --no-deps --ignore-requires-python --target $@.new megatron-core==0.19.2
	mv $@.new $@

# The tests of what depends on Megatron-Core, with each of its tested releases: a table.
matrix:
	$(MAKE) newest
	.ci/install-slurm
	FORK="$(FORK)" .ci/matrix $(NEWEST)/bin/python $(SUITES) "$(MARKERS)" $(CORES)

# The tests with Transformer Engine's layers, without a GPU. It is in a directory of its own, which only they have on
# their path: training on a CPU fails where it can be imported.
te:
	@$(IS_3_12) || { echo "Python 3.12 is needed: make te NEWEST_PYTHON=..." >&2; exit 1; }
	$(MAKE) newest
	.ci/install-transformer-engine $(NEWEST)/bin/python $(NEWEST)/te "$(MBRIDGE_TE_ARCHIVE)"
	PYTHONPATH=$(CURDIR)/$(NEWEST)/te $(NEWEST)/bin/python -m pytest $(FORK) $(PYTEST_ARGS) tests/transformer_engine

# The training loop of Megatron-Bridge, for PYTHONPATH: what it needs is older than what other tests have, and slow to import
$(NEWEST)/bridge: constraints-bridge.txt
	rm -rf $@ $@.new
	$(NEWEST)/bin/python -m pip install --quiet --no-deps --target $@.new --requirement constraints-bridge.txt
	mv $@.new $@
	touch $@

newest:
	@test -n "$(NEWEST_PYTHON)" || { echo "Python 3.12 or 3.13 is needed: make NEWEST_PYTHON=..." >&2; exit 1; }
	$(MAKE) PYTHON=$(NEWEST_PYTHON) VENV=$(NEWEST) $(NEWEST)/.dev

newest-python:
	@echo $(NEWEST_PYTHON)

# Make the environments of `interop`, `te` and `matrix`, as far as they can run here.
environments: $(VENV)/.dev
	[ -z "$(NEWEST_PYTHON)" ] || $(MAKE) newest
	[ -z "$(wildcard $(addprefix $(UPSTREAM)/,$(TREES)))" ] || $(MAKE) interop-install
	[ -z "$(wildcard $(addprefix $(UPSTREAM)/,$(TREES)))" ] || ! $(IS_3_12) || $(MAKE) $(NEWEST)/bridge

# The tests that are too long for `make test`, and the benchmarks.
drill: $(VENV)/.dev
	.ci/install-slurm
	$(BIN)/python -m pytest -m drill $(PYTEST_ARGS)

bench: $(VENV)/.dev
	.ci/install-slurm
	$(BIN)/python tests/benchmarks/sweep_rate.py
	$(BIN)/python -m tests.benchmarks.time_model
	$(BIN)/python tests/benchmarks/start_up.py
	$(BIN)/python -m tests.benchmarks.engine
	$(BIN)/python tests/benchmarks/loop_overhead.py
	$(BIN)/python tests/benchmarks/history.py
	$(BIN)/python tests/benchmarks/gate_curves.py
	$(BIN)/python tests/benchmarks/warm_start.py

# Check a machine with a GPU in under ten minutes (docs/gpu-check.md); without one, its parts for GPUs are skipped.
gpu-check: $(VENV)/.train
	$(BIN)/python -m cloudai_mbridge.gpu_check --out gpu_check.json $(GPU_CHECK_ARGS)

# What to run before a commit: the linters, the types, and all tests that start no process. One core checks types meanwhile.
check: $(VENV)/.dev
	$(MAKE) --no-print-directory -j 2 lint check-tests

check-tests: $(VENV)/.dev
	$(BIN)/python -m pytest -q -m "not process and not drill and not long" --no-processes --fork $(WORKERS) $(PYTEST_ARGS)

# Build the documentation into build/site. A broken link is an error.
docs: $(VENV)/.dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python .ci/lint-javascript

# Start a private Slurm cluster on this machine: 2 nodes, each with 4 fake GPUs.
slurm-sandbox: $(VENV)/.train
	.ci/install-slurm
	$(BIN)/python -m tests.sandbox start $(SANDBOX)

slurm-sandbox-stop: $(VENV)/.train
	$(BIN)/python -m tests.sandbox stop --purge $(SANDBOX)

clean:
	rm -rf $(VENV) $(INTEROP) $(NEWEST) build *.egg-info

$(VENV)/.created-$(PYTHON_RELEASE) $(INTEROP)/.created-$(PYTHON_RELEASE):
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv --clear $(@D)
	touch $@

$(VENV)/.train: $(VENV)/.created-$(PYTHON_RELEASE) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.created-$(PYTHON_RELEASE) pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.train
