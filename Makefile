# Each target sets up what it needs (tools/venv) and runs. PYTHON=... chooses the Python.

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.PHONY: help demo test test-slow test-megatron lint format clean clean-venvs

# Everything runs from the checkout, never from an installed copy.
export PYTHONPATH := $(CURDIR)

WORKERS ?= 2
ARGS ?=
# One thread for each worker: more only fight over the cores.
PYTEST = OMP_NUM_THREADS=$${OMP_NUM_THREADS:-1} $$venv/bin/python -m pytest --require-parity \
	-n $(WORKERS) --dist worksteal

help: ## list the targets
	@grep -E '^[a-z-]+:.*##' Makefile | sed -E 's/^([a-z-]+):.*## (.*)/  make \1\t\2/' | expand -t 24

demo: ## convert a GLM-5.2-shaped checkpoint both ways, audit it, then lose its MTP layer
	@venv=$$(tools/venv base); $$venv/bin/python tools/demo.py

test: ## the tests, with torch, transformers and megatron-core; ARGS="-k word" for some
	@venv=$$(tools/venv test); $(PYTEST) -m "not slow" $(ARGS)

test-slow: ## the tests that take longer
	@venv=$$(tools/venv test); $(PYTEST) -m slow $(ARGS)

test-megatron: ## the tests that need megatron-core; for a second Python: PYTHON=python3.12
	@venv=$$(tools/venv test); $(PYTEST) -m megatron $(ARGS)

lint: ## style, docstring coverage, types, import contracts
	@venv=$$(tools/venv lint); \
	echo "== ruff check"; $$venv/bin/python -m ruff check .; \
	echo "== ruff format"; $$venv/bin/python -m ruff format --check .; \
	echo "== docstring coverage"; $$venv/bin/python -m ruff check --select D1 --ignore D105,D107 mtpconv tools; \
	echo "== mypy --strict"; $$venv/bin/python -m mypy; \
	echo "== import contracts"; $$venv/bin/lint-imports

format: ## format the code and sort the imports
	@venv=$$(tools/venv lint); \
	$$venv/bin/python -m ruff check --fix --quiet .; $$venv/bin/python -m ruff format .

clean: ## remove what the tools left in the checkout
	rm -rf build dist .hypothesis .import_linter_cache .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venvs: ## remove the environments of every checkout from the cache
	rm -rf "$${XDG_CACHE_HOME:-$$HOME/.cache}/mtpconv/venvs" .venv
