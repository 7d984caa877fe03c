# SPDX-License-Identifier: Apache-2.0
# make serve and make test are the two commands; both set up what they need.

# the first that is Python 3.11 or newer, .venv's own aside where it is activated
PYTHON ?= $(shell PATH=$$(printf %s ":$$PATH:" | sed 's|:$(CURDIR)/.venv/bin:|:|g'); \
	for p in python3 python3.11 python3.12 python3.13 python3.14; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	&& { command -v $$p; break; }; done)
ARGS ?=
BIN := .venv/bin

.DEFAULT_GOAL := help
.PHONY: help setup serve test lint conformance clean

help: ## say what each command does
	@grep -hE '^[a-z]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z]+):.*## /make \1|/' \
		| while IFS='|' read -r command what; do printf '  %-18s %s\n' "$$command" "$$what"; done

setup: ## make .venv whole: vLLM, tools, simulator, the series on a copy of vLLM
	@test -n "$(PYTHON)" || { echo "no Python 3.11 or newer on the path:" \
		"install one, or name it with PYTHON=/path/to/python" >&2; exit 1; }
	@"$(PYTHON)" tools/bootstrap.py

serve: setup ## serve a model with KV offload, on the GPU or the simulator (MODEL=, PORT=, ARGS=)
	@exec $(BIN)/python -m vllm_rocm_memory.serve $(ARGS)

test: setup ## run every test that this machine can run (ARGS= goes to pytest)
	@$(BIN)/python -m pytest $(ARGS)

lint: setup ## ruff, ruff format, mypy --strict and clang-format over the whole tree
	@PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/pre-commit run --all-files

conformance: setup ## run vLLM 0.33.0's own KV offload tests on the patched tree
	@$(BIN)/python tools/conformance.py $(ARGS)

clean: ## remove .venv, caches and everything that was built
	rm -rf .venv .cache build dist *.egg-info vllm_rocm_memory/_native \
		.hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
