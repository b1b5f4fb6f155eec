# What a newcomer needs is `make demo` and `make test`; both set everything up first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# What running needs, and what tests and tools need beside it.
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
# The CPU build of torch; on a machine with an accelerator set TORCH= to the build that suits it.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# Of each module, for `make mutants`; 0 for all.
SAMPLES ?= 20

export PYTHON TORCH

.PHONY: help setup demo check test test-transformers soak mutants lint format proto bench vllm-client model clean

help:  ## Show what can be made
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 19

setup: $(STAMP)  ## Make the virtual environment

$(RUNTIME): pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV) runtime
	touch $@

$(STAMP): pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV) dev
	touch $(RUNTIME) $@

demo: $(RUNTIME)  ## Start a local cluster, ask about several images, show where each stage ran
	$(BIN)/python examples/demo.py

check: lint  ## Lint, types, and the unit tests that start no process: under 90 s on two cores
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -p no:schemathesis -m "not slow and not process" tests/unit $(PYTEST_ARGS)

test: $(STAMP)  ## Run the whole suite, and name the ten slowest tests
	$(BIN)/python -m pytest --durations=10 $(PYTEST_ARGS)

test-transformers: $(STAMP)  ## What depends on transformers, under the release of it that VERSION= names (makes an environment under build/)
	scripts/test_transformers.sh "$(VERSION)" $(PYTEST_ARGS)

soak: $(STAMP)  ## Half an hour of pulls while holders die and links break: nothing may pile up
	SOAK_S=$${SOAK_S:-1800} $(BIN)/python -m pytest -s tests/integration/transport/test_soak.py

mutants: $(STAMP)  ## Change policies and machines one small thing at a time: which changes does no test notice?
	scripts/mutants.sh --samples $(SAMPLES)

lint: $(STAMP)  ## Formatter, linter, strict types, import contracts, generated code current
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PYTHON=$(BIN)/python proto/generate.sh --check

format: $(STAMP)  ## Format and mend what can be mended by itself
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

proto: $(STAMP)  ## Generate src/triptych/v1 from proto/
	PYTHON=$(BIN)/python proto/generate.sh

bench: $(STAMP)  ## Run the benchmarks that need no accelerator, writing to benchmarks/results/
	$(BIN)/python -m benchmarks.disaggregation --json benchmarks/results/disaggregation.json
	$(BIN)/python -m benchmarks.transport --json benchmarks/results/transport.json
	$(BIN)/python -m benchmarks.router_overhead --json benchmarks/results/router_overhead.json
	$(BIN)/python -m benchmarks.stages --json benchmarks/results/stages.json
	$(BIN)/python -m benchmarks.sampling --json benchmarks/results/sampling.json

vllm-client: $(STAMP)  ## Run vLLM's benchmark client against a local cluster (makes a 3.5 GB environment under build/)
	scripts/vllm_client.sh

model: $(STAMP)  ## Train the demo model anew and evaluate it (about 20 minutes)
	$(BIN)/python examples/demo_model/train.py --out build/demo-model
	$(BIN)/python examples/demo_model/evaluate.py --model build/demo-model

clean:  ## Remove what was made
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
