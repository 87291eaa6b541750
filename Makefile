# One command per habit. `make serve` and `make check` build what they need by themselves.
#
#   make serve      a running server on http://127.0.0.1:8000 (ARGS="--port 9000" adds flags)
#   make serve-agents  the same with a context of 32,768 tokens, for coding agents (docs/agents.md)
#   make test       the CPU tests, in two processes (ARGS="tests/models -n 0": some, in one)
#   make test-slow  the long ones (TOPSPIN_SOAK_S=60: a short soak)
#   make test-clients  litellm, lm-eval, Claude Code, Codex and others against a server; their
#                   environments are made under CLIENTS=.venvs from pip's and npm's registries
#   make coverage   the tests, with a record of the lines that each of them runs
#   make mutants    what `make coverage` recorded, by folder, and how many changes of the product the
#                   tests notice (ARGS="--mutants 20 --seed 1")
#   make check      all that must hold before a commit; rewrites nothing
#   make fix        formats and mends what ruff can mend
#   make bench      every benchmark, as JSON on stdout or under benchmarks/results
#   make bench-peers  the comparison with vLLM, llama.cpp and ik_llama.cpp
#                   (ARGS="--llama-cpp DIR --ik-llama-cpp DIR --vllm FILE")
#   make map        the files that one streamed token passes (ARGS=--write: into docs/architecture.md)
#   make gpu        what a GPU shows in 8 minutes: smoke tests, rooflines, decode (GPU_PYTHON=python3)

PYTHON ?= python3
GPU_PYTHON ?= python3
VENV ?= .venv
MODEL ?= smollm2-moe
ARGS ?=
CLIENTS ?= .venvs
CONTEXT =

# Which torch build is installed is pip's configuration (PIP_EXTRA_INDEX_URL and so on).
INSTALL = $(VENV)/bin/python .ci/install.py
RUN = $(VENV)/bin/python -P -m
PYTEST = $(VENV)/bin/python -m pytest
# Two processes, each of which starts engines of several threads or processes.
TESTS = $(PYTEST) -n 2 --dist worksteal -m "not slow and not gpu and not clients"

PACKAGES = app topspin models kernels m2n_comm spec_decode attention_nodes expert_nodes draft_nodes server deploy
SOURCES = $(PACKAGES) tests benchmarks docs .ci

BENCHMARKS = vs_transformers scheduler_overhead transport.m2n transport.pingpong quality.payload \
  engine.disaggregation engine.startup kernels.cpu_kernels gateway.command

.PHONY: help serve serve-agents venv test test-slow test-clients coverage mutants check fix bench bench-peers map gpu clean

help:
	@sed -n 's/^#   //p' Makefile

venv: $(VENV)/.installed-test

$(VENV)/bin/python:
	$(PYTHON) -m venv $(VENV)

# Stamps: a second run installs nothing, a changed pyproject.toml installs again.
$(VENV)/.installed: pyproject.toml | $(VENV)/bin/python
	@$(INSTALL) -e .
	touch $@

$(VENV)/.installed-test: pyproject.toml | $(VENV)/bin/python
	@$(INSTALL) -e ".[test]"
	touch $@ $(VENV)/.installed

serve: $(VENV)/.installed
	$(VENV)/bin/topspin pull $(MODEL)
	exec $(VENV)/bin/topspin serve $(MODEL) $(CONTEXT) $(ARGS)

# The default model was made for 8,192 positions: YaRN stretches them. A turn that waits behind another
# agent's long prompt is not refused for that.
serve-agents: CONTEXT = --kv-cache-memory 1GiB --max-ttft 0 --hf-overrides '{"max_position_embeddings": 32768, \
  "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8192}}'
serve-agents: serve

# Tests start many small processes on few cores: one OpenMP thread each is fastest.
test test-slow test-clients coverage mutants check: export OMP_NUM_THREADS ?= 1
# And each would compile our sources anew where Python is told to keep no compiled ones.
test test-slow test-clients coverage check: export PYTHONDONTWRITEBYTECODE =

test: $(VENV)/.installed-test
	$(TESTS) $(ARGS)

test-slow: $(VENV)/.installed-test
	$(VENV)/bin/topspin pull $(MODEL)
	$(PYTEST) -n 2 --dist worksteal -m "slow and not gpu" $(ARGS)

test-clients: $(VENV)/.installed-test
	TOPSPIN_CLIENT_ENVIRONMENTS=$(abspath $(CLIENTS)) $(PYTEST) tests/clients -m clients $(ARGS)

coverage: $(VENV)/.installed-test
	@$(INSTALL) -e ".[coverage]"
	rm -f .coverage*
	COVERAGE_PROCESS_START=$(abspath .ci/coverage.ini) PYTHONPATH=.ci $(TESTS) -p test_contexts $(ARGS)
	$(RUN) coverage combine --quiet

mutants: $(VENV)/.installed-test
	$(VENV)/bin/python .ci/mutants.py $(wildcard $(PACKAGES)) $(ARGS)

check: $(VENV)/.installed-test
	$(RUN) ruff format --check $(wildcard $(SOURCES))
	$(RUN) ruff check $(wildcard $(SOURCES))
	$(RUN) mypy
	$(VENV)/bin/lint-imports
	$(VENV)/bin/python .ci/lines.py $(wildcard $(SOURCES))
	$(TESTS) $(ARGS)

fix: $(VENV)/.installed-test
	$(RUN) ruff format $(wildcard $(SOURCES))
	$(RUN) ruff check --fix $(wildcard $(SOURCES))

bench: $(VENV)/.installed-test
	$(VENV)/bin/topspin pull $(MODEL)
	@set -e; for name in $(BENCHMARKS); do \
	  echo "== $$name"; $(VENV)/bin/python -m benchmarks.$$name; \
	done

bench-peers: $(VENV)/.installed-test
	$(VENV)/bin/topspin pull $(MODEL)
	$(VENV)/bin/python -m benchmarks.peers $(ARGS)

map: $(VENV)/.installed-test
	$(VENV)/bin/topspin pull $(MODEL)
	$(VENV)/bin/python -m benchmarks.token_path $(MODEL) $(ARGS)

# Each part ends by itself in its time; one that hangs is stopped a little later.
gpu:
	@status=0; for part in "smoke 180" "rooflines 125" "decode 170"; do set -- $$part; \
	  echo "== $$1"; timeout --kill-after=5 $$2 $(GPU_PYTHON) -m benchmarks.gpu.$$1 $(ARGS) \
	    || { echo "make gpu: $$1 failed or did not end" >&2; status=1; }; \
	done; exit $$status

clean:
	rm -rf $(VENV)
