# Start with `make demo` or `make test`; both install what they need first.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Stamps: runtime dependencies; all dependencies, tests and tools included.
RUNTIME := $(VENV)/.runtime
STAMP := $(VENV)/.installed
# The CPU build of torch; on a machine with an accelerator set TORCH= to a matching build.
TORCH ?= torch==2.13.0
PYTEST_ARGS ?=
# One process that has nothing left to do takes over the later half of what another has.
PYTEST := $(BIN)/python -m pytest --dist worksteal
# For two cores: tests wait for other processes and for times for a quarter of theirs. Some extended ones measure times.
WORKERS := -n 3
FEWER := -n 2
# What `make test-vllm` runs: its own tests, and the suites of all engines. vLLM warns where it is imported.
VLLM_TESTS := -rsfE --durations=10 -W ignore tests/vllm tests/contract/test_encoder_engine.py tests/contract/test_text_engine.py \
	tests/contract/test_continuations.py tests/contract/test_kv_transfer.py
# Mutations per module for `make mutants`; 0 for all. Modules such as policy/placement/items or 'machine/*'; all by default.
SAMPLES ?= 20
MODULES ?=
# All parts of `make soak` together.
SOAK_MINUTES ?= 60
# Where `make vllm-client` writes, without the suffix.
RESULT ?=

export PYTHON TORCH
# Tests start hundreds of processes, each of which would compile every module again.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup demo demo-burst check test test-all test-compose test-compose-quick test-vllm test-vllm-quick test-transformers test-models soak mutants papers lint format dashboards lock proto bench vllm-environment vllm-client model clean

help:  ## List the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 19

setup: $(STAMP)  ## Create the virtual environment

$(RUNTIME): pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV) runtime
	touch $@

$(STAMP): pyproject.toml scripts/setup.sh
	scripts/setup.sh $(VENV) dev
	touch $(RUNTIME) $@

demo: $(RUNTIME)  ## Start a local cluster, ask about several images, show where each stage ran
	$(BIN)/python examples/demo.py

demo-burst: $(RUNTIME)  ## Watch pools grow and shrink with a burst of images, in about a minute
	$(BIN)/python -m examples.burst

check: lint  ## While you work: lint, types, and the unit tests that are quick and start no process
	$(PYTEST) $(WORKERS) -q -p no:schemathesis --hypothesis-profile=check -o asyncio_debug=false -m "not slow and not extended" tests/unit

test: lint  ## All unit tests, contracts, simulations, and one pass of each surface end to end
	$(PYTEST) $(WORKERS) -rsfE --durations=10 -m "not extended"

test-all: test  ## The rest of the suite
	$(PYTEST) $(FEWER) -rsfE --durations=10 -m extended

test-compose: $(STAMP)  ## Build the images and run docker-compose.yml; as root on Debian without Docker, on an engine of its own
	TRIPTYCH_TEST_COMPOSE=$${TRIPTYCH_TEST_COMPOSE:-1} $(BIN)/python -m pytest -s --durations=10 $(PYTEST_ARGS) tests/compose

test-compose-quick: $(STAMP)  ## The part of it that continuous integration runs: healthy, a question, a killed encoder
	TRIPTYCH_TEST_COMPOSE=$${TRIPTYCH_TEST_COMPOSE:-1} $(BIN)/python -m pytest -s --durations=10 -m "not extended" $(PYTEST_ARGS) tests/compose

test-models: $(STAMP)  ## Test tiny models of every type that the generic family serves, and the table in docs/models.md
	rm -f build/models.json
	PYTHONPATH=$$(scripts/torchvision.sh $(BIN)/python) TRIPTYCH_TEST_MODELS=$(CURDIR)/build/models.json \
		$(PYTEST) $(FEWER) -rsfE --durations=10 tests/models
	$(BIN)/python -m tests.models.table build/models.json --check

test-vllm:  ## Test with vLLM as the engine, on a CPU, in an environment of its own (see vllm-environment)
	rm -f build/vllm-families.json
	TRIPTYCH_TEST_VLLM_FAMILIES=$(CURDIR)/build/vllm-families.json \
		$$(scripts/vllm_environment.sh) -m pytest $(VLLM_TESTS) $(PYTEST_ARGS)
	[ -n "$(PYTEST_ARGS)" ] || $$(scripts/vllm_environment.sh) -m tests.vllm.table build/vllm-families.json

test-vllm-quick:  ## The part of it that continuous integration runs: the demo model
	$$(scripts/vllm_environment.sh) -m pytest -m "not extended" $(VLLM_TESTS) $(PYTEST_ARGS)

test-transformers: $(STAMP)  ## Test against the transformers release VERSION= (creates an environment under build/)
	scripts/test_transformers.sh "$(VERSION)" $(PYTEST_ARGS)

soak: $(STAMP)  ## For SOAK_MINUTES: fresh seeds of simulations and properties, pulls and processes hit under load, watched for leaks
	$(BIN)/python -m benchmarks.soak --minutes $(SOAK_MINUTES) --json build/soak.json

papers: $(STAMP)  ## Tables of the papers, each row beside what cost functions and simulations say (some minutes)
	$(BIN)/python -m benchmarks.papers

mutants: $(STAMP)  ## Mutation tests of policies and machines: list the changes that no test detects
	scripts/mutants.sh --samples $(SAMPLES) $(MODULES)

lint: $(STAMP)  ## Check formatting, lint, strict types, import contracts, generated code and pages
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	PYTHON=$(BIN)/python proto/generate.sh --check
	$(BIN)/python -m scripts.dashboards --check
	$(BIN)/python -m scripts.results --check
	$(BIN)/python -m scripts.fidelity --check
	$(BIN)/python -m scripts.request_fields --check
	$(BIN)/python -m scripts.owners --check

format: $(STAMP)  ## Format, and fix lint errors that can be fixed automatically
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

dashboards: $(STAMP)  ## Write Grafana's dashboards from scripts/dashboards.py
	$(BIN)/python -m scripts.dashboards

lock: $(STAMP)  ## Write the versions that the images install, deploy/images/requirements; the newest with UPGRADE=1
	$(BIN)/python scripts/lock.py --torch $(TORCH) $(if $(UPGRADE),--upgrade)

proto: $(STAMP)  ## Generate src/triptych/v1 from proto/
	PYTHON=$(BIN)/python proto/generate.sh

bench: $(STAMP)  ## Run, at a small size, the benchmarks that no test runs
	mkdir -p build/bench
	for name in disaggregation preemption hedging burst; do $(BIN)/python -m benchmarks.$$name --quick --json build/bench/$$name.json || exit; done

vllm-environment:  ## Create the environment with vLLM for CPUs (4.5 GB in the user's cache, several minutes)
	scripts/vllm_environment.sh

vllm-client: $(STAMP)  ## Run vLLM's benchmark client against a local cluster, in that environment; ENGINE=vllm takes vLLM's engine
	ENGINE=$(or $(ENGINE),triptych) scripts/vllm_client.sh $(RESULT)

model: $(STAMP)  ## Train and evaluate the demo model (about 20 minutes)
	$(BIN)/python examples/demo_model/train.py --out build/demo-model
	$(BIN)/python examples/demo_model/evaluate.py --model build/demo-model

clean:  ## Remove everything that was generated
	rm -rf $(VENV) build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis
