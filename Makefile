# Two commands: `make run` and `make test`. Each sets up what it needs.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
WORKERS ?= 3
SANDBOX ?= /tmp/mbridge-sandbox-$(shell id -u)

.PHONY: run test drill bench lint slurm-sandbox slurm-sandbox-stop clean

# Check, train, judge and report a sweep of a tiny GPT on this machine.
run: $(VENV)/.train
	$(BIN)/mbridge run --system-config systems/local.toml --tests-dir test_defs \
	  --test-scenario conf/scenarios/gpt_tiny_sweep.toml

# Run all tests: real training, real Slurm.
test: $(VENV)/.dev
	.ci/install-slurm
	.ci/install-chromium
	$(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder $(PYTEST_ARGS)

# The tests that are too long for `make test`, and the benchmarks.
drill: $(VENV)/.dev
	.ci/install-slurm
	$(BIN)/python -m pytest -m drill $(PYTEST_ARGS)

bench: $(VENV)/.dev
	.ci/install-slurm
	$(BIN)/python tests/benchmarks/sweep_rate.py
	$(BIN)/python tests/benchmarks/time_model.py
	$(BIN)/python tests/benchmarks/engine.py
	$(BIN)/python tests/benchmarks/loop_overhead.py
	$(BIN)/python tests/benchmarks/history.py
	$(BIN)/python tests/benchmarks/gate_curves.py

lint: $(VENV)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Start a private Slurm cluster on this machine: 2 nodes, 4 GPUs each that do not exist.
slurm-sandbox: $(VENV)/.train
	.ci/install-slurm
	$(BIN)/python -m cloudai_mbridge.sandbox start $(SANDBOX)

slurm-sandbox-stop: $(VENV)/.train
	$(BIN)/python -m cloudai_mbridge.sandbox stop --purge $(SANDBOX)

clean:
	rm -rf $(VENV) build *.egg-info

$(VENV)/.created:
	$(PYTHON) -c 'import sys; sys.exit(0 if sys.version_info >= (3, 11) else "Python 3.11 or newer is needed: make PYTHON=...")'
	$(PYTHON) -m venv $(VENV)
	touch $@

$(VENV)/.train: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[train]'
	touch $@

$(VENV)/.dev: $(VENV)/.created pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $@ $(VENV)/.train
